#include "csrc/kernels/tables.h"

namespace tle {

KernelTable<LinearDenseFn> linear_dense_table("linear_dense", {
    {Isa::kRef, linear_dense_ref},
});

}  // namespace tle
