// y for few tokens without ever writing a weight:
//
//   y[m, o] = sum_g S[o, g] sum_(j in g) T[o, j] x[m, j] + sum_s P[m, s, code[o, s]]
//
// in two launches. `prepare` brings what depends on x alone into the form that `linear` wants: x in
// the order of the tensor core's fragments, and P = x_s C_s^T.
//
// `linear` gives a warp 16 * R rows and every 8th group. The weights are the tensor core's first
// operand, exactly -1, 0 and 1: products are exact, sums are float32, and S is applied to a group's
// partial sum. Decoding costs little more than one operation per weight (`signs_of`), for one token
// as for sixteen. Which k of the tensor core is which column is free as long as both operands
// agree: a lane takes the 16 codes of a word in pairs (i, i + 8), which lie 16 bits apart.
//
// float32 inputs are split into three bf16 terms of 8 bits each whose sum is exact.
//
// Layout: x [M, x_stride], ternary u8 [O, ternary_bytes], scale f16 [O, scale_columns], codes u8
// [O, code_bytes], codewords float32 [G, K, d], y [M, O]. Tokens are padded to tiles of 8:
// fragments u32 [G, tiles, terms, 4, 32, 4], products float32 [S K, 8 * tiles], both aligned to 16
// bytes.
// Called by bonsai_ft/ops/cuda_kernels.py: `prepare` with 128 threads, grid (G, tiles, 1);
// `linear8` (one tile of tokens and 16 rows a block) and `linear16` (two, and 32 rows) with 256
// threads, grid (O / rows, tiles / tiles a block, 1), rounded up. Assumes nothing of the other
// addresses and lengths; packed rows that are multiples of 8 bytes are faster.
// Sums over warps are made in fixed order: same input, same bits.
// Tested by tests/test_cuda_kernels.py.
#include "decode.cuh"

namespace {

constexpr int kWarps = 8;
constexpr int kTile = 8;     // tokens in the tensor core's second operand
constexpr int kRowsOf = 16;  // rows in its first
constexpr int kParts = 4;    // 16-byte pieces of a lane's share of a group of x

typedef float f32;

// The 16-bit float that the signs become for the tensor core, and how many such terms x takes.
template <typename T>
struct Operand {
  typedef T Element;
  static constexpr int kTerms = 1;
};
template <>
struct Operand<f32> {
  typedef bf16 Element;
  static constexpr int kTerms = 3;
};

// ---- prepare

constexpr int kPrepareThreads = 128;
constexpr int kPitch = 144;

// Columns of x in shared memory: 4 floats of room after every 32, so that the lanes of a fragment
// meet in no bank.
__device__ inline int place(int column) { return column + column / 32 * 4; }

// The next bf16 term of two floats, cut off (not rounded) so that what is left over is exact.
__device__ inline u32 cut(float& low, float& high) {
  const u32 low_bits = __float_as_uint(low) & 0xffff0000u;
  const u32 high_bits = __float_as_uint(high) & 0xffff0000u;
  low -= __uint_as_float(low_bits);
  high -= __uint_as_float(high_bits);
  return low_bits >> 16 | high_bits;
}

template <typename T>
__device__ void write_fragments(const float (&x)[kTile][kPitch], u32* fragments) {
  const int lane = threadIdx.x % kWarp, part = threadIdx.x / kWarp;
  // 32 columns belong to a lane, 16 to one of its words of codes, and 4 + 4 of those to this part
  const int column = 32 * (lane % 4) + 16 * (part / 2) + 4 * (part % 2);
  const float4 a = load<float4>(&x[lane / 4][place(column)]);
  const float4 b = load<float4>(&x[lane / 4][place(column + 8)]);
  float low[4] = {a.x, a.y, a.z, a.w}, high[4] = {b.x, b.y, b.z, b.w};
  for (int term = 0; term < Operand<T>::kTerms; ++term) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        words[i] = cut(low[i], high[i]);
      } else {
        words[i] = pair_of<T>(low[i], high[i]);
      }
    }
    store(fragments + ((term * kParts + part) * kWarp + lane) * 4,
          uint4{words[0], words[1], words[2], words[3]});
  }
}

