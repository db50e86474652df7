// math_loops.h for AVX2.
#include "arithmetic.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include "math_loops.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC reset_options
#endif

extern "C" const Math* bonsai_math_avx2() {
  static const Math math = {norm, dots, mix, softmax, gate, rotate, outer, drop};
  return &math;
}

#else

extern "C" const Math* bonsai_math_avx2() { return nullptr; }

#endif
