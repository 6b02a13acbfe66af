#include "csrc/kernels/common/lanes_neon.h"
#include "csrc/kernels/linear_w8/linear_w8_sdot.h"

namespace tle {

void linear_w8_dotprod(const LinearW8Args& a) { sdot_rows(a, 0); }

}  // namespace tle
