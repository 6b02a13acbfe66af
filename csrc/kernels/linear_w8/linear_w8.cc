#include "csrc/kernels/tables.h"

namespace tle {

KernelTable<LinearW8Fn> linear_w8_table("linear_w8", {
    TLE_X86({Isa::kVnni, linear_w8_vnni}, {Isa::kAvx512, linear_w8_avx512}, {Isa::kAvx2, linear_w8_avx2}, )
    {Isa::kRef, linear_w8_ref},
});

}  // namespace tle
