// The kernels for 64-bit ARM processors, with the dot-product instructions where there are some.
//
//   unpack   tbl brings every weight's code into a byte of its own and looks up one byte of the
//            table {-s, 0, s, 0} at a time; st2 / st4 interleave the bytes to weights
//   dot      the method of avx512.cpp on one group at a time: sdot, or smull and sadalp without it
//
// Prepared x, per group: int8 [4][planes][32], byte b of part i belonging to column 4 b + i, as the
// codes lie; int32 [4] minus the lanes' sums of q; float [4] dx.
// Called by linear.cpp. Tested against double precision under an emulator only, qemu-aarch64 as
// a processor with and one without sdot, by tests/test_cpu_driver.py with g++ 12, also with address
// and undefined-behaviour sanitizers; by hand with clang 14 and 22 (22 compiles it for macOS too).
// It has not run on ARM hardware: its speed and its FEW_TOKENS (cpu_kernels.py) are not measured.
#include "ternary.h"

#if defined(__aarch64__) && !defined(__AARCH64EB__) && (defined(__GNUC__) || defined(__clang__))

#include <arm_neon.h>

#include <cmath>
#include <cstring>

#include "numbers.h"
#include "scalar.h"

// sdot: in every build (1), after asking the processor (2), or never
#if defined(__ARM_FEATURE_DOTPROD)
#define BONSAI_SDOT 1
#elif defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 17 : __GNUC__ >= 9)
#define BONSAI_SDOT 2
#include <sys/auxv.h>
#else
#define BONSAI_SDOT 0
#endif

namespace {

// codes of 16 columns, one per byte
inline uint8x16_t codes16(const uint8_t* bytes) {
  static const uint8_t kWhich[16] = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
  static const int8_t kShift[16] = {0, -2, -4, -6, 0, -2, -4, -6, 0, -2, -4, -6, 0, -2, -4, -6};
  uint32_t four;
  std::memcpy(&four, bytes, sizeof four);
  const uint8x16_t spread = vqtbl1q_u8(vreinterpretq_u8_u32(vdupq_n_u32(four)), vld1q_u8(kWhich));
  return vandq_u8(vshlq_u8(spread, vld1q_s8(kShift)), vdupq_n_u8(3));
}

// byte `i` of the four entries of a table
template <typename T>
inline uint8x16_t byte_of(const T (&table)[4], int i) {
  uint8_t bytes[16] = {};
  for (int code = 0; code < 4; ++code) bytes[code] = uint8_t(table[code] >> (8 * i));
  return vld1q_u8(bytes);
}

inline unsigned code_at(const uint8_t* bytes, int64_t j) {
  return (bytes[j / 4] >> (2 * (j % 4))) & 3u;
}

void unpack16(const uint8_t* bytes, const uint16_t* scale, int64_t scale_step, int64_t columns,
              bool is_bf16, uint16_t* dst) {
  for (int64_t begin = 0; begin < columns; begin += kGroup) {
    const uint16_t half = scale[scale_step * (begin / kGroup)];
    const uint16_t entry = is_bf16 ? float_to_bf16(f16_to_float(half)) : half;
    const uint16_t table[4] = {uint16_t(entry ^ 0x8000u), 0, entry, 0};
    const uint8x16_t low = byte_of(table, 0), high = byte_of(table, 1);
    const int64_t end = begin + kGroup < columns ? begin + kGroup : columns;
    int64_t j = begin;
    for (; j + 16 <= end; j += 16) {
      const uint8x16_t codes = codes16(bytes + j / 4);
      const uint8x16x2_t pair = {{vqtbl1q_u8(low, codes), vqtbl1q_u8(high, codes)}};
      vst2q_u8(reinterpret_cast<uint8_t*>(dst + j), pair);
    }
    for (; j < end; ++j) dst[j] = table[code_at(bytes, j)];
  }
}

void unpack32(const uint8_t* bytes, const uint16_t* scale, int64_t scale_step, int64_t columns,
              float* dst) {
  for (int64_t begin = 0; begin < columns; begin += kGroup) {
    const uint32_t entry = float_to_bits(f16_to_float(scale[scale_step * (begin / kGroup)]));
    const uint32_t table[4] = {entry ^ 0x80000000u, 0, entry, 0};
    uint8x16_t parts[4];
    for (int i = 0; i < 4; ++i) parts[i] = byte_of(table, i);
    const int64_t end = begin + kGroup < columns ? begin + kGroup : columns;
    int64_t j = begin;
    for (; j + 16 <= end; j += 16) {
      const uint8x16_t codes = codes16(bytes + j / 4);
      const uint8x16x4_t four = {{vqtbl1q_u8(parts[0], codes), vqtbl1q_u8(parts[1], codes),
                                  vqtbl1q_u8(parts[2], codes), vqtbl1q_u8(parts[3], codes)}};
      vst4q_u8(reinterpret_cast<uint8_t*>(dst + j), four);
    }
    for (; j < end; ++j) dst[j] = bits_to_float(table[code_at(bytes, j)]);
  }
}

void unpack(const uint8_t* bytes, const uint16_t* scale, int64_t scale_step, int64_t columns,
            Dtype dtype, void* dst) {
  if (dtype == kFloat32) {
    unpack32(bytes, scale, scale_step, columns, static_cast<float*>(dst));
  } else {
    unpack16(bytes, scale, scale_step, columns, dtype == kBFloat16, static_cast<uint16_t*>(dst));
  }
}

inline size_t group_bytes(int planes) { return size_t(4 * planes * 32 + 16 + 16); }

size_t prepared_bytes(int64_t columns, int planes) {
  return size_t(ceil_div(columns, kGroup)) * group_bytes(planes);
}

// One group: q of up to 128 columns as signed bytes, in the order of the codes.
void prepare_group(const float* x, int64_t count, int planes, int8_t* out) {
  const float largest = planes == 3 ? 8323072.0f : 32512.0f;  // 127 * 2^16, 127 * 2^8
  float values[kGroup] = {};
  std::memcpy(values, x, size_t(count) * sizeof(float));
  uint32x4_t tops = vdupq_n_u32(0);
  for (int j = 0; j < kGroup; j += 4) {
    tops = vmaxq_u32(tops, vandq_u32(vreinterpretq_u32_f32(vld1q_f32(values + j)),
                                     vdupq_n_u32(0x7fffffffu)));
  }
  const uint32_t top = vmaxvq_u32(tops);
  const float magnitude = bits_to_float(top);
  // an infinity or a NaN must not be lost in the integers: the step carries it into y
  const bool is_finite = top < 0x7f800000u;
  // below it the reciprocal overflows; such a group adds nothing a float32 sum would keep
  const bool is_zero = magnitude < 1e-30f;
  const float step = is_finite ? (is_zero ? 0.0f : magnitude / largest) : NAN;
  const float inverse = is_finite && !is_zero ? largest / magnitude : 0.0f;
  int32_t* sums = reinterpret_cast<int32_t*>(out + 4 * planes * 32);
  vst1q_f32(reinterpret_cast<float*>(sums + 4), vdupq_n_f32(step));

  int8_t digits[3][kGroup];
  int32x4_t sum = vdupq_n_s32(0);
  for (int j = 0; j < kGroup; j += 4) {
    int32x4_t q = vdupq_n_s32(0);
    if (is_finite) q = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(values + j), inverse));
    sum = vaddq_s32(sum, q);
    for (int p = 0; p < planes; ++p) {
      // the low byte as a signed digit, then the rest
      const int32x4_t digit = vshrq_n_s32(vshlq_n_s32(q, 24), 24);
      q = vshrq_n_s32(vsubq_s32(q, digit), 8);
      int32_t four[4];
      vst1q_s32(four, digit);
      for (int i = 0; i < 4; ++i) digits[p][j + i] = int8_t(four[i]);
    }
  }
  vst1q_s32(sums, vnegq_s32(sum));
  for (int p = 0; p < planes; ++p) {
    for (int half = 0; half < 2; ++half) {
      const int8x16x4_t parts = vld4q_s8(digits[p] + 64 * half);
      for (int i = 0; i < 4; ++i) vst1q_s8(out + (i * planes + p) * 32 + 16 * half, parts.val[i]);
    }
  }
}

