// linear_group by tiles of rows x one panel, for every vector variant whose registers hold sums of one row; include
// after one of common/lanes_*.h and after these primitives of the file's width:
//
//   Sums, Part                     a register of 32-bit integers, of fp32 numbers: one for each of 16 / kParts channels
//   kParts                         registers that hold 16 channels
//   Part part(f32x16, int i)       channels 16 / kParts * i and following
//   f32x16 whole(const Part[kParts])   the inverse
//   Part to_float(Sums), mul(Part, Part), fma(Part a, Part b, Part c) = a b + c, broadcast(float)
//   Sums first_sums<kCodes>(int32_t x_sum)   what sums of a group start from when add_lines takes codes as unsigned
//   void add_lines<kCodes, kLines>(Sums (&)[kTogether][kRows], const uint8_t* w, const int8_t* x, int64_t x_stride)
//                                  adds kLines lines of kTogether parts, the first one at w, times kRows rows of x
#pragma once

#include "csrc/kernels/common/registers.h"
#include "csrc/kernels/linear_group/linear_group_epilogue.h"

namespace tle {
namespace {

// What is read ahead, measured on Zen 4 with 1 to 8 rows of 4096 k. While a line takes few products, the hardware's
// prefetching keeps up with the weights, but a panel takes x out of the first-level cache as it passes, and several
// loads wait for each line of x: asking for it in time is worth 5 to 40 %. From 5 products a line on the weights come
// too slowly for the hardware to follow: asking for them is worth 20 to 50 %.
constexpr int64_t kAheadInX = 128, kAheadInWeights = 4096;
template <GroupCodes kCodes, int kRows>
constexpr bool kFewProducts = kRows * (kCodes == GroupCodes::kInt8 ? 1 : 2) <= 4;

// Where kRows rows stand in a panel.
template <int kRows>
struct Place {
  const uint8_t *w, *scales;  // the lines and the scales of the next group
  const int8_t* x;            // the rows' next codes
  const float* x_scale;
  const int32_t* x_sum;
  int64_t group_lines, scale_bytes;  // lines of a whole group, bytes of 16 scales: computed once, not for each group
};

// acc += the next group, g. Its sums are made for kTogether parts at a time, so that they, the rows' fp32 accumulators
// and the codes fit the registers; a line that is unpacked serves kRows rows. kWhole: the group is not cut short by the
// end of k.
template <GroupCodes kCodes, bool kChannelScale, int kTogether, bool kWhole, int kRows>
static inline void add_group(const LinearGroupArgs& a, int64_t g, int64_t groups, Place<kRows>& at, Part (&acc)[kRows][kParts]) {
  constexpr bool kMin = kCodes == GroupCodes::kInt4Min;
  constexpr int64_t kLineCodes = kCodes == GroupCodes::kInt8 ? 4 : 8, kBlockLines = 32 / kLineCodes;
  const int64_t lines = kWhole ? at.group_lines : (a.k - g * a.group + kLineCodes - 1) / kLineCodes;
  f32x16 w_scale, w_min;
  if constexpr (!kChannelScale) {
    if (g % 2 == 0) {
      at.scales = at.w;
      at.w += (kMin ? 4 : 2) * at.scale_bytes;
    } else {
      at.scales += at.scale_bytes;
    }
    w_scale = linear_group_load(a.scale_type, at.scales);
    if constexpr (kMin) w_min = linear_group_load(a.scale_type, at.scales + 2 * at.scale_bytes);
  }
  if (kFewProducts<kCodes, kRows>) {
    TLE_UNROLL for (int r = 0; r < kRows; ++r) __builtin_prefetch(at.x + r * a.x_stride + kAheadInX);
  }
  TLE_UNROLL for (int i = 0; i < kParts; i += kTogether) {
    const uint8_t* w = at.w + 64 / kParts * i;
    const int8_t* x = at.x;
    Sums sums[kTogether][kRows];
    TLE_UNROLL for (int j = 0; j < kTogether; ++j)
      TLE_UNROLL for (int r = 0; r < kRows; ++r) sums[j][r] = first_sums<kCodes>(at.x_sum[r * groups + g]);
    if (kWhole) {
      int64_t left = lines;
      do {
        if (i == 0 && !kFewProducts<kCodes, kRows>) {
          TLE_UNROLL for (int l = 0; l < kBlockLines; ++l) __builtin_prefetch(w + 64 * l + kAheadInWeights);
        }
        add_lines<kCodes, kBlockLines>(sums, w, x, a.x_stride);
        w += 64 * kBlockLines;
        x += 32;
      } while ((left -= kBlockLines) != 0);
    } else {
      for (int64_t line = 0; line < lines; ++line, w += 64, x += kLineCodes) add_lines<kCodes, 1>(sums, w, x, a.x_stride);
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
        }
      }
    }
  }
  at.w += 64 * lines;
  at.x += kLineCodes * lines;
}

// The outputs of kRows rows and a panel, which is read from its beginning to its end.
template <GroupCodes kCodes, bool kChannelScale, int kRows, int kTogether>
static inline void tile(const LinearGroupArgs& a, int64_t row, int64_t panel) {
  const int64_t groups = linear_group_groups(a), whole_groups = a.k / a.group;
  const uint8_t* w = linear_group_panel(a, panel);
  const int64_t group_lines = a.group / (kCodes == GroupCodes::kInt8 ? 4 : 8), scale_bytes = 16 * dtype_size(a.scale_type);
  Place<kRows> at = {w, w, a.x + row * a.x_stride, a.x_scale + row * groups, a.x_sum + row * groups, group_lines, scale_bytes};
  Part acc[kRows][kParts];
  TLE_UNROLL for (int r = 0; r < kRows; ++r)
    TLE_UNROLL for (int i = 0; i < kParts; ++i) acc[r][i] = broadcast(0.0f);
  for (int64_t g = 0; g < whole_groups; ++g) add_group<kCodes, kChannelScale, kTogether, true>(a, g, groups, at, acc);
  if (whole_groups < groups) add_group<kCodes, kChannelScale, kTogether, false>(a, whole_groups, groups, at, acc);

  f32x16 y[kRows];
  TLE_UNROLL for (int r = 0; r < kRows; ++r) y[r] = whole(acc[r]);
  for (int r = 0; r < kRows; ++r) linear_group_store(a, row + r, panel, y[r]);
}

template <int kRows, int kTogether>
static inline void rows_of_tiles(const LinearGroupArgs& a, int64_t row) {
  for (int64_t panel = 0; panel < linear_group_panels(a); ++panel) {
    switch (a.codes) {
      case GroupCodes::kInt8:
        if (a.channel_scale) {
          tile<GroupCodes::kInt8, true, kRows, kTogether>(a, row, panel);
        } else {
          tile<GroupCodes::kInt8, false, kRows, kTogether>(a, row, panel);
        }
        break;
      case GroupCodes::kInt4: tile<GroupCodes::kInt4, false, kRows, kTogether>(a, row, panel); break;
      case GroupCodes::kInt4Min: tile<GroupCodes::kInt4Min, false, kRows, kTogether>(a, row, panel); break;
    }
  }
}

}  // namespace
}  // namespace tle
