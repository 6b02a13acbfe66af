#include "csrc/kernels/tables.h"

namespace tle {

KernelTable<RmsNormFn> rms_norm_table("rms_norm", {
    TLE_X86({Isa::kAvx512, rms_norm_avx512}, {Isa::kAvx2, rms_norm_avx2}, )
    TLE_ARM({Isa::kNeon, rms_norm_neon}, )
    {Isa::kRef, rms_norm_ref},
});

}  // namespace tle
