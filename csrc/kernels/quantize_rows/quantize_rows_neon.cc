#include "csrc/kernels/common/lanes_neon.h"
#include "csrc/kernels/quantize_rows/quantize_rows_lanes.h"

namespace tle {

void quantize_rows_neon(const QuantizeRowsArgs& a) { quantize_rows_lanes(a); }

}  // namespace tle
