// What the kernels need of a device that CUDA C++ has no header-free name for: 16-bit floats,
// loads of a chosen width, and the tensor cores' product.
//
// NVRTC compiles the kernels without any header but these. On the host shim of tests/cuda_shim,
// which defines BONSAI_HOST_SHIM and the usual CUDA names, the few lines of PTX are replaced by
// plain C++. Everything here exists from sm_80 on; no architecture is named.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct bf16 {
  u16 bits;
};
struct f16 {
  u16 bits;
};

#ifdef BONSAI_HOST_SHIM
#define DYNAMIC_SHARED(T, name) T* name = static_cast<T*>(shim::dynamic_shared())
#else
#define DYNAMIC_SHARED(T, name) extern __shared__ T name[]
#endif

constexpr int kWarp = 32;
// Inputs that share a scale and a codebook: GROUP of bonsai_ft/format/packing.py.
constexpr int kGroup = 128;

__device__ inline float float_of(float value) { return value; }
__device__ inline float float_of(bf16 value) { return __uint_as_float(u32(value.bits) << 16); }

#ifdef BONSAI_HOST_SHIM

__device__ inline float float_of(f16 value) { return shim::float_of_half(value.bits); }
template <typename T>
__device__ inline u32 pair_of(float low, float high);
template <>
__device__ inline u32 pair_of<bf16>(float low, float high) {
  return shim::bfloat_of(low) | u32(shim::bfloat_of(high)) << 16;
}
template <>
__device__ inline u32 pair_of<f16>(float low, float high) {
  return shim::half_of(low) | u32(shim::half_of(high)) << 16;
}

#else

__device__ inline float float_of(f16 value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}
// Two floats rounded to 16 bits, the first in the low half.
template <typename T>
__device__ inline u32 pair_of(float low, float high);
template <>
__device__ inline u32 pair_of<bf16>(float low, float high) {
  u32 result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}
template <>
__device__ inline u32 pair_of<f16>(float low, float high) {
  u32 result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

#endif

template <typename T>
__device__ inline T rounded(float value) {
  return T{u16(pair_of<T>(value, 0.0f))};
}
template <>
__device__ inline float rounded<float>(float value) {
  return value;
}

// A load or store of all bytes of V at once; the address must be a multiple of its size.
template <typename V>
__device__ inline V load(const void* address) {
#ifdef BONSAI_HOST_SHIM
  shim::check_alignment(address, sizeof(V));
#endif
  return *static_cast<const V*>(address);
}
template <typename V>
__device__ inline void store(void* address, V value) {
#ifdef BONSAI_HOST_SHIM
  shim::check_alignment(address, sizeof(V));
#endif
  *static_cast<V*>(address) = value;
}
__device__ inline bool is_aligned(const void* address, int bytes) {
  return (reinterpret_cast<u64>(address) & u64(bytes - 1)) == 0;
}

// Keeps the compiler from computing a value again and again, next to each of its uses.
__device__ inline void keep(u32& value) {
#ifndef BONSAI_HOST_SHIM
  asm volatile("" : "+r"(value));
#endif
}

// d += A B on a warp's tensor core: A 16 x 16 (row by row), B 16 x 8 (column by column), d 16 x 8.
// Lane l holds, with r = l / 4 and c = 2 * (l % 4), pairs of consecutive elements along the
// contracted axis: a[0] = A[r][c..], a[1] = A[r + 8][c..], a[2] = A[r][c + 8..],
// a[3] = A[r + 8][c + 8..]; b0 = B[c..][r], b1 = B[c + 8..][r]; d = D[r][c], D[r][c + 1],
// D[r + 8][c], D[r + 8][c + 1]. All 32 lanes must call it together.
template <typename T>
__device__ inline void multiply_add(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);
#ifdef BONSAI_HOST_SHIM
template <>
__device__ inline void multiply_add<bf16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  shim::multiply_add(d, a, b0, b1, shim::float_of_bfloat);
}
template <>
__device__ inline void multiply_add<f16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  shim::multiply_add(d, a, b0, b1, shim::float_of_half);
}
#else
template <>
__device__ inline void multiply_add<bf16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void multiply_add<f16>(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// a b + c for two 16-bit floats each, rounded once.
template <typename T>
__device__ inline u32 multiply_add_pair(u32 a, u32 b, u32 c);
#ifdef BONSAI_HOST_SHIM
template <typename T>
__device__ inline u32 multiply_add_pair(u32 a, u32 b, u32 c) {
  const auto half = [&](int i) {
    const auto value = [&](u32 pair) { return float_of(T{u16(pair >> 16 * i)}); };
    // exact in double but for the last sum, whose rounding no kernel relies on
    return float(double(value(a)) * value(b) + value(c));
  };
  return pair_of<T>(half(0), half(1));
}
#else
template <>
__device__ inline u32 multiply_add_pair<bf16>(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
template <>
__device__ inline u32 multiply_add_pair<f16>(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
#endif

// Sum over the `lanes` (a power of two) neighbours of this lane, in an order that is the same for
// all of them. The whole warp must call it.
__device__ inline float sum_over(float value, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  return value;
}
