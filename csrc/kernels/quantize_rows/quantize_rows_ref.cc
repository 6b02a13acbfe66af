#include "csrc/kernels/quantize_rows/quantize_rows.h"

#include "csrc/kernels/common/scalar.h"

namespace tle {

void quantize_rows_ref(const QuantizeRowsArgs& a) {
  for (int64_t row = 0; row < a.rows; ++row) {
    const char* x = static_cast<const char*>(a.x) + row * a.x_stride * dtype_size(a.dtype);
    int8_t* codes = a.codes + row * a.code_stride;

    float amax = 0.0f;
    bool finite = true;
    for (int64_t i = 0; i < a.k; ++i) {
      const float v = fabsf(scalar::load(a.dtype, x, i));
      finite = finite && v <= 0x1.fffffep127f;
      amax = v > amax ? v : amax;
    }
    float inv = 127.0f / amax;
    if (!finite || !(inv <= 0x1.fffffep127f)) inv = 0.0f;

    int32_t sum = 0;
    for (int64_t i = 0; i < a.k; ++i) {
      codes[i] = finite ? int8_t(nearbyintf(scalar::load(a.dtype, x, i) * inv)) : int8_t(0);
      sum += codes[i];
    }
    for (int64_t i = a.k; i < a.code_stride; ++i) codes[i] = 0;
    a.sums[row] = sum;
    a.scales[row] = finite ? amax / 127.0f : scalar::float_of(0x7FC00000u);
  }
}

}  // namespace tle
