#include "csrc/kernels/linear_group/linear_group.h"

#include "csrc/kernels/common/scalar.h"

namespace tle {

namespace {

// The weight code of channel c at k of the lines.
int32_t code_at(GroupCodes codes, const uint8_t* lines, int64_t c, int64_t k) {
  if (codes == GroupCodes::kInt8) return int8_t(lines[k / 4 * 64 + c * 4 + k % 4]);
  const uint8_t byte = lines[k / 8 * 64 + c * 4 + k % 4];
  const int32_t code = k % 8 < 4 ? byte & 15 : byte >> 4;
  return codes == GroupCodes::kInt4 ? code - 8 : code;
}

}  // namespace

void linear_group_ref(const LinearGroupArgs& a) {
  const int64_t groups = (a.k + a.group - 1) / a.group;
  const int64_t scale_bytes = a.channel_scale ? 0 : 16 * dtype_size(a.scale_type);  // of a group
  const int64_t before_lines = 2 * scale_bytes * (a.codes == GroupCodes::kInt4Min ? 2 : 1);
  const int64_t pair_bytes = before_lines + 2 * a.group * (a.codes == GroupCodes::kInt8 ? 16 : 8);
  for (int64_t m = 0; m < a.rows; ++m) {
    for (int64_t n = 0; n < a.n; ++n) {
      const uint8_t* panel = a.panels + n / 16 * a.panel_stride;
      float acc = 0.0f;
      for (int64_t g = 0; g < groups; ++g) {
        const uint8_t* pair = panel + g / 2 * pair_bytes;
        int32_t isum = 0;
        for (int64_t k = g * a.group; k < (g + 1) * a.group && k < a.k; ++k)
          isum += int32_t(a.x[m * a.x_stride + k]) * code_at(a.codes, pair + before_lines, n % 16, k - g / 2 * 2 * a.group);
        const float x_scale = a.x_scale[m * groups + g];
        if (a.channel_scale) {
          acc = fmaf(float(isum), x_scale, acc);
          continue;
        }
        acc = fmaf(float(isum), x_scale * scalar::load(a.scale_type, pair + g % 2 * scale_bytes, n % 16), acc);
        if (a.codes == GroupCodes::kInt4Min) {
          const float w_min = scalar::load(a.scale_type, pair + (2 + g % 2) * scale_bytes, n % 16);
          acc = fmaf(float(a.x_sum[m * groups + g]), x_scale * w_min, acc);
        }
      }
      if (a.channel_scale) acc *= scalar::load(DType::kF32, panel + a.scale_offset, n % 16);
      if (a.bias) acc += scalar::load(a.bias_dtype, a.bias, n);
      scalar::store(a.out_dtype, a.out, m * a.out_stride + n, acc);
    }
  }
}

}  // namespace tle
