#include "csrc/kernels/common/lanes_avx512.h"

#include "csrc/kernels/attention/slice_16.h"

namespace tle {
namespace {

// 16 accumulators leave room for 4 keys or values, twice, and a broadcast.
constexpr int kGroup = 4, kDotRows = 4;
constexpr int kDotKeys[] = {0, 4, 4, 4, 4};
constexpr int kValueLanes[] = {0, 8, 8, 4, 4};
constexpr int kStreamRows = 2, kDirectRows = 8;

constexpr bool kJoinsKeys = true;

template <DType T>
static inline void load_2(const typename Element<T>::type* p, f32x16 to[2]) {
  if constexpr (T == DType::kBF16) {
    load_2_bf16(p, to);
  } else {
    to[0] = load_as<T>(p, 0);
    to[1] = load_as<T>(p, 16);
  }
}

}  // namespace
}  // namespace tle

#include "csrc/kernels/attention/attention_lanes.h"

namespace tle {

void attention_avx512(const AttentionArgs& a) { attention_lanes(a); }

}  // namespace tle
