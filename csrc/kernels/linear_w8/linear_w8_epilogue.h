// From integer sums to outputs, for every vector variant of linear_w8; include after one of common/lanes_*.h.
#pragma once

#include "csrc/kernels/common/prefetch.h"
#include "csrc/kernels/linear_w8/linear_w8.h"

namespace tle {
namespace {

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
