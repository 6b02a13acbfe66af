#include "csrc/kernels/common/lanes_neon.h"

#include "csrc/kernels/linear_group/linear_group_sdot.h"

namespace tle {

void linear_group_dotprod(const LinearGroupArgs& a) { sdot_rows(a, 0); }

}  // namespace tle
