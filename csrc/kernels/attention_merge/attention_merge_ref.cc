#include "csrc/kernels/attention_merge/attention_merge.h"

#include "csrc/kernels/common/scalar.h"

namespace tle {

void attention_merge_ref(const AttentionMergeArgs& a) {
  for (int64_t row = 0; row < a.heads * a.queries; ++row) {
    float max = -INFINITY, sum = 0.0f;
    float* acc = a.acc + row * a.acc_stride;
    for (int64_t p = 0; p < a.partials; ++p) {
      const int64_t at = p * a.partial_stride + row;
      const float* part = a.acc + at * a.acc_stride;
      if (a.sum[at] == 0.0f) continue;
      if (sum == 0.0f) {
        max = a.max[at];
        sum = a.sum[at];
        for (int64_t d = 0; d < a.dv; ++d) acc[d] = part[d];
        continue;
      }
      const float m = a.max[at] > max ? a.max[at] : max;
      const float x = scalar::exp(max - m), y = scalar::exp(a.max[at] - m);
      max = m;
      sum = fmaf(a.sum[at], y, sum * x);
      for (int64_t d = 0; d < a.dv; ++d) acc[d] = fmaf(part[d], y, acc[d] * x);
    }
    const bool empty = sum == 0.0f;
    float factor = 1.0f;
    if (a.sinks != nullptr) {
      const float sink = scalar::load(a.sinks_dtype, a.sinks, row % a.heads), m = sink > max ? sink : max;
      factor = scalar::exp(max - m);
      sum = sum * factor + scalar::exp(sink - m);
    }
    const int64_t out = row % a.heads * a.out_head_stride + row / a.heads * a.out_query_stride;
    for (int64_t d = 0; d < a.dv; ++d)
      scalar::store(a.dtype, a.out, out + d, empty ? 0.0f : acc[d] * factor / sum);
  }
}

}  // namespace tle
