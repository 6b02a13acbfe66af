#include "csrc/kernels/common/scalar.h"
#include "csrc/kernels/rms_norm/rms_norm.h"

namespace tle {

void rms_norm_ref(const RmsNormArgs& a) {
  const int64_t size = dtype_size(a.dtype);
  for (int64_t row = 0; row < a.rows; ++row) {
    const char* x = static_cast<const char*>(a.x) + row * a.x_stride * size;
    const char* residual =
        a.residual ? static_cast<const char*>(a.residual) + row * a.residual_stride * size : nullptr;
    auto s = [&](int64_t i) {
      float v = scalar::load(a.dtype, x, i);
      return residual ? scalar::round_to(a.dtype, v + scalar::load(a.dtype, residual, i)) : v;
    };
    char* out = static_cast<char*>(a.out) + row * a.out_stride * size;

    float lane[16] = {};
    for (int64_t i = 0; i < (a.d + 15) / 16 * 16; ++i) {
      const float v = i < a.d ? s(i) : 0.0f;
      lane[i % 16] = fmaf(v, v, lane[i % 16]);
    }
    const float r = 1.0f / sqrtf(scalar::reduce_lanes(lane) / float(a.d) + a.eps);
    for (int64_t i = 0; i < a.d; ++i) {
      const float w = scalar::load(a.weight_dtype, a.weight, i);
      float normed = s(i) * r;
      if (a.kind == NormKind::kLlama) normed = scalar::round_to(a.dtype, normed);
      scalar::store(a.dtype, out, i, normed * (a.kind == NormKind::kGemma ? 1.0f + w : w));
    }
    if (a.sum) {
      char* sum = static_cast<char*>(a.sum) + row * a.sum_stride * size;
      for (int64_t i = 0; i < a.d; ++i) scalar::store(a.dtype, sum, i, s(i));
    }
  }
}

}  // namespace tle
