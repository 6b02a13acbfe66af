#include "csrc/kernels/tables.h"

namespace tle {

KernelTable<LinearDenseFn> linear_dense_table("linear_dense", {
    TLE_X86({Isa::kAvx512, linear_dense_avx512}, {Isa::kAvx2, linear_dense_avx2}, )
    TLE_ARM({Isa::kNeon, linear_dense_neon}, )
    {Isa::kRef, linear_dense_ref},
});

}  // namespace tle
