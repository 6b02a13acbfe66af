#include "csrc/kernels/tables.h"

namespace tle {

KernelTable<LinearGroupFn> linear_group_table("linear_group", {
    {Isa::kRef, linear_group_ref},
});

}  // namespace tle
