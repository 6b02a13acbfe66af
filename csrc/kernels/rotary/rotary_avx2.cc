#include "csrc/kernels/common/lanes_avx2.h"
#include "csrc/kernels/rotary/rotary_lanes.h"

namespace tle {

void rotary_avx2(const RotaryArgs& a) { rotary_lanes(a); }

}  // namespace tle
