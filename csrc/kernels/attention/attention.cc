#include "csrc/kernels/tables.h"

namespace tle {

KernelTable<AttentionFn> attention_table("attention", {
    {Isa::kRef, attention_ref},
});

}  // namespace tle
