#include "csrc/kernels/tables.h"

namespace tle {

KernelTable<SwigluFn> swiglu_table("swiglu", {
    TLE_X86({Isa::kAvx512, swiglu_avx512}, {Isa::kAvx2, swiglu_avx2}, )
    TLE_ARM({Isa::kNeon, swiglu_neon}, )
    {Isa::kRef, swiglu_ref},
});

}  // namespace tle
