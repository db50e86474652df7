// out = x * mask / (1 - p): dropout whose mask is a function of a seed, so that it is never stored.
//
// Elements 4 i .. 4 i + 3 are decided by the four 16-bit parts of one 64-bit number, the i-th of the
// SplitMix64 sequence (Steele, Lea and Flood, 2014) that starts at the seed. An element is zeroed if
// its part is below p * 2^16. Any number of threads gives the same mask.
// Called by bonsai_ft/ops/dropout.py; tested by tests/test_dropout.py.
#include <cstring>

#include "arithmetic.h"
#include "numbers.h"

extern "C" {

void bonsai_dropout(const void* x, int64_t count, int32_t dtype, uint64_t seed, float p,
                    void* out, int32_t threads) {
  const Math& math = bonsai_current_math();
  const uint32_t threshold = uint32_t(p * 65536.0f + 0.5f);
  const float factor = 1.0f / (1.0f - p);
  constexpr int64_t kStripe = 4096;
  const int64_t stripes = ceil_div(count, kStripe);
  const size_t element = size_of(Dtype(dtype));
  (void)threads;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t stripe = 0; stripe < stripes; ++stripe) {
    const int64_t begin = stripe * kStripe;
    const int64_t length = count - begin < kStripe ? count - begin : kStripe;
    math.drop(Dtype(dtype), static_cast<const char*>(x) + size_t(begin) * element, length,
              seed + uint64_t(begin / 4) * 0x9e3779b97f4a7c15ull, threshold, factor,
              static_cast<char*>(out) + size_t(begin) * element);
  }
}

}  // extern "C"
