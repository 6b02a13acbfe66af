#include "csrc/kernels/rotary/rotary.h"

#include "csrc/kernels/common/scalar.h"

namespace tle {

void rotary_ref(const RotaryArgs& a) {
  const int64_t half = a.r / 2;
  for (int64_t h = 0; h < a.heads; ++h) {
    const int64_t in = h * a.x_stride, out = h * a.out_stride;
    auto rotated = [&](int64_t i, float partner) {
      const float x = scalar::load(a.dtype, a.x, in + i);
      const float direct = scalar::round_to(a.dtype, x * scalar::load(a.dtype, a.cos, i));
      const float crossed = scalar::round_to(a.dtype, partner * scalar::load(a.dtype, a.sin, i));
      return direct + crossed;
    };
    for (int64_t i = 0; i < half; ++i) {
      const float low = rotated(i, -scalar::load(a.dtype, a.x, in + i + half));
      const float high = rotated(i + half, scalar::load(a.dtype, a.x, in + i));
      scalar::store(a.dtype, a.out, out + i, low);
      scalar::store(a.dtype, a.out, out + i + half, high);
    }
    for (int64_t i = a.r; i < a.d; ++i) scalar::store(a.dtype, a.out, out + i, scalar::load(a.dtype, a.x, in + i));
  }
}

}  // namespace tle
