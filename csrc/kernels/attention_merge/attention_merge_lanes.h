// attention_merge on the 16 lanes; include after one of common/lanes_*.h.
#pragma once

#include "csrc/kernels/attention/merge_lanes.h"
#include "csrc/kernels/attention_merge/attention_merge.h"

namespace tle {
namespace {

static inline void attention_merge_lanes(const AttentionMergeArgs& a) {
  for (int64_t row = 0; row < a.heads * a.queries; ++row) {
    const int64_t head = row % a.heads;
    float max = -INFINITY, sum = 0.0f;
    float* acc = a.acc + row * a.acc_stride;
    for (int64_t p = 0; p < a.partials; ++p) {
      const int64_t at = p * a.partial_stride + row;
      merge_block(&max, &sum, acc, a.max[at], a.sum[at], a.acc + at * a.acc_stride, a.dv);
    }
    const bool empty = sum == 0.0f;
    f32x16 factor = set1(1.0f);
    if (a.sinks != nullptr) {
      float sink[16];
      store(sink, load_any(a.sinks_dtype, a.sinks, head, 1));
      const float m = sink[0] > max ? sink[0] : max, x = exp_of(max - m);
      factor = set1(x);
      sum = sum * x + exp_of(sink[0] - m);
    }
    const int64_t out = head * a.out_head_stride + row / a.heads * a.out_query_stride;
    for (int64_t d = 0; d < a.dv; d += 16) {
      const f32x16 y = empty ? zero() : div(mul(load(acc + d), factor), set1(sum));
      store_any(a.dtype, a.out, out + d, a.dv - d, y);
    }
  }
}

}  // namespace
}  // namespace tle
