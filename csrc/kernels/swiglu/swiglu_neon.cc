#include "csrc/kernels/common/lanes_neon.h"
#include "csrc/kernels/swiglu/swiglu_lanes.h"

namespace tle {

void swiglu_neon(const SwigluArgs& a) { swiglu_lanes(a); }

}  // namespace tle
