// linear_group by tiles of rows x one panel, for every vector variant whose registers hold sums of one row; include
// after one of common/lanes_*.h and after these primitives of the file's width:
//
//   Sums, Part                     a register of 32-bit integers, of fp32 numbers: one for each of 16 / kParts channels
//   kParts                         registers that hold 16 channels
//   Part part(f32x16, int i)       channels 16 / kParts * i and following
//   f32x16 whole(const Part[kParts])   the inverse
//   Part to_float(Sums), mul(Part, Part), fma(Part a, Part b, Part c) = a b + c, broadcast(float)
//   Sums first_sums<kCodes, kXBytes>(int32_t x_sum)   what sums of a group start from, if add_lines leaves anything out
//   void add_lines<kCodes, kXBytes, kLines, kGroup32>(Sums (&)[kTogether][kRows], const uint8_t* w, const int8_t* x,
//                                                     int64_t x_stride)
//                                  adds kLines lines of kTogether parts, the first one at w, times kRows rows of x.
//                                  kXBytes: of x for one of its codes; 1, unless the file prepares x. kGroup32: the
//                                  lines are a whole group of 32
#pragma once

#include "csrc/kernels/common/registers.h"
#include "csrc/kernels/linear_group/linear_group_epilogue.h"

namespace tle {
namespace {

// What is read ahead, measured on Zen 4 with 1 to 8 rows of 4096 k. While a line takes few products, the hardware's
// prefetching keeps up with the weights, but a panel takes x out of the first-level cache as it passes, and several
// loads wait for each line of x: asking for it in time is worth 5 to 40 %. From 5 products a line on the weights come
// too slowly for the hardware to follow: asking for them is worth 20 to 50 %. On Intel's cores it is worth that with
// few products as well (LinearGroupArgs::hints): waiting products fill their schedulers, and few lines are under way.
constexpr int64_t kAheadInX = 128, kAheadInWeights = 4096;
template <GroupCodes kCodes, int kRows>
constexpr bool kFewProducts = kRows * (kCodes == GroupCodes::kInt8 ? 1 : 2) <= 4;

// Where kRows rows stand in a panel.
template <int kRows>
struct Place {
  const uint8_t *w, *scales;  // the lines of the next group, or its pair's scales; the scales of the last one
  const int8_t* x;            // the rows' next codes
  int64_t x_stride;           // bytes
  const float* x_scale;
  const int32_t* x_sum;
  int64_t group_lines, scale_bytes;  // lines of a whole group, bytes of 16 scales: computed once, not for each group
};

// acc += the next group, g, which is the second of its pair or not. Its sums are made for kTogether parts at a time, so
// that they, the rows' fp32 accumulators and the codes fit the registers; a line that is unpacked serves kRows rows.
// kGroup32: the group is of 32 and its scales are fp16. kHints: asks for weights. kWhole: the group is not cut short by
// the end of k.
template <GroupCodes kCodes, int kXBytes, bool kChannelScale, bool kGroup32, bool kHints, int kTogether, bool kWhole,
          int kRows>
[[gnu::always_inline]] static inline void add_group(const LinearGroupArgs& a, int64_t g, bool second, int64_t groups,
                                                    Place<kRows>& at, Part (&acc)[kRows][kParts]) {
  constexpr bool kMin = kCodes == GroupCodes::kInt4Min;
  constexpr int64_t kLineCodes = kCodes == GroupCodes::kInt8 ? 4 : 8, kBlockLines = 32 / kLineCodes;
  const int64_t lines = !kWhole    ? (a.k - g * a.group + kLineCodes - 1) / kLineCodes
                        : kGroup32 ? kBlockLines
                                   : at.group_lines;
  const DType scale_type = kGroup32 ? DType::kF16 : a.scale_type;
  const int64_t scale_bytes = kGroup32 ? 32 : at.scale_bytes;
  f32x16 w_scale, w_min;
  if constexpr (!kChannelScale) {
    if (!second) {
      at.scales = at.w;
      at.w += (kMin ? 4 : 2) * scale_bytes;
    } else {
      at.scales += scale_bytes;
    }
    if constexpr (!kGroup32) {
      w_scale = linear_group_load(scale_type, at.scales);
      if constexpr (kMin) w_min = linear_group_load(scale_type, at.scales + 2 * scale_bytes);
    }
  }
  if (kFewProducts<kCodes, kRows>) {
    TLE_UNROLL for (int r = 0; r < kRows; ++r) __builtin_prefetch(at.x + r * at.x_stride + kAheadInX);
  }
  TLE_UNROLL for (int i = 0; i < kParts; i += kTogether) {
    const uint8_t* w = at.w + 64 / kParts * i;
    const int8_t* x = at.x;
    Sums sums[kTogether][kRows];
    TLE_UNROLL for (int j = 0; j < kTogether; ++j)
      TLE_UNROLL for (int r = 0; r < kRows; ++r) sums[j][r] = first_sums<kCodes, kXBytes>(at.x_sum[r * groups + g]);
    if (kWhole) {
      int64_t left = lines;
      do {
        if (i == 0 && kHints) {
          TLE_UNROLL for (int l = 0; l < kBlockLines; ++l) __builtin_prefetch(w + 64 * l + kAheadInWeights);
        }
        add_lines<kCodes, kXBytes, kBlockLines, kGroup32>(sums, w, x, at.x_stride);
        w += 64 * kBlockLines;
        x += 32 * kXBytes;
      } while ((left -= kBlockLines) != 0);
    } else {
      for (int64_t line = 0; line < lines; ++line, w += 64, x += kLineCodes * kXBytes)
        add_lines<kCodes, kXBytes, 1, false>(sums, w, x, at.x_stride);
    }
    if (kGroup32 && !kChannelScale && i == 0) {  // only here: the sums need the registers
      w_scale = linear_group_load(scale_type, at.scales);
      if constexpr (kMin) w_min = linear_group_load(scale_type, at.scales + 2 * scale_bytes);
    }
    TLE_UNROLL for (int r = 0; r < kRows; ++r) {
      const Part scale = broadcast(at.x_scale[r * groups + g]);
      TLE_UNROLL for (int j = 0; j < kTogether; ++j) {
        Part& to = acc[r][i + j];
        if constexpr (kChannelScale) {
          to = fma(to_float(sums[j][r]), scale, to);
        } else {
          to = fma(to_float(sums[j][r]), mul(scale, part(w_scale, i + j)), to);
          if constexpr (kMin) to = fma(broadcast(float(at.x_sum[r * groups + g])), mul(scale, part(w_min, i + j)), to);
          if constexpr (kRows == 1) {
            TLE_IN_REGISTER(to);
          }
        }
      }
    }
  }
  at.w += 64 * lines;
  at.x += kLineCodes * kXBytes * lines;
}

// acc += the groups first .. last - 1; first is even.
template <GroupCodes kCodes, int kXBytes, bool kChannelScale, bool kGroup32, bool kHints, int kTogether, int kRows>
[[gnu::always_inline]] static inline void add_groups(const LinearGroupArgs& a, int64_t first, int64_t last,
                                                     Place<kRows>& at, Part (&acc)[kRows][kParts]) {
  const int64_t groups = linear_group_groups(a), whole_groups = a.k / a.group;
  const int64_t end = last < whole_groups ? last : whole_groups;
  if constexpr (kRows == 1 && !kChannelScale) {
    for (int64_t g = first; g < end; g += 2) {
      add_group<kCodes, kXBytes, kChannelScale, kGroup32, kHints, kTogether, true>(a, g, false, groups, at, acc);
      if (g + 1 == end) break;
      add_group<kCodes, kXBytes, kChannelScale, kGroup32, kHints, kTogether, true>(a, g + 1, true, groups, at, acc);
    }
  } else {
    for (int64_t g = first; g < end; ++g)
      add_group<kCodes, kXBytes, kChannelScale, kGroup32, kHints, kTogether, true>(a, g, g % 2 == 1, groups, at, acc);
  }
  if (end < last)
    add_group<kCodes, kXBytes, kChannelScale, kGroup32, kHints, kTogether, false>(a, end, end % 2 == 1, groups, at,
                                                                                  acc);
}

// Where kRows rows begin in a panel.
template <GroupCodes kCodes, int kRows>
[[gnu::always_inline]] static inline Place<kRows> place_of(const LinearGroupArgs& a, int64_t row, int64_t panel) {
  const uint8_t* w = linear_group_panel(a, panel);
  const int64_t first = row * linear_group_groups(a);  // of the rows' scales and sums
  const int64_t group_lines = a.group / (kCodes == GroupCodes::kInt8 ? 4 : 8);
  const int64_t scale_bytes = 16 * dtype_size(a.scale_type);
  return {w, w, a.x + row * a.x_stride, a.x_stride, a.x_scale + first, a.x_sum + first, group_lines, scale_bytes};
}

template <int kRows>
[[gnu::always_inline]] static inline void clear_tile(Part (&acc)[kRows][kParts]) {
  TLE_UNROLL for (int r = 0; r < kRows; ++r)
    TLE_UNROLL for (int i = 0; i < kParts; ++i) acc[r][i] = broadcast(0.0f);
}

template <int kRows>
[[gnu::always_inline]] static inline void store_tile(const LinearGroupArgs& a, int64_t row, int64_t panel,
                                                     const Part (&acc)[kRows][kParts]) {
  f32x16 y[kRows];
  TLE_UNROLL for (int r = 0; r < kRows; ++r) y[r] = whole(acc[r]);
  for (int r = 0; r < kRows; ++r) linear_group_store(a, row + r, panel, y[r]);
}

// The outputs of kRows rows and a panel, which is read from its beginning to its end.
template <GroupCodes kCodes, bool kChannelScale, bool kGroup32, bool kHints, int kRows, int kTogether>
static inline void tile(const LinearGroupArgs& a, int64_t row, int64_t panel) {
  Place<kRows> at = place_of<kCodes, kRows>(a, row, panel);
  Part acc[kRows][kParts];
  clear_tile(acc);
  add_groups<kCodes, 1, kChannelScale, kGroup32, kHints, kTogether>(a, 0, linear_group_groups(a), at, acc);
  store_tile(a, row, panel, acc);
}

// One row has so little work for a group that it pays to compile the most common kind by itself: groups of 32, and fp16
// where their scales are the weight's.
template <GroupCodes kCodes, bool kChannelScale, bool kHints, int kRows, int kTogether>
static inline void tile_of_any_group(const LinearGroupArgs& a, int64_t row, int64_t panel) {
  if (kRows == 1 && a.group == 32 && (kChannelScale || a.scale_type == DType::kF16)) {
    tile<kCodes, kChannelScale, kRows == 1, kHints, kRows, kTogether>(a, row, panel);
  } else {
    tile<kCodes, kChannelScale, false, kHints, kRows, kTogether>(a, row, panel);
  }
}

#if defined(__x86_64__)
constexpr bool kHintsMayPay = true;
#else
constexpr bool kHintsMayPay = false;  // nobody asks for them
#endif
template <GroupCodes kCodes, bool kChannelScale, int kRows, int kTogether>
static inline void any_tile(const LinearGroupArgs& a, int64_t row, int64_t panel) {
  if (!kFewProducts<kCodes, kRows> || (kHintsMayPay && a.hints)) {
    tile_of_any_group<kCodes, kChannelScale, true, kRows, kTogether>(a, row, panel);
  } else {
    tile_of_any_group<kCodes, kChannelScale, !kFewProducts<kCodes, kRows>, kRows, kTogether>(a, row, panel);
  }
}

template <int kRows, int kTogether>
static inline void rows_of_tiles(const LinearGroupArgs& a, int64_t row) {
  for (int64_t panel = 0; panel < linear_group_panels(a); ++panel) {
    switch (a.codes) {
      case GroupCodes::kInt8:
        if (a.channel_scale) {
          any_tile<GroupCodes::kInt8, true, kRows, kTogether>(a, row, panel);
        } else {
          any_tile<GroupCodes::kInt8, false, kRows, kTogether>(a, row, panel);
        }
        break;
      case GroupCodes::kInt4: any_tile<GroupCodes::kInt4, false, kRows, kTogether>(a, row, panel); break;
      case GroupCodes::kInt4Min: any_tile<GroupCodes::kInt4Min, false, kRows, kTogether>(a, row, panel); break;
    }
  }
}

}  // namespace
}  // namespace tle
