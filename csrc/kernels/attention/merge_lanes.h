// How a block's result joins a row's state (attention.h), on the 16 lanes; include after one of common/lanes_*.h.
#pragma once

#include <math.h>

namespace tle {
namespace {

static inline float exp_of(float x) {
  float lanes[16];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

// acc and block_acc: dv elements rounded up to whole lanes.
static inline void merge_block(float* max, float* sum, float* acc, float block_max, float block_sum,
                               const float* block_acc, int64_t dv) {
  if (block_sum == 0.0f) return;
  if (*sum == 0.0f) {
    *max = block_max;
    *sum = block_sum;
    for (int64_t d = 0; d < dv; d += 16) store(acc + d, load(block_acc + d));
    return;
  }
  const float m = block_max > *max ? block_max : *max;
  const float x = exp_of(*max - m), y = exp_of(block_max - m);
  *max = m;
  *sum = fmaf(block_sum, y, *sum * x);
  for (int64_t d = 0; d < dv; d += 16) store(acc + d, fma(load(block_acc + d), set1(y), mul(load(acc + d), set1(x))));
}

}  // namespace
}  // namespace tle
