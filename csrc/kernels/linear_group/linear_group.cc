#include "csrc/kernels/tables.h"

namespace tle {

KernelTable<LinearGroupFn> linear_group_table("linear_group", {
    TLE_X86({Isa::kAmx, linear_group_amx}, {Isa::kVnni, linear_group_vnni}, )
    TLE_X86({Isa::kAvx512, linear_group_avx512}, {Isa::kAvx2, linear_group_avx2}, )
    TLE_ARM({Isa::kI8mm, linear_group_i8mm}, {Isa::kDotprod, linear_group_dotprod}, {Isa::kNeon, linear_group_neon}, )
    {Isa::kRef, linear_group_ref},
});

}  // namespace tle
