// One token through a decoder of the Llama family, for a few sequences at once.
#pragma once

#include "ternary.h"

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
