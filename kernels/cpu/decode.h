// One token through a decoder of the Llama family, for a few sequences at once.
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

// Mirrored field by field in bonsai_ft/ops/cpu_decode.py.

// y = W x + bias + B (A x): a packed layer with what an adapter adds
struct Linear {
  Layer layer;
  const float* bias;     // [out], or null
  const float* lora_a;   // [rank, in], or null
  const float* lora_b;   // [out, rank], scaled
  int64_t rank;
};

struct Block {
  Linear query, key, value, output, gate, up, down;
  const float* input_norm;
  const float* post_norm;
  const float* query_norm;   // per head, or null
  const float* key_norm;
};

struct Decoder {
  const Block* blocks;
  int64_t num_blocks;
  int64_t hidden, heads, kv_heads, head_dim, intermediate, vocabulary;
  const void* embedding;     // [vocabulary, hidden] of `dtype`
  const void* head;          // [vocabulary, hidden] of `dtype`
  const float* head_bias;    // or null
  const float* final_norm;
  const float* cosines;      // [positions, head_dim]
  const float* sines;
  void* cache;               // [blocks][2: keys, values][sequences][kv_heads][positions][head_dim]
  int64_t positions;         // room per sequence
  int64_t sequences;
  float eps;
  float attention_scale;
  int32_t dtype;             // of embedding, head and cache
  int32_t activation;
};
