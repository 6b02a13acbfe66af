#include "csrc/kernels/common/lanes_avx2.h"

namespace tle {
namespace {

constexpr int kTileRows = 3, kTileChannels = 2, kVectorChannels = 4;

using Part = __m256;
constexpr int kPart = 8;
static inline Part load_part(const float* p) { return _mm256_loadu_ps(p); }
template <DType T>
static inline Part load_part(const void* p, int64_t i) {
  if constexpr (T == DType::kF32) return load_part(static_cast<const float*>(p) + i);
  const uint16_t* halves = static_cast<const uint16_t*>(p) + i;
  if constexpr (T == DType::kBF16) return from_bf16_half(halves);
  if constexpr (T == DType::kF16) return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)));
}
static inline Part fma_part(Part a, Part b, Part c) { return _mm256_fmadd_ps(a, b, c); }
static inline void store_part(float* p, Part a) { _mm256_storeu_ps(p, a); }

}  // namespace
}  // namespace tle

#include "csrc/kernels/linear_dense/linear_dense_lanes.h"

namespace tle {

void linear_dense_avx2(const LinearDenseArgs& a) { linear_dense_lanes(a); }

}  // namespace tle
