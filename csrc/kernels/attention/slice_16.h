// A slice (attention_lanes.h) of all 16 lanes. Include after one of common/lanes_*.h.
#pragma once

#include "csrc/kernels/common/dtype.h"

namespace tle {
namespace {

using Slice = f32x16;
constexpr int kSliceLanes = 16;

template <DType T>
static inline Slice load_slice(const typename Element<T>::type* p) {
  return load_as<T>(p, 0);
}
static inline Slice zero_slice() { return zero(); }

}  // namespace
}  // namespace tle
