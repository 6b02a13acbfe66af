#include "csrc/kernels/tables.h"

namespace tle {

KernelTable<LinearGroupFn> linear_group_table("linear_group", {
    TLE_X86({Isa::kVnni, linear_group_vnni}, {Isa::kAvx512, linear_group_avx512}, {Isa::kAvx2, linear_group_avx2}, )
    {Isa::kRef, linear_group_ref},
});

}  // namespace tle
