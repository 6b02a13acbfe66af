#include "csrc/kernels/common/lanes_avx512.h"

namespace tle {
namespace {

constexpr int kTileRows = 6, kTileChannels = 4, kVectorChannels = 8;

}  // namespace
}  // namespace tle

#include "csrc/kernels/linear_dense/linear_dense_lanes.h"

namespace tle {

void linear_dense_avx512(const LinearDenseArgs& a) { linear_dense_lanes(a); }

}  // namespace tle
