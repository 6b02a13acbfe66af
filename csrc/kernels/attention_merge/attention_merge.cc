#include "csrc/kernels/tables.h"

namespace tle {

KernelTable<AttentionMergeFn> attention_merge_table("attention_merge", {
    TLE_X86({Isa::kAvx512, attention_merge_avx512}, {Isa::kAvx2, attention_merge_avx2}, )
    TLE_ARM({Isa::kNeon, attention_merge_neon}, )
    {Isa::kRef, attention_merge_ref},
});

}  // namespace tle
