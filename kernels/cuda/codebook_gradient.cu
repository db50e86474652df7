// Sums of a block's rows by code, the codebook gradient where one-hot products do not pay:
//
//   sums[p][c][k] = sum over the rows o of part p with code[o, s(c)] = k of block[o, c]
//
// for the columns c of some whole groups, where block = dY^T X is [O, columns] and s(c) is c's
// sub-vector. The parts and the sub-vectors of a group are summed by the caller, in fixed order.
//
// Layout: block [rows, columns] without gaps, bf16, f16 or f32; codes u8 [rows, code_bytes]; sums
// float32 [parts, K, padded] with padded = whole groups * 128, zero where c >= columns.
// Called by bonsai_ft/ops/cuda_kernels.py with 32 threads, grid (padded / 32, parts, 1) and
// 32 * K * 4 bytes of dynamic shared memory. Assumes first_column to be a multiple of 128.
// Tested by tests/test_cuda_kernels.py.
//
// A lane owns one column and its K sums in shared memory, at a bank of its own: no atomics, and
// the rows are added in order. 32 KiB at K = 256 leave room for at least three blocks everywhere.
#include "decode.cuh"

namespace {

constexpr int kAtOnce = 8;

template <typename T>
__device__ void sum_by_code(const T* block, const u8* codes, float* sums, i64 rows, i64 columns,
                            i64 first_column, i64 code_bytes, int k, int dim, int code_bits,
                            i64 rows_per_part, float* shared) {
  const int lane = threadIdx.x;
  const i64 c = i64(blockIdx.x) * kWarp + lane;
  const i64 padded = i64(gridDim.x) * kWarp;
  float* own = shared + lane;
  for (int i = 0; i < k; ++i) own[i * kWarp] = 0.0f;
  if (c < columns) {
    const i64 s = (first_column + c) / dim;
    const i64 first = blockIdx.y * rows_per_part;
    const i64 last = first + rows_per_part < rows ? first + rows_per_part : rows;
    for (i64 r = first; r < last; r += kAtOnce) {
      float values[kAtOnce];
      int chosen[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const i64 row = r + i < last ? r + i : last - 1;
        values[i] = float_of(block[row * columns + c]);
        chosen[i] = code_at(codes + row * code_bytes, s, code_bits);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (r + i < last) own[chosen[i] * kWarp] += values[i];
      }
    }
  }
  float* out = sums + i64(blockIdx.y) * k * padded + c;
  for (int i = 0; i < k; ++i) out[i * padded] = own[i * kWarp];
}

}  // namespace

#define SUM_BY_CODE(T)                                                                             \
  extern "C" __global__ void __launch_bounds__(kWarp) sum_by_code_##T(                             \
      const T* __restrict__ block, const u8* __restrict__ codes, float* __restrict__ sums,         \
      i64 rows, i64 columns, i64 first_column, i64 code_bytes, i64 k, i64 dim, i64 code_bits,      \
      i64 rows_per_part) {                                                                         \
    DYNAMIC_SHARED(float, shared);                                                                 \
    sum_by_code(block, codes, sums, rows, columns, first_column, code_bytes, int(k), int(dim),     \
                int(code_bits), rows_per_part, shared);                                            \
  }

typedef float f32;
SUM_BY_CODE(bf16)
SUM_BY_CODE(f16)
SUM_BY_CODE(f32)
