#include "csrc/kernels/tables.h"

namespace tle {

KernelTable<QuantizeRowsFn> quantize_rows_table("quantize_rows", {
    TLE_X86({Isa::kAvx512, quantize_rows_avx512}, {Isa::kAvx2, quantize_rows_avx2}, )
    TLE_ARM({Isa::kNeon, quantize_rows_neon}, )
    {Isa::kRef, quantize_rows_ref},
});

}  // namespace tle
