#include "csrc/kernels/common/lanes_neon.h"
#include "csrc/kernels/rms_norm/rms_norm_lanes.h"

namespace tle {

void rms_norm_neon(const RmsNormArgs& a) { rms_norm_lanes(a); }

}  // namespace tle
