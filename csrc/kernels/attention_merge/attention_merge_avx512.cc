#include "csrc/kernels/common/lanes_avx512.h"
#include "csrc/kernels/attention_merge/attention_merge_lanes.h"

namespace tle {

void attention_merge_avx512(const AttentionMergeArgs& a) { attention_merge_lanes(a); }

}  // namespace tle
