// Small kernels that show what the host shim plays truly and what it catches: one sound kernel,
// the same with one fault each, and device.cuh's functions by themselves.
//
// Called by tests/test_cuda_shim.py with one block of 64 threads unless said otherwise; x and y
// hold n float32.
#include "device.cuh"

#define ON(name) extern "C" __global__ void name(const float* x, float* y, i64 n)
#define EACH i64(blockIdx.x) * blockDim.x + threadIdx.x

ON(reverse) {
  __shared__ float all[64];
  all[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = all[63 - threadIdx.x];
}

ON(without_barrier) {
  __shared__ float all[64];
  all[threadIdx.x] = x[threadIdx.x];
  y[threadIdx.x] = all[63 - threadIdx.x];
}

ON(without_second_barrier) {
  __shared__ float all[64];
  all[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  const float other = all[63 - threadIdx.x];
  all[threadIdx.x] = other + 1.0f;
  __syncthreads();
  y[threadIdx.x] = all[threadIdx.x ^ 1];
  all[threadIdx.x] = 0.0f;
}

ON(without_warp_barrier) {
  __shared__ float all[64];
  all[threadIdx.x] = x[threadIdx.x];
  y[threadIdx.x] = all[threadIdx.x ^ 1];
}

ON(with_warp_barrier) {
  __shared__ float all[64];
  all[threadIdx.x] = x[threadIdx.x];
  __syncwarp();
  y[threadIdx.x] = all[threadIdx.x ^ 1];
}

ON(barrier_for_some) {
  if (threadIdx.x < 32) __syncthreads();
  y[threadIdx.x] = x[threadIdx.x];
}

ON(shuffle_for_some) {
  float value = x[threadIdx.x];
  if (threadIdx.x % 2) value = __shfl_xor_sync(0xffffffffu, value, 2);
  y[threadIdx.x] = value;
}

ON(reads_past_the_end) { y[threadIdx.x] = x[threadIdx.x + 1]; }
ON(reads_before_the_start) { y[threadIdx.x] = x[i64(threadIdx.x) - 1]; }
ON(reads_far_away) { y[threadIdx.x] = x[(i64(threadIdx.x) + 1) << 40]; }

ON(writes_past_the_end) {
  y[threadIdx.x] = x[threadIdx.x];
  if (threadIdx.x == 0) y[n] = 0.0f;
}

// x and y are [n, 64] with a row stride of 65
ON(copies_by_65) {
  for (i64 row = 0; row < n; ++row) y[65 * row + threadIdx.x] = x[65 * row + threadIdx.x];
}
ON(writes_between_rows) {
  for (i64 row = 0; row < n; ++row) {
    y[65 * row + threadIdx.x] = x[65 * row + threadIdx.x];
    if (row < n - 1) y[65 * row + 64] = 0.0f;
  }
}
ON(reads_between_rows) {
  for (i64 row = 0; row < n; ++row) {
    y[65 * row + threadIdx.x] = x[65 * row + threadIdx.x + (row < n - 1)];
  }
}

ON(leaves_one_out) {
  if (threadIdx.x != 5) y[threadIdx.x] = x[threadIdx.x];
}
ON(adds_to_its_output) { y[threadIdx.x] += x[threadIdx.x]; }

// two blocks
ON(blocks_that_agree) {
  y[EACH] = x[EACH];
  __syncthreads();
  y[0] = x[0];
}
ON(blocks_that_disagree) {
  y[EACH] = x[EACH];
  __syncthreads();
  y[0] = float(blockIdx.x);
}

ON(unset_shared_memory) {
  __shared__ float all[64];
  y[threadIdx.x] = all[threadIdx.x];
}
ON(past_an_array) {
  __shared__ float all[64];
  all[threadIdx.x + n - 63] = x[threadIdx.x];
  y[threadIdx.x] = x[threadIdx.x];
}
ON(dynamic_shared_memory) {
  DYNAMIC_SHARED(float, all);
  all[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = all[63 - threadIdx.x];
}

ON(loads_four_at_any_address) {
  const float4 four = load<float4>(x + threadIdx.x % 61);
  y[threadIdx.x] = four.x;
}

// one block of one warp: d [16, 8] = a [16, 16] b [16, 8], b given column by column
template <typename T>
__device__ void product(const T* a, const T* b, float* d) {
  const int lane = threadIdx.x, r = lane / 4, c = lane % 4 * 2;
  const auto two = [](const T* p) { return u32(p[0].bits) | u32(p[1].bits) << 16; };
  float sums[4] = {};
  const u32 of_a[4] = {two(a + 16 * r + c), two(a + 16 * (r + 8) + c), two(a + 16 * r + c + 8),
                       two(a + 16 * (r + 8) + c + 8)};
  multiply_add<T>(sums, of_a, two(b + 16 * r + c), two(b + 16 * r + c + 8));
  for (int i = 0; i < 4; ++i) d[8 * (r + i / 2 * 8) + c + i % 2] = sums[i];
}
extern "C" __global__ void product_bf16(const bf16* a, const bf16* b, float* d) {
  product(a, b, d);
}
extern "C" __global__ void product_f16(const f16* a, const f16* b, float* d) { product(a, b, d); }

// y = the 16-bit float nearest to x, and what it is as a float32
template <typename T>
__device__ void convert(const float* x, T* y, float* back, i64 n) {
  for (i64 i = EACH; i < n; i += i64(gridDim.x) * blockDim.x) {
    y[i] = rounded<T>(x[i]);
    back[i] = float_of(y[i]);
  }
}
extern "C" __global__ void convert_bf16(const float* x, bf16* y, float* back, i64 n) {
  convert(x, y, back, n);
}
extern "C" __global__ void convert_f16(const float* x, f16* y, float* back, i64 n) {
  convert(x, y, back, n);
}

// y = a b + c; n pairs
template <typename T>
__device__ void combine(const u32* a, const u32* b, const u32* c, u32* y, i64 n) {
  for (i64 i = EACH; i < n; i += i64(gridDim.x) * blockDim.x) {
    y[i] = multiply_add_pair<T>(a[i], b[i], c[i]);
  }
}
extern "C" __global__ void combine_bf16(const u32* a, const u32* b, const u32* c, u32* y, i64 n) {
  combine<bf16>(a, b, c, y, n);
}
extern "C" __global__ void combine_f16(const u32* a, const u32* b, const u32* c, u32* y, i64 n) {
  combine<f16>(a, b, c, y, n);
}

// y[i] = sum over the `lanes` neighbours of thread i
extern "C" __global__ void sums(const float* x, float* y, i64 lanes) {
  y[threadIdx.x] = sum_over(x[threadIdx.x], int(lanes));
}
