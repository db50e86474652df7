// Plain C++ for every instruction set, in an anonymous namespace: included by scalar.cpp (baseline)
// and by neon.cpp and others that improve on parts of it.
//
//   unpack   w_j = scale_g * (code_j - 1), looked up in a table of four values per group
//   dot      y = sum_g scale_g * sum_j sign_j * x_j in float32, four rows at a time
#pragma once

#include <cstring>

#include "numbers.h"
#include "ternary.h"

namespace {
namespace plain {

template <typename T>
void unpack_row(const uint8_t* bytes, const uint16_t* scale, int64_t scale_step, int64_t columns,
                T* dst, T (*round)(float)) {
  for (int64_t begin = 0; begin < columns; begin += kGroup) {
    float s = f16_to_float(scale[scale_step * (begin / kGroup)]);
    const T table[4] = {round(-s), round(0.0f), round(s), round(0.0f)};
    int64_t end = begin + kGroup < columns ? begin + kGroup : columns;
    int64_t j = begin;
    for (; j + 4 <= end; j += 4) {
      unsigned byte = bytes[j / 4];
      dst[j] = table[byte & 3];
      dst[j + 1] = table[(byte >> 2) & 3];
      dst[j + 2] = table[(byte >> 4) & 3];
      dst[j + 3] = table[byte >> 6];
    }
    for (; j < end; ++j) dst[j] = table[(bytes[j / 4] >> (2 * (j % 4))) & 3];
  }
}

inline float keep(float value) { return value; }

inline void unpack(const uint8_t* bytes, const uint16_t* scale, int64_t scale_step,
                   int64_t columns, Dtype dtype, void* dst) {
  if (dtype == kFloat32) {
    unpack_row<float>(bytes, scale, scale_step, columns, static_cast<float*>(dst), keep);
  } else {
    unpack_row<uint16_t>(bytes, scale, scale_step, columns, static_cast<uint16_t*>(dst),
                         dtype == kBFloat16 ? float_to_bf16 : float_to_f16);
  }
}

// x in whole groups, the last one filled with zeros, so that a group's loop has a fixed length
inline size_t prepared_bytes(int64_t columns, int) {
  return size_t(ceil_div(columns, kGroup) * kGroup) * sizeof(float);
}

inline void prepare(const float* x, int64_t columns, int, void* prepared) {
  std::memcpy(prepared, x, size_t(columns) * sizeof(float));
  std::memset(static_cast<float*>(prepared) + columns, 0,
              prepared_bytes(columns, 0) - size_t(columns) * sizeof(float));
}

inline void dot(const uint8_t* const* bytes, const uint16_t* const* scale, int64_t scale_step,
                int rows, int64_t columns, int, const void* const* prepared, int tokens, float* y,
                int64_t y_stride) {
  for (int r = 0; r < rows; ++r) {
    for (int m = 0; m < tokens; ++m) y[r * y_stride + m] = 0.0f;
    for (int64_t g = 0; g * kGroup < columns; ++g) {
      float signs[kGroup];
      int64_t left = columns - g * kGroup;
      int64_t num_bytes = left < kGroup ? (left + 3) / 4 : kGroup / 4;
      const uint8_t* group = bytes[r] + g * (kGroup / 4);
      for (int64_t b = 0; b < num_bytes; ++b) {
        for (int i = 0; i < 4; ++i) signs[4 * b + i] = float(int((group[b] >> (2 * i)) & 3) - 1);
      }
      for (int64_t j = 4 * num_bytes; j < kGroup; ++j) signs[j] = 0.0f;
      float s = f16_to_float(scale[r][scale_step * g]);
      for (int m = 0; m < tokens; ++m) {
        const float* x = static_cast<const float*>(prepared[m]) + g * kGroup;
        float lanes[8] = {};
        for (int j = 0; j < kGroup; j += 8) {
          for (int l = 0; l < 8; ++l) lanes[l] += signs[j + l] * x[j + l];
        }
        float sum = 0.0f;
        for (int l = 0; l < 8; ++l) sum += lanes[l];
        y[r * y_stride + m] += s * sum;
      }
    }
  }
}

inline void products(const float* a, const float* b, int64_t stride, int count, int64_t length,
                     float* out) {
  for (int i = 0; i < count; ++i) {
    const float* row = b + i * stride;
    float lanes[16] = {};
    int64_t j = 0;
    for (; j + 16 <= length; j += 16) {
      for (int l = 0; l < 16; ++l) lanes[l] += a[j + l] * row[j + l];
    }
    float sum = 0.0f;
    for (; j < length; ++j) sum += a[j] * row[j];
    for (int l = 0; l < 16; ++l) sum += lanes[l];
    out[i] = sum;
  }
}

}  // namespace plain
}  // namespace
