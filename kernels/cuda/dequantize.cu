// A block of W for a library product: rows first_row.. and columns first_column.. of
//
//   out = [ S*T | 0 | Z | 0 ]     or     out = [ S*T + R | 0 ]
//
// in bf16, f16 or f32, each part padded with zero columns to a multiple of 8. Z holds the one-hot
// columns of the codes of sub-vectors first_subvector..; S*T + R is rounded once, from float32.
//
// Layout: ternary u8 [O, ternary_bytes], scale f16 [O, scale_columns], codes u8 [O, code_bytes],
// codewords float32 [G, K, d] (no address: R is not added), out [rows, width] without gaps and
// aligned to 16 bytes.
// Called by bonsai_ft/ops/cuda_kernels.py with 256 threads, grid (width / 256, rows / 32, 1), both
// rounded up. Assumes that first_column is a multiple of 128 and, where the block does not end with
// the row, `columns` too; any address of the inputs and any row length are good.
// Tested by tests/test_cuda_kernels.py.
//
// A thread owns 8 columns, one 16-byte store in 16 bits, of kRows rows: what depends on the column
// alone is computed once, and the loads of all its rows are under way together.
#include "decode.cuh"

namespace {

constexpr int kWarps = 8;
constexpr int kRows = 4;
constexpr int kColumns = 8;

struct Block {
  const u8* ternary;
  const f16* scale;
  const u8* codes;
  const float* codewords;
  int first_row, rows, first_column, columns;
  int ternary_bytes, scale_columns, code_bytes, k, dim, code_bits, first_subvector, subvectors;
};

// Eight neighbours of one row on their way to memory.
template <typename T>
struct Chunk {
  static constexpr int kWords = kColumns * sizeof(T) / 4;
  u32 words[kWords];

  __device__ void set(int pair, float low, float high) {
    if constexpr (sizeof(T) == 4) {
      words[2 * pair] = __float_as_uint(low);
      words[2 * pair + 1] = __float_as_uint(high);
    } else {
      words[pair] = pair_of<T>(low, high);
    }
  }

