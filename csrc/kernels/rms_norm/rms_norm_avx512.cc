#include "csrc/kernels/common/lanes_avx512.h"
#include "csrc/kernels/rms_norm/rms_norm_lanes.h"

namespace tle {

void rms_norm_avx512(const RmsNormArgs& a) { rms_norm_lanes(a); }

}  // namespace tle
