#include "csrc/kernels/linear_dense/linear_dense.h"

#include "csrc/kernels/common/scalar.h"

namespace tle {

void linear_dense_ref(const LinearDenseArgs& a) {
  for (int64_t m = 0; m < a.rows; ++m) {
    for (int64_t n = 0; n < a.n; ++n) {
      float lane[16] = {};
      for (int64_t k = 0; k < (a.k + 15) / 16 * 16; ++k) {
        const float x = k < a.k ? scalar::load(a.dtype, a.x, m * a.x_stride + k) : 0.0f;
        const float w = k < a.k ? scalar::load(a.dtype, a.w, n * a.w_stride + k) : 0.0f;
        lane[k % 16] = fmaf(x, w, lane[k % 16]);
      }
      float y = scalar::reduce_lanes(lane);
      if (a.bias) y += scalar::load(a.bias_dtype, a.bias, n);
      scalar::store(a.out_dtype, a.out, m * a.out_stride + n, y);
    }
  }
}

}  // namespace tle
