// Arithmetic beside the packed products (decoder blocks, dropout): written once in plain loops, and
// compiled for each instruction set by math_avx512.cpp, math_avx2.cpp and math_plain.cpp.
//
//   norm      out = x / sqrt(mean(x^2) + eps) * weight
//   dots      out[i] = row_i . x                 rows in float32, bfloat16 or float16
//   mix       out = sum_i weights[i] row_i
//   softmax   x = exp(x - max) / sum
//   gate      out = act(gate) * up
//   rotate    the two halves (a, b) of a head become (a cos - b sin, b cos + a sin)
//   drop      dropout with the mask of a seed (dropout.cpp)
#pragma once

#include <cstdint>
#include <cstring>

#include "arithmetic.h"
#include "numbers.h"

namespace {

constexpr int kLanes = 16;

// e^x to about 2 units in the last place; 0 below -87, clamped above 88
inline float exp_of(float x) {
  x = x > 88.0f ? 88.0f : x;
  float n = x * 1.44269504f;
  // adding 1.5 * 2^23 rounds to the nearest whole number
  float whole = (n + 12582912.0f) - 12582912.0f;
  float r = x - whole * 0.693359375f;
  r = r + whole * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  float value = p * r * r + r + 1.0f;
  int32_t exponent = int32_t(whole < -126.0f ? -126.0f : whole);
  float power = bits_to_float(uint32_t(exponent + 127) << 23);
  return x < -87.0f ? 0.0f : value * power;
}

inline float tanh_of(float x) {
  float magnitude = x < 0 ? -x : x;
  float e = exp_of(-2.0f * magnitude);
  float t = (1.0f - e) / (1.0f + e);
  return x < 0 ? -t : t;
}

inline float as_float(float value) { return value; }

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
inline float as_float(BFloat16 value) { return bf16_to_float(value.bits); }
inline float as_float(Float16 value) { return f16_to_float(value.bits); }

// pairwise, so that the additions do not wait for each other
inline float sum_of(const float (&lanes)[2 * kLanes]) {
  float a[kLanes], b[kLanes / 2], c[kLanes / 4];
  for (int l = 0; l < kLanes; ++l) a[l] = lanes[l] + lanes[l + kLanes];
  for (int l = 0; l < kLanes / 2; ++l) b[l] = a[l] + a[l + kLanes / 2];
  for (int l = 0; l < kLanes / 4; ++l) c[l] = b[l] + b[l + kLanes / 4];
  return (c[0] + c[2]) + (c[1] + c[3]);
}

template <typename T>
inline float dot_row(const T* row, const float* x, int64_t n) {
  float lanes[2 * kLanes] = {};
  int64_t j = 0;
  for (; j + 2 * kLanes <= n; j += 2 * kLanes) {
    for (int l = 0; l < 2 * kLanes; ++l) lanes[l] += as_float(row[j + l]) * x[j + l];
  }
  float rest = 0.0f;
  for (; j < n; ++j) rest += as_float(row[j]) * x[j];
  return sum_of(lanes) + rest;
}

template <typename T>
void dots_of(const T* rows, int64_t stride, int64_t count, const float* x, int64_t n, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = dot_row(rows + i * stride, x, n);
}

void dots(Dtype dtype, const void* rows, int64_t stride, int64_t count, const float* x, int64_t n,
          float* out) {
  if (dtype == kFloat32) dots_of(static_cast<const float*>(rows), stride, count, x, n, out);
  if (dtype == kBFloat16) dots_of(static_cast<const BFloat16*>(rows), stride, count, x, n, out);
  if (dtype == kFloat16) dots_of(static_cast<const Float16*>(rows), stride, count, x, n, out);
}

template <typename T>
void mix_of(const T* rows, int64_t stride, int64_t count, const float* weights, int64_t n,
            float* out) {
  for (int64_t j = 0; j < n; ++j) out[j] = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const T* row = rows + i * stride;
    const float w = weights[i];
    for (int64_t j = 0; j < n; ++j) out[j] += w * as_float(row[j]);
  }
}

void mix(Dtype dtype, const void* rows, int64_t stride, int64_t count, const float* weights,
         int64_t n, float* out) {
  if (dtype == kFloat32) mix_of(static_cast<const float*>(rows), stride, count, weights, n, out);
  if (dtype == kBFloat16) {
    mix_of(static_cast<const BFloat16*>(rows), stride, count, weights, n, out);
  }
  if (dtype == kFloat16) {
    mix_of(static_cast<const Float16*>(rows), stride, count, weights, n, out);
  }
}

void norm(const float* x, const float* weight, float eps, int64_t n, float* out) {
  float sum = dot_row(x, x, n);
  float factor = 1.0f / __builtin_sqrtf(sum / float(n) + eps);
  for (int64_t j = 0; j < n; ++j) out[j] = x[j] * factor * weight[j];
}

