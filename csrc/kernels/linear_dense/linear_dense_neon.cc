#include "csrc/kernels/common/lanes_neon.h"

namespace tle {
namespace {

constexpr int kTileRows = 3, kTileChannels = 2, kVectorChannels = 4;

}  // namespace
}  // namespace tle

#include "csrc/kernels/linear_dense/linear_dense_lanes.h"

namespace tle {

void linear_dense_neon(const LinearDenseArgs& a) { linear_dense_lanes(a); }

}  // namespace tle
