#include "csrc/kernels/common/lanes_avx2.h"
#include "csrc/kernels/rms_norm/rms_norm_lanes.h"

namespace tle {

void rms_norm_avx2(const RmsNormArgs& a) { rms_norm_lanes(a); }

}  // namespace tle
