#include "csrc/kernels/tables.h"

namespace tle {

KernelTable<AttentionMergeFn> attention_merge_table("attention_merge", {
    {Isa::kRef, attention_merge_ref},
});

}  // namespace tle
