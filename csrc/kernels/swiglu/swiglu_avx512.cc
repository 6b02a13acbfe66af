#include "csrc/kernels/common/lanes_avx512.h"
#include "csrc/kernels/swiglu/swiglu_lanes.h"

namespace tle {

void swiglu_avx512(const SwigluArgs& a) { swiglu_lanes(a); }

}  // namespace tle
