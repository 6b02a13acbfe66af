#include "csrc/kernels/common/lanes_avx2.h"
#include "csrc/kernels/attention_merge/attention_merge_lanes.h"

namespace tle {

void attention_merge_avx2(const AttentionMergeArgs& a) { attention_merge_lanes(a); }

}  // namespace tle
