// What the CPU kernels share: the layer's layout, and what one instruction set has to offer.
//
// Layout (bonsai_ft/format/packing.py):
//   ternary  u8 [out, bytes]   2 bits: weight j of a row is bits 2*(j%4) of byte j/4, code = sign+1
//                              base 3: byte = sum_i (sign_i + 1) * 3^i over five signs
//   scale    f16 [out, G] or [out, 1], G = ceil(in / 128)
//   codes    u8 [out, bytes]   b bits per sub-vector, least significant first
//   codewords f32 [G, K, d]    sub-vector s of a row belongs to group s / (128 / d)
//
// Everything here has C linkage or lives in an anonymous namespace of one translation unit, so that
// code compiled for one instruction set can never be merged with that of another by the linker.
#pragma once

#include <cstddef>
#include <cstdint>

constexpr int64_t kGroup = 128;

enum Dtype : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
enum Packing : int32_t { kTwoBit = 0, kBase3 = 1 };

// Mirrored field by field by `Layer` in bonsai_ft/ops/cpu_kernels.py.
struct Layer {
  const uint8_t* ternary;
  const uint16_t* scale;
  const uint8_t* codes;     // null without a residual
  const float* codewords;   // null without a residual
  int64_t out_features;
  int64_t in_features;
  int64_t ternary_stride;   // bytes per row
  int64_t scale_stride;     // scales per row: G, or 1 for one scale per row
  int64_t codes_stride;     // bytes per row
  int32_t packing;
  int32_t code_bits;        // 1, 2, 4 or 8
  int32_t codewords_k;      // K
  int32_t codewords_dim;    // d
};

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t num_groups(const Layer& layer) { return ceil_div(layer.in_features, kGroup); }
static inline int64_t num_subvectors(const Layer& layer) {
  return layer.codes ? ceil_div(layer.in_features, layer.codewords_dim) : 0;
}

// Rows that `Isa::dot` takes at once.
constexpr int kRows = 4;

// One instruction set. `bytes` are always rows of 2-bit codes; base-3 rows are turned into them
// first. No function reads a byte beyond `ceil(columns / 4)` or writes beyond `columns`.
struct Isa {
  const char* name;
  // dst[0..columns) = scale of the column's group * sign, rounded to `dtype`; the row starts at a
  // group boundary; scale_step is 1, or 0 where all groups share scale[0]
  void (*unpack)(const uint8_t* bytes, const uint16_t* scale, int64_t scale_step, int64_t columns,
                 Dtype dtype, void* dst);
  // bytes that `prepare` fills per token
  size_t (*prepared_bytes)(int64_t columns, int planes);
  // brings x[0..columns) into the form that `dot` wants
  void (*prepare)(const float* x, int64_t columns, int planes, void* prepared);
  // y[r * y_stride + m] = sum_j scale * sign * x for `rows` <= kRows rows and all tokens
  void (*dot)(const uint8_t* const* bytes, const uint16_t* const* scale, int64_t scale_step,
              int rows, int64_t columns, int planes, const void* const* prepared, int tokens,
              float* y, int64_t y_stride);
  // out[i] = sum_j a[j] * b[i * stride + j]
  void (*products)(const float* a, const float* b, int64_t stride, int count, int64_t length,
                   float* out);
  // `dot` plus the residual for K = 4: y += sum_s table[m][4 s + code[r, s]]; null where it would
  // not be faster than adding it afterwards
  void (*dot4)(const uint8_t* const* bytes, const uint16_t* const* scale, int64_t scale_step,
               int rows, int64_t columns, int planes, const void* const* prepared, int tokens,
               float* y, int64_t y_stride, const uint8_t* const* codes, int64_t subvectors,
               const float* table, int64_t table_stride);
};

extern "C" {
const Isa* bonsai_isa_scalar();
const Isa* bonsai_isa_avx2();    // null where the processor or the compiler does not have it
const Isa* bonsai_isa_avx512();
const Isa* bonsai_isa_neon();
}
