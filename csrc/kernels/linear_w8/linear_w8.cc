#include "csrc/kernels/tables.h"

namespace tle {

KernelTable<LinearW8Fn> linear_w8_table("linear_w8", {
    TLE_X86({Isa::kAmx, linear_w8_amx}, {Isa::kVnni, linear_w8_vnni}, )
    TLE_X86({Isa::kAvx512, linear_w8_avx512}, {Isa::kAvx2, linear_w8_avx2}, )
    // With 128 bits SVE2 does what SDOT does, and i8mm does twice that; with 256 its products are as wide as i8mm's.
    TLE_ARM({Isa::kSve2, linear_w8_sve2, sve_is_wide}, )
    TLE_ARM({Isa::kI8mm, linear_w8_i8mm}, {Isa::kDotprod, linear_w8_dotprod}, {Isa::kNeon, linear_w8_neon}, )
    {Isa::kRef, linear_w8_ref},
});

}  // namespace tle