// P of this group's sub-vectors: dim / length neighbouring threads share a dot product.
__device__ void write_products(const float (&x)[kTile][kPitch], const float* codewords,
                               float* products, int tokens, i64 padded_tokens, int subvectors,
                               int k, int dim) {
  const int length = dim < 8 ? dim : 8;
  const int lanes = dim / length;
  const int dots = subvectors * k;
  const int part = threadIdx.x % lanes;
  for (int first = 0; first < dots; first += kPrepareThreads / lanes) {
    const int dot = first + threadIdx.x / lanes;
    const int begin = dot / k * dim + part * length;
    float word[8] = {}, sums[kTile] = {};
    for (int i = 0; i < length; ++i) {
      if (dot < dots) word[i] = codewords[dot % k * dim + part * length + i];
    }
    for (int m = 0; m < tokens; ++m) {
      float sum = 0.0f;
      for (int i = 0; i < length; ++i) {
        if (dot < dots) sum += word[i] * x[m][place(begin + i)];
      }
      sum = sum_over(sum, lanes);
#pragma unroll
      for (int n = 0; n < kTile; ++n) {
        if (n == m) sums[n] = sum;
      }
    }
    if (dot < dots && part == 0) {
      float* out = products + dot * padded_tokens;
      store(out, float4{sums[0], sums[1], sums[2], sums[3]});
      store(out + 4, float4{sums[4], sums[5], sums[6], sums[7]});
    }
  }
}

template <typename T>
__device__ void prepare(float (&tile)[kTile][kPitch], const T* x, const float* codewords,
                        u32* fragments, float* products, i64 tokens, i64 in_features,
                        i64 x_stride, int k, int dim) {
  const i64 group = blockIdx.x, first_token = i64(blockIdx.y) * kTile;
  const i64 padded_tokens = i64(gridDim.y) * kTile;
  const i64 left = tokens - first_token;
  const int live = left < kTile ? int(left) : kTile;
  const i64 column = group * kGroup + threadIdx.x;
  for (int m = 0; m < kTile; ++m) {
    tile[m][place(threadIdx.x)] = m < live && column < in_features
                                      ? float_of(x[(first_token + m) * x_stride + column])
                                      : 0.0f;
  }
  __syncthreads();
  write_fragments<T>(tile, fragments + (group * gridDim.y + blockIdx.y) * Operand<T>::kTerms *
                                           kParts * kWarp * 4);
  if (codewords != nullptr) {
    const int per_group = kGroup / dim;
    const i64 first = group * per_group;
    const i64 rest = (in_features + dim - 1) / dim - first;
    write_products(tile, codewords + group * k * dim,
                   products + first * k * padded_tokens + first_token, live, padded_tokens,
                   rest < per_group ? int(rest) : per_group, k, dim);
  }
}

// ---- linear

struct Layer {
  const u8* ternary;
  const f16* scale;
  const u8* codes;
  int out_features, groups, ternary_bytes, scale_columns, code_bytes, subvectors, k, code_bits;
};

struct Prepared {
  const u32* fragments;
  const float* products;
  int tokens, tiles;
};

// What a lane reads for its tokens and rows. Tokens, tiles and rows past the end repeat the last
// one and are not written: no load waits for a branch, and a line that is read twice comes once.
template <int R, int N>
struct Lane {
  u32 fragments[N];  // where in Prepared
  u32 products[N];
  int rows[R][2];
  int quarter;  // which 32 columns of a group
  u32 ones;
};

template <typename T>
constexpr int kFragment = Operand<T>::kTerms * kParts * kWarp * 4;

__device__ inline int at_most(int value, int limit) { return value < limit ? value : limit; }

template <typename T, int R, int N>
__device__ inline Lane<R, N> lane_of(const Layer& layer, const Prepared& x) {
  const int lane = threadIdx.x % kWarp;
  Lane<R, N> mine;
  mine.quarter = lane % 4;
  // no number of tokens is negative
  mine.ones = ones_of<typename Operand<T>::Element>(x.tokens >> 31);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int tile = at_most(blockIdx.y * N + n, x.tiles - 1);
    const int token = at_most(lane / 4, x.tokens - 1 - tile * kTile);
    mine.fragments[n] = tile * kFragment<T> + (4 * token + lane % 4) * 4;
    mine.products[n] = tile * kTile + lane % 4 * 2;
    keep(mine.fragments[n]);
    keep(mine.products[n]);
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      mine.rows[r][h] = at_most(blockIdx.x * kRowsOf * R + kRowsOf * r + 8 * h + lane / 4,
                                layer.out_features - 1);
    }
  }
  return mine;
}

