#include "csrc/kernels/common/lanes_neon.h"
#include "csrc/kernels/attention_merge/attention_merge_lanes.h"

namespace tle {

void attention_merge_neon(const AttentionMergeArgs& a) { attention_merge_lanes(a); }

}  // namespace tle
