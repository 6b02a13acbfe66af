#include "csrc/kernels/common/lanes_avx512.h"
#include "csrc/kernels/rotary/rotary_lanes.h"

namespace tle {

void rotary_avx512(const RotaryArgs& a) { rotary_lanes(a); }

}  // namespace tle