  __device__ void write(T* out) const {
    for (int i = 0; i < kWords; i += 4) {
      store(reinterpret_cast<u32*>(out) + i,
            uint4{words[i], words[i + 1], words[i + 2], words[i + 3]});
    }
  }
};

// 2-bit codes of 8 columns from column c on, a multiple of 8.
__device__ u32 codes_of(const Block& block, const u8* row, u32 c, bool is_base3) {
  const u8* end = row + block.ternary_bytes;
  if (is_base3) {
    const u8* p = row + c / 5;
    u32 bytes = p[0];
    if (p + 1 < end) bytes |= u32(p[1]) << 8;
    if (p + 2 < end) bytes |= u32(p[2]) << 16;
    return base3_codes(bytes, int(c % 5)) & 0xffff;
  }
  const u8* p = row + c / 4;
  if (is_aligned(p, 2) && p + 2 <= end) return load<u16>(p);
  return p + 1 < end ? p[0] | u32(p[1]) << 8 : p[0];
}

// code - 1 times a scale given by its bits.
__device__ inline float signed_scale(u32 code, u32 scale_bits) {
  return __uint_as_float((scale_bits ^ (~code & 2) << 30) & ((code & 1) - 1));
}

// R in 8 columns from c on, of which `valid` exist.
__device__ void residual_of(const Block& block, int row, int c, int valid, float (&r)[kColumns]) {
  const u8* codes = block.codes + i64(row) * block.code_bytes;
  const float* book = block.codewords + c / kGroup * block.k * block.dim;
  if (block.dim >= kColumns) {
    const int code = code_at(codes, c / block.dim, block.code_bits);
    const float* word = book + code * block.dim + c % block.dim;
    if (is_aligned(word, 16)) {
      for (int i = 0; i < kColumns; i += 4) {
        const float4 four = load<float4>(word + i);
        r[i] = four.x, r[i + 1] = four.y, r[i + 2] = four.z, r[i + 3] = four.w;
      }
    } else {
      for (int i = 0; i < kColumns; ++i) r[i] = word[i];
    }
  } else {
    for (int i = 0; i < kColumns; ++i) {
      if (i >= valid) break;
      const int code = code_at(codes, (c + i) / block.dim, block.code_bits);
      r[i] = book[code * block.dim + (c + i) % block.dim];
    }
  }
  for (int i = 0; i < kColumns; ++i) {
    if (i >= valid) r[i] = 0.0f;
  }
}

template <typename T>
__device__ void write_weights(const Block& block, T* out, int width, int chunk, int first,
                              bool is_base3) {
  const int c = block.first_column + kColumns * chunk;
  const int left = block.columns - kColumns * chunk;
  const int valid = left < kColumns ? left : kColumns;
  const u32 kept = (1u << 2 * valid) - 1;
  u32 codes[kRows];
  float scales[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    // rows past the end repeat the last one, so that no load waits for a branch
    const int r = first + i * kWarps;
    const int row = block.first_row + (r < block.rows ? r : block.rows - 1);
    codes[i] = codes_of(block, block.ternary + i64(row) * block.ternary_bytes, u32(c), is_base3);
    scales[i] = scale_at(block.scale, row, block.scale_columns, c / kGroup);
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int r = first + i * kWarps;
    if (r >= block.rows) break;
    const u32 row_codes = (codes[i] & kept) | (0x5555u & ~kept);
    Chunk<T> result;
    if (block.codewords != nullptr || sizeof(T) == 4) {
      float residual[kColumns] = {};
      if (block.codewords != nullptr) {
        residual_of(block, block.first_row + r, c, valid, residual);
      }
      const u32 bits = __float_as_uint(scales[i]);
#pragma unroll
      for (int j = 0; j < kColumns / 2; ++j) {
        const float low = signed_scale(row_codes >> 4 * j, bits);
        const float high = signed_scale(row_codes >> (4 * j + 2), bits);
        result.set(j, low + residual[2 * j], high + residual[2 * j + 1]);
      }
    } else if constexpr (sizeof(T) == 2) {
      const u32 pair = pair_of<T>(scales[i], scales[i]);
      const u32 ones = ones_of<T>(block.rows >> 31);
#pragma unroll
      for (int j = 0; j < kColumns / 2; ++j) {
        // code 2 j at bit 4 j, code 2 j + 1 sixteen bits further on
        const u32 signs = signs_of<T>(row_codes | row_codes << 14, 4 * j, ones);
        // -0 is what leaves every product as it is
        result.words[j] = multiply_add_pair<T>(signs, pair, 0x80008000u);
      }
    }
    result.write(out + i64(r) * width);
  }
}

template <typename T>
__device__ void write_one_hot(const Block& block, T* out, int width, int chunk, int first) {
  const u32 column = u32(kColumns * chunk);
  const u32 first_s = column / block.k;
  const u32 first_k = column % block.k;
  for (int i = 0; i < kRows; ++i) {
    const int r = first + i * kWarps;
    if (r >= block.rows) break;
    const u8* codes = block.codes + i64(block.first_row + r) * block.code_bytes;
    int s = int(first_s);
    int k = int(first_k), code = -1;
    float ones[kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      if ((j == 0 || k == 0) && s < block.subvectors) {
        code = code_at(codes, block.first_subvector + s, block.code_bits);
      }
      ones[j] = s < block.subvectors && code == k ? 1.0f : 0.0f;
      if (++k == block.k) k = 0, ++s;
    }
    Chunk<T> result;
#pragma unroll
    for (int j = 0; j < kColumns / 2; ++j) result.set(j, ones[2 * j], ones[2 * j + 1]);
    result.write(out + i64(r) * width);
  }
}

template <typename T>
__device__ void dequantize(const Block& block, T* out, bool is_base3) {
  const int chunk = blockIdx.x * kWarp + threadIdx.x % kWarp;
  const int first = blockIdx.y * kWarps * kRows + threadIdx.x / kWarp;
  const int of_weights = (block.columns + kColumns - 1) / kColumns;
  const int of_one_hot = (block.subvectors * block.k + kColumns - 1) / kColumns;
  const int width = (of_weights + of_one_hot) * kColumns;
  if (chunk * kColumns >= width || first >= block.rows) return;
  out += chunk * kColumns;
  if (chunk < of_weights) {
    write_weights(block, out, width, chunk, first, is_base3);
  } else {
    write_one_hot(block, out, width, chunk - of_weights, first);
  }
}

}  // namespace

typedef float f32;

#define DEQUANTIZE(T)                                                                           \
  extern "C" __global__ void __launch_bounds__(kWarps* kWarp) dequantize_##T(                   \
      const u8* __restrict__ ternary, const f16* __restrict__ scale,                            \
      const u8* __restrict__ codes, const float* __restrict__ codewords, T* __restrict__ out,   \
      i64 first_row, i64 rows, i64 first_column, i64 columns, i64 ternary_bytes,                \
      i64 scale_columns, i64 code_bytes, i64 k, i64 dim, i64 code_bits, i64 first_subvector,    \
      i64 subvectors, i64 packing) {                                                            \
    const Block block = {ternary, scale, codes, codewords, int(first_row), int(rows),           \
                         int(first_column), int(columns), int(ternary_bytes),                   \
                         int(scale_columns), int(code_bytes), int(k), int(dim),                 \
                         int(code_bits), int(first_subvector), int(subvectors)};                \
    dequantize(block, out, packing == kBase3);                                                  \
  }

DEQUANTIZE(bf16)
DEQUANTIZE(f16)
DEQUANTIZE(f32)
