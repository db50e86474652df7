// math_loops.h for the compiler's baseline (on aarch64 that is NEON).
#include "math_loops.h"

extern "C" const Math* bonsai_math_plain() {
  static const Math math = {norm, dots, mix, softmax, gate, rotate, outer, drop};
  return &math;
}
