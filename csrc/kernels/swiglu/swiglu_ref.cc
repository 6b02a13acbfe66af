#include "csrc/kernels/swiglu/swiglu.h"

#include "csrc/kernels/common/scalar.h"

namespace tle {

void swiglu_ref(const SwigluArgs& a) {
  for (int64_t row = 0; row < a.rows; ++row) {
    for (int64_t i = 0; i < a.n; ++i) {
      const float g = scalar::load(a.dtype, a.gate, row * a.gate_stride + i);
      const float u = scalar::load(a.dtype, a.up, row * a.up_stride + i);
      scalar::store(a.dtype, a.out, row * a.out_stride + i, g / (1.0f + scalar::exp(-g)) * u);
    }
  }
}

}  // namespace tle
