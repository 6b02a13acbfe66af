#include "csrc/kernels/quantize_rows/quantize_rows.h"

#include "csrc/kernels/common/scalar.h"

namespace tle {

void quantize_rows_ref(const QuantizeRowsArgs& a) {
  const int64_t size = a.group ? a.group : a.k, groups = a.group ? (a.k + a.group - 1) / a.group : 1;
  for (int64_t row = 0; row < a.rows; ++row) {
    int8_t* codes = a.codes + row * a.code_stride;
    for (int64_t i = a.k; i < a.code_stride; ++i) codes[i] = 0;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t first = g * size, last = first + size < a.k ? first + size : a.k;
      auto x = [&](int64_t i) { return scalar::load(a.dtype, a.x, row * a.x_stride + i); };

      float amax = 0.0f;
      bool finite = true;
      for (int64_t i = first; i < last; ++i) {
        const float v = fabsf(x(i));
        finite = finite && v <= 0x1.fffffep127f;
        amax = v > amax ? v : amax;
      }
      float inv = 127.0f / amax;
      if (!finite || !(inv <= 0x1.fffffep127f)) inv = 0.0f;

      int32_t sum = 0;
      for (int64_t i = first; i < last; ++i) {
        codes[i] = finite ? int8_t(nearbyintf(x(i) * inv)) : int8_t(0);
        sum += codes[i];
      }
      a.sums[row * groups + g] = sum;
      a.scales[row * groups + g] = finite ? amax / 127.0f : scalar::float_of(0x7FC00000u);
    }
  }
}

}  // namespace tle
