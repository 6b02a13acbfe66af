#include "csrc/kernels/common/lanes_avx2.h"

namespace tle {
namespace {

// 8 of the 16 registers accumulate (a value of 16 lanes takes two).
constexpr int kGroup = 4, kDotRows = 2;
constexpr int kDotKeys[] = {0, 1, 2};
constexpr int kValueLanes[] = {0, 4, 2, 1, 1};
constexpr int kStreamRows = 1, kDirectRows = 8;

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

void attention_avx2(const AttentionArgs& a) { attention_lanes(a); }

}  // namespace tle