// What a row of signs looks like: "aligned" where every row begins and ends at a multiple of 8
// bytes, as 32 n inputs do, so that no lane's 8 bytes lie across a row's end.
enum class Rows { two_bit_aligned, two_bit, base3 };

// A lane's 32 codes of one row: columns 128 * group + 32 * quarter on. What lies past the row's
// end meets zeros of x, so that it may be anything, but past the last row nothing is read.
template <Rows kForm>
__device__ inline uint2 codes_of(const Layer& layer, int row, int group, int quarter) {
  const u8* line = layer.ternary + i64(row) * layer.ternary_bytes;
  const u32 column = group * kGroup + 32 * quarter;
  if constexpr (kForm == Rows::two_bit_aligned) {
    return load<uint2>(line + at_most(column / 4, layer.ternary_bytes - 8));
  } else {
    const u8* begin = layer.ternary;
    const u8* end = begin + i64(layer.out_features) * layer.ternary_bytes;
    if constexpr (kForm == Rows::two_bit) {
      const u64 bytes = bytes_at(line + column / 4, begin, end);
      return {u32(bytes), u32(bytes >> 32)};
    } else {
      const u64 bytes = bytes_at(line + column / 5, begin, end);
      const int skip = column % 5;
      return {base3_codes(u32(bytes), skip),
              base3_codes(u32(bytes >> 8 * ((skip + 16) / 5)), (skip + 1) % 5)};
    }
  }
}

// One group: acc += S T x for 16 * R rows and 8 * N tokens. codes[r][h] is row 16 r + 8 h + lane/4.
template <typename T, int R, int N>
__device__ inline void add_group(float (&acc)[R][N][4], const uint2 (&codes)[R][2],
                                 const float (&scales)[R][2], const Lane<R, N>& mine,
                                 const Prepared& x, int group) {
  typedef typename Operand<T>::Element Element;
  float partial[R][N][4] = {};
  const u32 of_group = group * x.tiles * kFragment<T>;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    u32 weights[R][2][4];
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        // steps i / 4 of the tensor core; its registers are rows 0 and 8, then k and k + 8
        const uint2 words = codes[r][i % 2];
        weights[r][i / 4][i % 4] =
            signs_of<Element>(part < 2 ? words.x : words.y, 8 * (part % 2) + i / 2 * 2, mine.ones);
      }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int term = 0; term < Operand<T>::kTerms; ++term) {
        const uint4 b = load<uint4>(x.fragments + (mine.fragments[n] + of_group) +
                                    (term * kParts + part) * kWarp * 4);
#pragma unroll
        for (int r = 0; r < R; ++r) {
          multiply_add<Element>(partial[r][n], weights[r][0], b.x, b.y);
          multiply_add<Element>(partial[r][n], weights[r][1], b.z, b.w);
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        acc[r][n][i] += scales[r][i / 2] * partial[r][n][i];
      }
    }
  }
}

template <typename T, Rows kForm, int R, int N>
__device__ inline void add_groups(float (&acc)[R][N][4], const Layer& layer,
                                  const Lane<R, N>& mine, const Prepared& x) {
  // the loads of this many groups are under way together
  constexpr int kAhead = R == 1 ? 4 : 1;
  for (int first = threadIdx.x / kWarp; first < layer.groups; first += kAhead * kWarps) {
    uint2 codes[kAhead][R][2];
    float scales[kAhead][R][2];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int group = at_most(first + a * kWarps, layer.groups - 1);
#pragma unroll
      for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          codes[a][r][h] = codes_of<kForm>(layer, mine.rows[r][h], group, mine.quarter);
          scales[a][r][h] = scale_at(layer.scale, mine.rows[r][h], layer.scale_columns, group);
        }
      }
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int group = first + a * kWarps;
      if (group < layer.groups) {
        add_group<T, R, N>(acc, codes[a], scales[a], mine, x, group);
      }
    }
  }
}

// acc += P[s, code] for every 8th sub-vector s.
template <int R, int N>
__device__ inline void add_residual(float (&acc)[R][N][4], const Layer& layer,
                                    const Lane<R, N>& mine, const Prepared& x) {
#pragma unroll 4
  for (int s = threadIdx.x / kWarp; s < layer.subvectors; s += kWarps) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const u8* codes = layer.codes + i64(mine.rows[r][h]) * layer.code_bytes;
        const u32 place = u32(s * layer.k + code_at(codes, s, layer.code_bits)) * x.tiles * kTile;
#pragma unroll
        for (int n = 0; n < N; ++n) {
          const float2 two = load<float2>(x.products + (mine.products[n] + place));
          acc[r][n][2 * h] += two.x;
          acc[r][n][2 * h + 1] += two.y;
        }
      }
    }
  }
}

