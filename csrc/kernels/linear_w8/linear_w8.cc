#include "csrc/kernels/tables.h"

namespace tle {

KernelTable<LinearW8Fn> linear_w8_table("linear_w8", {
    TLE_X86({Isa::kVnni, linear_w8_vnni}, {Isa::kAvx512, linear_w8_avx512}, {Isa::kAvx2, linear_w8_avx2}, )
    TLE_ARM({Isa::kI8mm, linear_w8_i8mm}, {Isa::kDotprod, linear_w8_dotprod}, {Isa::kNeon, linear_w8_neon}, )
    {Isa::kRef, linear_w8_ref},
});

}  // namespace tle