void softmax(float* x, int64_t n, float scale) {
  float top = x[0];
  for (int64_t i = 1; i < n; ++i) top = x[i] > top ? x[i] : top;
  for (int64_t i = 0; i < n; ++i) x[i] = exp_of((x[i] - top) * scale);
  float lanes[2 * kLanes] = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    for (int l = 0; l < 2 * kLanes; ++l) lanes[l] += x[i + l];
  }
  float sum = sum_of(lanes);
  for (; i < n; ++i) sum += x[i];
  const float factor = 1.0f / sum;
  for (i = 0; i < n; ++i) x[i] *= factor;
}

void gate(int activation, const float* gates, const float* ups, int64_t n, float* out) {
  for (int64_t j = 0; j < n; ++j) {
    float g = gates[j];
    if (activation == kSilu) {
      g = g / (1.0f + exp_of(-g));
    } else {
      // GELU's tanh form
      g = 0.5f * g * (1.0f + tanh_of(0.79788456f * (g + 0.044715f * g * g * g)));
    }
    out[j] = g * ups[j];
  }
}

void rotate(float* head, const float* cosines, const float* sines, int64_t half) {
  for (int64_t j = 0; j < half; ++j) {
    float a = head[j], b = head[j + half];
    head[j] = a * cosines[j] - b * sines[j];
    head[j + half] = b * cosines[j + half] + a * sines[j + half];
  }
}

// out[k * out_stride + j] += sum_i a[i * a_stride + k] * x[i][j] for a few tokens i
template <typename T>
void outer_of(const T* a, int64_t a_stride, const T* x, int64_t x_stride, int tokens, int64_t k,
              int64_t n, float* out, int64_t out_stride) {
  for (int64_t row = 0; row < k; ++row) {
    float* to = out + row * out_stride;
    if (tokens == 4) {
      const float w0 = as_float(a[row]), w1 = as_float(a[a_stride + row]);
      const float w2 = as_float(a[2 * a_stride + row]), w3 = as_float(a[3 * a_stride + row]);
      for (int64_t j = 0; j < n; ++j) {
        to[j] += (w0 * as_float(x[j]) + w1 * as_float(x[x_stride + j])) +
                 (w2 * as_float(x[2 * x_stride + j]) + w3 * as_float(x[3 * x_stride + j]));
      }
      continue;
    }
    for (int i = 0; i < tokens; ++i) {
      const float w = as_float(a[i * a_stride + row]);
      for (int64_t j = 0; j < n; ++j) to[j] += w * as_float(x[i * x_stride + j]);
    }
  }
}

void outer(Dtype dtype, const void* a, int64_t a_stride, const void* x, int64_t x_stride,
           int tokens, int64_t k, int64_t n, float* out, int64_t out_stride) {
  if (dtype == kFloat32) {
    outer_of(static_cast<const float*>(a), a_stride, static_cast<const float*>(x), x_stride,
             tokens, k, n, out, out_stride);
  } else if (dtype == kBFloat16) {
    outer_of(static_cast<const BFloat16*>(a), a_stride, static_cast<const BFloat16*>(x), x_stride,
             tokens, k, n, out, out_stride);
  } else {
    outer_of(static_cast<const Float16*>(a), a_stride, static_cast<const Float16*>(x), x_stride,
             tokens, k, n, out, out_stride);
  }
}

inline uint64_t split_mix(uint64_t state) {
  state ^= state >> 30;
  state *= 0xbf58476d1ce4e5b9ull;
  state ^= state >> 27;
  state *= 0x94d049bb133111ebull;
  return state ^ (state >> 31);
}

inline void store(float* out, float value) { *out = value; }
inline void store(BFloat16* out, float value) { out->bits = float_to_bf16(value); }
inline void store(Float16* out, float value) { out->bits = float_to_f16(value); }

template <typename T>
void drop_of(const T* x, int64_t count, uint64_t state, uint32_t threshold, float factor, T* out) {
  constexpr int kNumbers = 64;
  uint64_t numbers[kNumbers];
  for (int64_t begin = 0; begin < count; begin += 4 * kNumbers) {
    for (int i = 0; i < kNumbers; ++i) {
      numbers[i] = split_mix(state + uint64_t(begin / 4 + i + 1) * 0x9e3779b97f4a7c15ull);
    }
    uint16_t parts[4 * kNumbers];
    std::memcpy(parts, numbers, sizeof parts);
    const int64_t length = count - begin < 4 * kNumbers ? count - begin : 4 * kNumbers;
    for (int64_t j = 0; j < length; ++j) {
      float scale = parts[j] < threshold ? 0.0f : factor;
      store(out + begin + j, as_float(x[begin + j]) * scale);
    }
  }
}

void drop(Dtype dtype, const void* x, int64_t count, uint64_t state, uint32_t threshold,
          float factor, void* out) {
  if (dtype == kFloat32) {
    drop_of(static_cast<const float*>(x), count, state, threshold, factor,
            static_cast<float*>(out));
  } else if (dtype == kBFloat16) {
    drop_of(static_cast<const BFloat16*>(x), count, state, threshold, factor,
            static_cast<BFloat16*>(out));
  } else {
    drop_of(static_cast<const Float16*>(x), count, state, threshold, factor,
            static_cast<Float16*>(out));
  }
}

}  // namespace
