#include "csrc/kernels/tables.h"

namespace tle {

KernelTable<RotaryFn> rotary_table("rotary", {
    TLE_X86({Isa::kAvx512, rotary_avx512}, {Isa::kAvx2, rotary_avx2}, )
    TLE_ARM({Isa::kNeon, rotary_neon}, )
    {Isa::kRef, rotary_ref},
});

}  // namespace tle
