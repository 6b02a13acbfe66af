// What every vector variant of linear_group shares: where things lie, and how a tile ends. Include after one of
// common/lanes_*.h.
#pragma once

#include "csrc/kernels/linear_group/linear_group.h"

namespace tle {
namespace {

static inline int64_t linear_group_groups(const LinearGroupArgs& a) { return (a.k + a.group - 1) / a.group; }
static inline int64_t linear_group_panels(const LinearGroupArgs& a) { return (a.n + 15) / 16; }

static inline const uint8_t* linear_group_panel(const LinearGroupArgs& a, int64_t panel) {
  return a.panels + panel * a.panel_stride;
}

// The 16 scales or minima of a group.
static inline f32x16 linear_group_load(DType t, const uint8_t* p) {
  switch (t) {
    case DType::kF32: return load_as<DType::kF32>(p, 0);
    case DType::kBF16: return load_as<DType::kBF16>(p, 0);
    default: return load_as<DType::kF16>(p, 0);
  }
}

// out[row, 16 panel ...] from what the groups added up to. One copy of it for all tiles: it is long, and called once
// for a panel.
[[gnu::noinline]] static void linear_group_store(const LinearGroupArgs& a, int64_t row, int64_t panel, f32x16 y) {
  const int64_t first = 16 * panel, channels = a.n - first < 16 ? a.n - first : 16;
  if (a.channel_scale) y = mul(y, load_as<DType::kF32>(linear_group_panel(a, panel) + a.scale_offset, 0));
  if (a.bias) y = add(y, load_any(a.bias_dtype, a.bias, first, channels));
  store_any(a.out_dtype, a.out, row * a.out_stride + first, channels, y);
}

}  // namespace
}  // namespace tle
