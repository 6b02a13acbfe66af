#include "csrc/kernels/sdot_gemv/sdot_gemv.h"

#include "csrc/kernels/common/scalar.h"

namespace tle {

void sdot_gemv_ref(const SdotGemvArgs& s) {
  for (int64_t m = 0; m < s.rows; ++m) {
    for (int64_t n = 0; n < s.n; ++n) {
      int32_t acc = 0;
      for (int64_t kb = 0; kb < s.blocks; ++kb)
        for (int64_t k = 0; k < 4; ++k)
          acc += int32_t(s.a[m * s.a_stride + 4 * kb + k]) * s.packed[kb * s.stride + 4 * n + k];

      if (s.a_scale)
        scalar::store(DType::kBF16, s.out, m * s.out_stride + n, (float(acc) * s.a_scale[m]) * s.b_scale[n]);
      else
        static_cast<int32_t*>(s.out)[m * s.out_stride + n] = acc;
    }
  }
}

}  // namespace tle
