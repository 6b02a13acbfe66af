#include "csrc/kernels/common/lanes_avx2.h"
#include "csrc/kernels/common/registers.h"

namespace tle {
namespace {

// 8 or 12 of the 16 registers accumulate. A slice is one register, because a tile of keys with all their lanes would
// have half the rows or keys, and as many loads as products.
using Slice = __m256;
constexpr int kSliceLanes = 8;
constexpr int kGroup = 4, kDotRows = 4;
constexpr int kDotKeys[] = {0, 4, 4, 4, 2};
constexpr int kValueLanes[] = {0, 4, 2, 1, 1};
constexpr int kStreamRows = 4, kDirectRows = 8;

constexpr bool kJoinsKeys = false;

template <DType T>
static inline Slice load_slice(const typename Element<T>::type* p) {
  if constexpr (T == DType::kF32) {
    __m256 slice = _mm256_loadu_ps(p);
    TLE_IN_REGISTER(slice);  // else GCC loads a query again for each key
    return slice;
  } else if constexpr (T == DType::kBF16) {
    return from_bf16_half(p);
  } else if constexpr (T == DType::kF16) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  } else {
    return from_i8_half(p);
  }
}
static inline Slice zero_slice() { return _mm256_setzero_ps(); }
static inline Slice fma(Slice a, Slice b, Slice c) { return _mm256_fmadd_ps(a, b, c); }
static inline void store(float* p, Slice a) { _mm256_storeu_ps(p, a); }

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