void prepare(const float* x, int64_t columns, int planes, void* prepared) {
  int8_t* out = static_cast<int8_t*>(prepared);
  for (int64_t begin = 0; begin < columns; begin += kGroup, out += group_bytes(planes)) {
    const int64_t left = columns - begin;
    prepare_group(x + begin, left < kGroup ? left : kGroup, planes, out);
  }
}

#if BONSAI_SDOT != 1
namespace with_smull {

// Eight products of at most 3 * 128 in each 16-bit lane, summed in pairs at the end.
struct Part {
  int16x8_t low, high;
};

inline void multiply(Part& part, int8x16_t codes, int8x16_t digits) {
  part.low = vmlal_s8(part.low, vget_low_s8(codes), vget_low_s8(digits));
  part.high = vmlal_high_s8(part.high, codes, digits);
}

inline int32x4_t finish(const Part& part, int32x4_t sum) {
  return vpadalq_s16(vpadalq_s16(sum, part.low), part.high);
}

#include "neon_dot.h"

}  // namespace with_smull
#endif

#if BONSAI_SDOT
namespace with_sdot {

#if BONSAI_SDOT == 2 && defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#elif BONSAI_SDOT == 2
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif

struct Part {
  int32x4_t sum;
};

inline void multiply(Part& part, int8x16_t codes, int8x16_t digits) {
  part.sum = vdotq_s32(part.sum, codes, digits);
}

inline int32x4_t finish(const Part& part, int32x4_t sum) { return vaddq_s32(sum, part.sum); }

#include "neon_dot.h"

#if BONSAI_SDOT == 2 && defined(__clang__)
#pragma clang attribute pop
#elif BONSAI_SDOT == 2
#pragma GCC pop_options
#endif

}  // namespace with_sdot
#endif

}  // namespace

extern "C" const Isa* bonsai_isa_neon() {
#if BONSAI_SDOT == 1
  static const Isa isa = {"neon",  unpack, prepared_bytes, prepare, with_sdot::dot,
                          plain::products, nullptr};
  return &isa;
#else
  static const Isa isa = {"neon",  unpack, prepared_bytes, prepare, with_smull::dot,
                          plain::products, nullptr};
#if BONSAI_SDOT == 2
  static const Isa isa_sdot = {"neon",  unpack, prepared_bytes, prepare, with_sdot::dot,
                               plain::products, nullptr};
  constexpr unsigned long kHasSdot = 1ul << 20;  // HWCAP_ASIMDDP
  if (getauxval(AT_HWCAP) & kHasSdot) return &isa_sdot;
#endif
  return &isa;
#endif
}

#else

extern "C" const Isa* bonsai_isa_neon() { return nullptr; }

#endif
