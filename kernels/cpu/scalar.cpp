// The kernels without any instruction set beyond the compiler's baseline.
// Called through linear.cpp; tested by tests/test_cpu_kernels.py with BONSAI_CPU_ISA=scalar.
#include "scalar.h"

extern "C" const Isa* bonsai_isa_scalar() {
  static const Isa isa = {"scalar",       plain::unpack, plain::prepared_bytes,
                          plain::prepare, plain::dot,    plain::products, nullptr};
  return &isa;
}
