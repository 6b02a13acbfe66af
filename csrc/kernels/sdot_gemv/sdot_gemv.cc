#include "csrc/kernels/tables.h"

namespace tle {

KernelTable<SdotGemvFn> sdot_gemv_table("sdot_gemv", {
    TLE_X86({Isa::kVnni, sdot_gemv_vnni}, {Isa::kAvx512, sdot_gemv_avx512}, {Isa::kAvx2, sdot_gemv_avx2}, )
    TLE_ARM({Isa::kDotprod, sdot_gemv_dotprod}, {Isa::kNeon, sdot_gemv_neon}, )
    {Isa::kRef, sdot_gemv_ref},
});

}  // namespace tle
