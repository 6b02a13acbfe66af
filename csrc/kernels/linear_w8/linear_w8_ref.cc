#include "csrc/kernels/linear_w8/linear_w8.h"

#include "csrc/kernels/common/scalar.h"

namespace tle {

void linear_w8_ref(const LinearW8Args& a) {
  for (int64_t m = 0; m < a.rows; ++m) {
    for (int64_t n = 0; n < a.n; ++n) {
      const uint8_t* panel = a.panels + n / 16 * a.panel_stride;
      const int8_t* codes = reinterpret_cast<const int8_t*>(panel) + n % 16 * 4;
      int32_t acc = 0;
      for (int64_t k = 0; k < 4 * a.lines; ++k) acc += int32_t(a.x[m * a.x_stride + k]) * codes[k / 4 * 64 + k % 4];

      const float w_scale = scalar::load(DType::kF32, panel + a.scale_offset, n % 16);
      float y = (float(acc) * a.x_scale[m]) * w_scale;
      if (a.bias) y += scalar::load(a.bias_dtype, a.bias, n);
      scalar::store(a.out_dtype, a.out, m * a.out_stride + n, y);
    }
  }
}

}  // namespace tle
