#include "csrc/kernels/common/lanes_neon.h"

#include "csrc/kernels/attention/slice_16.h"

namespace tle {
namespace {

// 16 of the 32 registers accumulate (a value of 16 lanes takes four). Two rows of a streaming tile share the widened
// values: a core with two vector pipes is slower at that than its memory (14 instructions for 16 values and both rows,
// 20 for one after the other).
constexpr int kGroup = 4, kDotRows = 2;
constexpr int kDotKeys[] = {0, 4, 2};
constexpr int kValueLanes[] = {0, 4, 2, 1, 1};
constexpr int kStreamRows = 2, kDirectRows = 8;

constexpr bool kJoinsKeys = false;

template <DType T>
static inline void load_2(const typename Element<T>::type* p, f32x16 to[2]) {
  to[0] = load_as<T>(p, 0);
  to[1] = load_as<T>(p, 16);
}

}  // namespace
}  // namespace tle

#include "csrc/kernels/attention/attention_lanes.h"

namespace tle {

void attention_neon(const AttentionArgs& a) { attention_lanes(a); }

}  // namespace tle
