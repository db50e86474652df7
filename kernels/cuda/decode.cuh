// Packed bytes -> signs, scales and codes, in registers (formats: bonsai_ft/format/packing.py).
//
// Both packings become one form on the way: 2-bit codes, sign + 1 in {0, 1, 2}, first column in
// the lowest bits. "2bit" is stored like that. A "base3" byte b holds five digits; with the
// quotients q_i = b / 3^i its codes are sum_i (q_i - 3 q_(i+1)) 4^i = b + q_1 + 4 q_2 + 16 q_3 +
// 64 q_4, which needs no table: the quotients are products with 16-bit reciprocals, two bytes in
// one register.
//
// Included by every kernel of this folder, and tested through them.
#pragma once

#include "device.cuh"

constexpr int kBase3 = 1;  // values of the argument `packing`: 0 is "2bit"

// Codes of four base-3 bytes, first byte lowest: 40 bits, of which the 32 from `skip` codes on are
// returned (skip 0..4).
__device__ inline u32 base3_codes(u32 bytes, int skip) {
  u32 codes[2];
  for (int i = 0; i < 2; ++i) {
    // bytes 0 and 2, then 1 and 3, each in 16 bits; the products stay below 2^16
    const u32 two = bytes >> 8 * i & 0x00ff00ffu;
    const u32 by3 = two * 171 >> 9 & 0x007f007fu;
    const u32 by9 = two * 57 >> 9 & 0x001f001fu;
    const u32 by27 = two * 19 >> 9 & 0x000f000fu;
    const u32 by81 = two * 203 >> 14 & 0x00030003u;
    codes[i] = two + by3 + 4 * by9 + 16 * by27 + 64 * by81;
  }
  const u32 low = (codes[0] & 0x3ff) | (codes[1] & 0x3ff) << 10;
  const u32 high = codes[0] >> 16 | codes[1] >> 16 << 10;
  return __funnelshift_r(low | high << 20, high >> 12, 2 * skip);
}

// How codes lie in the mantissa of a 16-bit float: kCodes of them beside each other, from bit
// kLowest on.
template <typename T>
struct Format;
template <>
struct Format<bf16> {
  static constexpr int kMantissa = 7, kBias = 127, kCodes = 3, kLowest = 1;
};
template <>
struct Format<f16> {
  static constexpr int kMantissa = 10, kBias = 15, kCodes = 5, kLowest = 0;
};

// The number 1 twice, what `signs_of` puts codes into. `zero` must be 0 without the compiler's
// knowing it: an instruction has room for one constant, and a known 1 would drive out the mask,
// which then costs a move for every pair.
template <typename T>
__device__ inline u32 ones_of(int zero) {
  return 0x00010001u * (Format<T>::kBias << Format<T>::kMantissa) + u32(zero);
}

// The codes at bits `offset` and `offset` + 16 (offset even, below 16) as two signs, exactly.
//
// With the code c in its mantissa a float is v = 1 + c / 2^q for a q that its place gives, and the
// sign is 2^q v - (2^q + 1): a bit operation and a fused multiply-add for two signs, and a shift
// for each three (bf16) or five (f16) such pairs where `offset` is known when compiling.
template <typename T>
__device__ inline u32 signs_of(u32 codes, int offset, u32 ones) {
  typedef Format<T> F;
  const int shift = offset / (2 * F::kCodes) * (2 * F::kCodes) - F::kLowest;
  const int lowest = offset - shift, q = F::kMantissa - lowest;
  const u32 moved = shift < 0 ? codes << -shift : codes >> shift;
  const u32 v = (moved & 0x00030003u << lowest) | ones;
  const u32 power = (F::kBias + q) << F::kMantissa;
  return multiply_add_pair<T>(v, 0x00010001u * power,
                              0x00010001u * (0x8000u | power | 1u << lowest));
}

// Eight bytes from `p` on, at any address, of which those outside begin..end read as 0.
__device__ inline u64 bytes_at(const u8* p, const u8* begin, const u8* end) {
  const int before = int(reinterpret_cast<u64>(p) & 3);
  const u8* word = p - before;
  if (word >= begin && word + 12 <= end) {
    const u32 w0 = load<u32>(word), w1 = load<u32>(word + 4), w2 = load<u32>(word + 8);
    return __funnelshift_r(w0, w1, 8 * before) | u64(__funnelshift_r(w1, w2, 8 * before)) << 32;
  }
  u64 bytes = 0;
  // rare: the ends of a tensor; unrolled it would crowd out what is not
#pragma unroll 1
  for (int i = 0; i < 8; ++i) {
    if (p + i < end) bytes |= u64(p[i]) << 8 * i;
  }
  return bytes;
}

// S of one row at one group; a single scale per row serves all groups.
__device__ inline float scale_at(const f16* scale, i64 row, i64 scale_columns, i64 group) {
  return float_of(scale[row * scale_columns + (scale_columns == 1 ? 0 : group)]);
}

// The code of sub-vector s in a row of packed codes of 1, 2, 4 or 8 bits.
__device__ inline int code_at(const u8* row, int s, int bits) {
  const int bit = s * bits;
  return row[bit >> 3] >> (bit & 7) & ((1 << bits) - 1);
}
