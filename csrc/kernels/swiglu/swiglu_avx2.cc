#include "csrc/kernels/common/lanes_avx2.h"
#include "csrc/kernels/swiglu/swiglu_lanes.h"

namespace tle {

void swiglu_avx2(const SwigluArgs& a) { swiglu_lanes(a); }

}  // namespace tle
