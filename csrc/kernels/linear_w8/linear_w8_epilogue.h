// From integer sums to outputs, for every vector variant of linear_w8; include after one of common/lanes_*.h.
#pragma once

#include "csrc/kernels/linear_w8/linear_w8.h"

namespace tle {
namespace {

// Several rows use a line more slowly than one row does, and then the hardware's own prefetching does not run far enough ahead: on Zen 4
// 8 rows read weights from memory at 45 % of its bandwidth without this, at 75-90 % with it. One row is at 98 % without.
constexpr int64_t kPrefetchAhead = 4096;

static inline int64_t linear_w8_panels(const LinearW8Args& a) { return (a.n + 15) / 16; }

static inline const uint8_t* linear_w8_panel(const LinearW8Args& a, int64_t panel) {
  return a.panels + panel * a.panel_stride;
}

// out[row, 16 panel ...] from the sums of that panel's channels.
static inline void linear_w8_store(const LinearW8Args& a, int64_t row, int64_t panel, i32x16 acc) {
  const float* w_scale = reinterpret_cast<const float*>(linear_w8_panel(a, panel) + a.scale_offset);
  const int64_t first = 16 * panel, channels = a.n - first < 16 ? a.n - first : 16;
  f32x16 y = mul(mul(to_float(acc), set1(a.x_scale[row])), load(w_scale));
  if (a.bias) y = add(y, load_any(a.bias_dtype, a.bias, first, channels));
  store_any(a.out_dtype, a.out, row * a.out_stride + first, channels, y);
}

}  // namespace
}  // namespace tle
