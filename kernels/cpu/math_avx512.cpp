// math_loops.h for AVX-512.
#include "arithmetic.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c,fma")
#endif

#include "math_loops.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC reset_options
#endif

extern "C" const Math* bonsai_math_avx512() {
  static const Math math = {norm, dots, mix, softmax, gate, rotate, outer, drop};
  return &math;
}

#else

extern "C" const Math* bonsai_math_avx512() { return nullptr; }

#endif
