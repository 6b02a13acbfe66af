#include "csrc/kernels/tables.h"

namespace tle {

KernelTable<AttentionFn> attention_table("attention", {
    TLE_X86({Isa::kAvx512, attention_avx512}, {Isa::kAvx2, attention_avx2}, )
    TLE_ARM({Isa::kNeon, attention_neon}, )
    {Isa::kRef, attention_ref},
});

}  // namespace tle