// What the warps have summed, [token][row]; 4 rows of room keep a warp's writes in 32 banks.
template <int R, int N>
struct Sums {
  float of[kWarps][kTile * N][kRowsOf * R + 4];
};

template <typename T, bool kIsBase3, int R, int N>
__device__ inline void linear(Sums<R, N>& sums, const Layer& layer, const Prepared& x, T* y) {
  const Lane<R, N> mine = lane_of<T, R, N>(layer, x);
  float acc[R][N][4] = {};
  if constexpr (kIsBase3) {
    add_groups<T, Rows::base3, R, N>(acc, layer, mine, x);
  } else if (is_aligned(layer.ternary, 8) && layer.ternary_bytes % 8 == 0) {
    add_groups<T, Rows::two_bit_aligned, R, N>(acc, layer, mine, x);
  } else {
    add_groups<T, Rows::two_bit, R, N>(acc, layer, mine, x);
  }
  if (layer.codes != nullptr) add_residual<R, N>(acc, layer, mine, x);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums.of[warp][kTile * n + lane % 4 * 2 + i % 2][kRowsOf * r + i / 2 * 8 + lane / 4] =
            acc[r][n][i];
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kTile * N * kRowsOf * R; i += kWarps * kWarp) {
    const int m = i / (kRowsOf * R), r = i % (kRowsOf * R);
    const int token = blockIdx.y * kTile * N + m, row = blockIdx.x * kRowsOf * R + r;
    if (token >= x.tokens || row >= layer.out_features) continue;
    float total = 0.0f;
    for (int w = 0; w < kWarps; ++w) total += sums.of[w][m][r];
    y[i64(token) * layer.out_features + row] = rounded<T>(total);
  }
}

// Blocks that must fit a multiprocessor: two have 128 registers per thread, which three terms of
// float32 for two tiles exceed.
template <typename T, int R>
constexpr int kBlocks = R > 1 && Operand<T>::kTerms > 1 ? 1 : 2;

}  // namespace

#define PREPARE(T)                                                                              \
  extern "C" __global__ void __launch_bounds__(kPrepareThreads) prepare_##T(                    \
      const T* __restrict__ x, const float* __restrict__ codewords,                             \
      u32* __restrict__ fragments, float* __restrict__ products, i64 tokens, i64 in_features,   \
      i64 x_stride, i64 k, i64 dim) {                                                           \
    alignas(16) __shared__ float tile[kTile][kPitch];                                           \
    prepare(tile, x, codewords, fragments, products, tokens, in_features, x_stride, int(k),     \
            int(dim));                                                                          \
  }

#define LINEAR(NAME, T, IS_BASE3, R, N)                                                         \
  extern "C" __global__ void __launch_bounds__(kWarps* kWarp, kBlocks<T, R>) NAME##_##T(        \
      const u32* __restrict__ fragments, const float* __restrict__ products,                    \
      const u8* __restrict__ ternary, const f16* __restrict__ scale,                            \
      const u8* __restrict__ codes, T* __restrict__ y, i64 tokens, i64 tiles, i64 out_features, \
      i64 groups, i64 ternary_bytes, i64 scale_columns, i64 code_bytes, i64 subvectors, i64 k,  \
      i64 code_bits) {                                                                          \
    __shared__ Sums<R, N> sums;                                                                 \
    const Layer layer = {ternary, scale, codes, int(out_features), int(groups),                 \
                         int(ternary_bytes), int(scale_columns), int(code_bytes),               \
                         int(subvectors), int(k), int(code_bits)};                              \
    const Prepared prepared = {fragments, products, int(tokens), int(tiles)};                   \
    linear<T, IS_BASE3, R, N>(sums, layer, prepared, y);                                        \
  }

#define ALL(T)                             \
  PREPARE(T)                               \
  LINEAR(linear8_2bit, T, false, 1, 1)     \
  LINEAR(linear8_base3, T, true, 1, 1)     \
  LINEAR(linear16_2bit, T, false, 2, 2)    \
  LINEAR(linear16_base3, T, true, 2, 2)

ALL(bf16)
ALL(f16)
ALL(f32)
