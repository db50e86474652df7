// 16-bit floats on the host: conversions for one number at a time, round to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

#include "ternary.h"

namespace {

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float bf16_to_float(uint16_t half) { return bits_to_float(uint32_t(half) << 16); }

inline uint16_t float_to_bf16(float value) {
  uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40u);
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float f16_to_float(uint16_t half) {
  uint32_t sign = uint32_t(half & 0x8000u) << 16;
  uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  // the exponent's bias differs by 112; the product normalises subnormal numbers exactly
  float value = bits_to_float(magnitude << 13) * bits_to_float(0x77800000u);
  return bits_to_float(float_to_bits(value) | sign);
}

inline uint16_t float_to_f16(float value) {
  uint32_t bits = float_to_bits(value);
  uint16_t sign = uint16_t((bits >> 16) & 0x8000u);
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {
    // subnormal: adding 2^-1 shifts the mantissa to where float32 rounds at 2^-24
    float shifted = bits_to_float(magnitude) + 0.5f;
    return uint16_t(sign | (float_to_bits(shifted) - 0x3f000000u));
  }
  uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return uint16_t(sign | ((rounded - 0x38000000u) >> 13));
}

inline float load_as_float(Dtype dtype, const void* data, int64_t i) {
  if (dtype == kFloat32) return static_cast<const float*>(data)[i];
  uint16_t half = static_cast<const uint16_t*>(data)[i];
  return dtype == kBFloat16 ? bf16_to_float(half) : f16_to_float(half);
}

inline void store_as(Dtype dtype, void* data, int64_t i, float value) {
  if (dtype == kFloat32) {
    static_cast<float*>(data)[i] = value;
  } else {
    static_cast<uint16_t*>(data)[i] =
        dtype == kBFloat16 ? float_to_bf16(value) : float_to_f16(value);
  }
}

inline size_t size_of(Dtype dtype) { return dtype == kFloat32 ? 4 : 2; }

}  // namespace
