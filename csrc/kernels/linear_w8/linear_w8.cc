#include "csrc/kernels/tables.h"

namespace tle {

KernelTable<LinearW8Fn> linear_w8_table("linear_w8", {
    {Isa::kRef, linear_w8_ref},
});

}  // namespace tle
