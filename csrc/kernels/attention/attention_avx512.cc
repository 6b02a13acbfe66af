#include "csrc/kernels/common/lanes_avx512.h"

namespace tle {
namespace {

// 16 accumulators leave room for 4 keys or values and a broadcast; one tree adds up a whole tile.
constexpr int kGroup = 4, kDotRows = 4;
constexpr int kDotKeys[] = {0, 1, 1, 4, 4};
constexpr int kValueLanes[] = {0, 8, 8, 4, 4};
constexpr int kStreamRows = 2, kDirectRows = 8;

}  // namespace
}  // namespace tle

#include "csrc/kernels/attention/attention_lanes.h"

namespace tle {

void attention_avx512(const AttentionArgs& a) { attention_lanes(a); }

}  // namespace tle
