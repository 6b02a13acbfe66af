#include "csrc/kernels/common/lanes_avx2.h"
#include "csrc/kernels/quantize_rows/quantize_rows_lanes.h"

namespace tle {

void quantize_rows_avx2(const QuantizeRowsArgs& a) { quantize_rows_lanes(a); }

}  // namespace tle
