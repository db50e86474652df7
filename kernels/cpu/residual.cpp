// The two products of the residual that are too thin for a library:
//
//   bonsai_codeword_products   P[m, s K + k] = x_s . C_{g(s), k}
//   bonsai_codeword_gradient   dC[g, k]      = sum_{s in g} sum_m D[m, s K + k] x_s
//
// x [M, in], P and D [M, S K] in one dtype; codewords and dC float32 [G, K, d]. Sums are float32.
// Each (token, sub-vector) of P and each sub-vector of dC is one thread's work, in a fixed order, so
// that any number of threads gives the same bits.
// Called by bonsai_ft/ops/cpu_kernels.py; tested by tests/test_cpu_kernels.py against float64.
#include <cstdlib>
#include <cstring>

#include "arithmetic.h"
#include "linear.h"
#include "numbers.h"

extern "C" {

void bonsai_codeword_products(const Layer* layer, int32_t dtype, const void* x, int64_t x_stride,
                              int64_t tokens, void* out, int64_t out_stride, int32_t threads) {
  const Isa& isa = current_isa();
  const int64_t dim = layer->codewords_dim, k = layer->codewords_k, width = layer->in_features;
  const int64_t subvectors = num_subvectors(*layer), per_group = kGroup / dim;
  const size_t element = size_of(Dtype(dtype));
  (void)threads;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t m = 0; m < tokens; ++m) {
    float values[kGroup];
    float products[256];
    const char* row = static_cast<const char*>(x) + size_t(m * x_stride) * element;
    for (int64_t s = 0; s < subvectors; ++s) {
      const int64_t begin = s * dim, length = width - begin < dim ? width - begin : dim;
      for (int64_t j = 0; j < length; ++j) {
        values[j] = load_as_float(Dtype(dtype), row, begin + j);
      }
      isa.products(values, layer->codewords + (s / per_group) * k * dim, dim, int(k), length,
                   products);
      for (int64_t i = 0; i < k; ++i) {
        store_as(Dtype(dtype), out, m * out_stride + s * k + i, products[i]);
      }
    }
  }
}

// `gradient` [G, K, d] is filled, entries that no input reaches with zeros
void bonsai_codeword_gradient(const Layer* layer, int32_t dtype, const void* sums,
                              int64_t sums_stride, const void* x, int64_t x_stride, int64_t tokens,
                              float* gradient, int32_t threads) {
  const Math& math = bonsai_current_math();
  const int64_t dim = layer->codewords_dim, k = layer->codewords_k, width = layer->in_features;
  const int64_t subvectors = num_subvectors(*layer), per_group = kGroup / dim;
  const int64_t groups = num_groups(*layer);
  const size_t element = size_of(Dtype(dtype));
  std::memset(gradient, 0, size_t(groups * k * dim) * sizeof(float));
  (void)threads;
  // A thread takes a run of groups and walks over the tokens once: their rows lie far apart.
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t part = 0; part < threads; ++part) {
    const int64_t first = groups * part / threads * per_group;
    int64_t last = groups * (part + 1) / threads * per_group;
    if (last > subvectors) last = subvectors;
    for (int64_t m = 0; m < tokens; m += 4) {
      const int here = tokens - m < 4 ? int(tokens - m) : 4;
      for (int64_t s = first; s < last; ++s) {
        const int64_t begin = s * dim, length = width - begin < dim ? width - begin : dim;
        math.outer(Dtype(dtype),
                   static_cast<const char*>(sums) + size_t(m * sums_stride + s * k) * element,
                   sums_stride, static_cast<const char*>(x) + size_t(m * x_stride + begin) * element,
                   x_stride, here, k, length, gradient + (s / per_group) * k * dim, dim);
      }
    }
  }
}

}  // extern "C"
