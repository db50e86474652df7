#include "ternary.h"
extern "C" const Isa* bonsai_isa_neon() { return nullptr; }
