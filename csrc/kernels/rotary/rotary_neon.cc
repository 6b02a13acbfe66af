#include "csrc/kernels/common/lanes_neon.h"
#include "csrc/kernels/rotary/rotary_lanes.h"

namespace tle {

void rotary_neon(const RotaryArgs& a) { rotary_lanes(a); }

}  // namespace tle
