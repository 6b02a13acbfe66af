#include "csrc/kernels/common/lanes_avx512.h"

namespace tle {
namespace {

constexpr int kTileRows = 6, kTileChannels = 4, kVectorChannels = 4;

using Part = __m512;
constexpr int kPart = 16;
static inline Part load_part(const float* p) { return _mm512_loadu_ps(p); }
template <DType T>
static inline Part load_part(const void* p, int64_t i) {
  return load_as<T>(p, i).v;
}
static inline Part fma_part(Part a, Part b, Part c) { return _mm512_fmadd_ps(a, b, c); }
static inline void store_part(float* p, Part a) { _mm512_storeu_ps(p, a); }

}  // namespace
}  // namespace tle

#include "csrc/kernels/linear_dense/linear_dense_lanes.h"

namespace tle {

void linear_dense_avx512(const LinearDenseArgs& a) { linear_dense_lanes(a); }

}  // namespace tle
