#include "csrc/kernels/common/lanes_neon.h"

namespace tle {
namespace {

constexpr int kTileRows = 3, kTileChannels = 2, kVectorChannels = 4;

using Part = float32x4_t;
constexpr int kPart = 4;
static inline Part load_part(const float* p) { return vld1q_f32(p); }
template <DType T>
static inline Part load_part(const void* p, int64_t i) {
  if constexpr (T == DType::kF32) return load_part(static_cast<const float*>(p) + i);
  const uint16x4_t halves = vld1_u16(static_cast<const uint16_t*>(p) + i);
  if constexpr (T == DType::kBF16) return vreinterpretq_f32_u32(vshll_n_u16(halves, 16));
  if constexpr (T == DType::kF16) return vcvt_f32_f16(vreinterpret_f16_u16(halves));
}
static inline Part fma_part(Part a, Part b, Part c) { return vfmaq_f32(c, a, b); }
static inline void store_part(float* p, Part a) { vst1q_f32(p, a); }

}  // namespace
}  // namespace tle

#include "csrc/kernels/linear_dense/linear_dense_lanes.h"

namespace tle {

void linear_dense_neon(const LinearDenseArgs& a) { linear_dense_lanes(a); }

}  // namespace tle
