// What one instruction set computes beside the packed products; the loops are in math_loops.h.
#pragma once

#include "ternary.h"

enum Activation : int32_t { kSilu = 0, kGeluTanh = 1 };

struct Math {
  void (*norm)(const float* x, const float* weight, float eps, int64_t n, float* out);
  void (*dots)(Dtype dtype, const void* rows, int64_t stride, int64_t count, const float* x,
               int64_t n, float* out);
  void (*mix)(Dtype dtype, const void* rows, int64_t stride, int64_t count, const float* weights,
              int64_t n, float* out);
  void (*softmax)(float* x, int64_t n, float scale);
  void (*gate)(int activation, const float* gates, const float* ups, int64_t n, float* out);
  void (*rotate)(float* head, const float* cosines, const float* sines, int64_t half);
  // out[k * out_stride + j] += sum over `tokens` of a[i * a_stride + k] * x[i * x_stride + j]
  void (*outer)(Dtype dtype, const void* a, int64_t a_stride, const void* x, int64_t x_stride,
                int tokens, int64_t k, int64_t n, float* out, int64_t out_stride);
  // dropout.cpp; `state` is that of the first four elements
  void (*drop)(Dtype dtype, const void* x, int64_t count, uint64_t state, uint32_t threshold,
               float factor, void* out);
};

// for the instruction set in use
const Math& bonsai_current_math();

extern "C" {
const Math* bonsai_math_plain();
const Math* bonsai_math_avx2();    // null where the compiler does not have it
const Math* bonsai_math_avx512();
}
