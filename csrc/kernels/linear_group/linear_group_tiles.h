// linear_group by tiles of rows x one panel, for every vector variant whose registers hold sums of one row; include after one of
// common/lanes_*.h and after these primitives of the file's width:
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

// The outputs of kRows rows and a panel, which is read from its beginning to its end. Sums of a group are made for kTogether parts at a time, so
// that they, the rows' fp32 accumulators and the codes fit the registers; a line that is unpacked serves kRows rows.
template <GroupCodes kCodes, bool kChannelScale, int kRows, int kTogether>
static inline void tile(const LinearGroupArgs& a, int64_t row, int64_t panel) {
  constexpr bool kMin = kCodes == GroupCodes::kInt4Min;
  constexpr int64_t kLineCodes = kCodes == GroupCodes::kInt8 ? 4 : 8, kBlockLines = 32 / kLineCodes;
  const int64_t groups = linear_group_groups(a), whole_groups = a.k / a.group, blocks = a.group / 32;
  const int64_t scale_bytes = 16 * dtype_size(a.scale_type);  // of a group
  const int8_t* x = a.x + row * a.x_stride;
  const float* x_scale = a.x_scale + row * groups;
  const int32_t* x_sum = a.x_sum + row * groups;

  Part acc[kRows][kParts];
  TLE_UNROLL for (int r = 0; r < kRows; ++r)
    TLE_UNROLL for (int i = 0; i < kParts; ++i) acc[r][i] = broadcast(0.0f);

  const uint8_t *w = linear_group_panel(a, panel), *scales = w;
  for (int64_t g = 0; g < groups; ++g) {
    f32x16 w_scale, w_min;
    if constexpr (!kChannelScale) {
      if (g % 2 == 0) {
        scales = w;
        w += (kMin ? 4 : 2) * scale_bytes;
      } else {
        scales += scale_bytes;
      }
      w_scale = linear_group_load(a.scale_type, scales);
      if constexpr (kMin) w_min = linear_group_load(a.scale_type, scales + 2 * scale_bytes);
    }
    const int64_t lines = g < whole_groups ? blocks * kBlockLines : (a.k - g * a.group + kLineCodes - 1) / kLineCodes;
    TLE_UNROLL for (int i = 0; i < kParts; i += kTogether) {
      const uint8_t* line = w + 64 / kParts * i;
      const int8_t* codes = x;
      Sums sums[kTogether][kRows];
      TLE_UNROLL for (int j = 0; j < kTogether; ++j)
        TLE_UNROLL for (int r = 0; r < kRows; ++r) sums[j][r] = first_sums<kCodes>(x_sum[r * groups + g]);
      if (g < whole_groups) {
        for (int64_t block = 0; block < blocks; ++block, line += 64 * kBlockLines, codes += 32)
          add_lines<kCodes, kBlockLines>(sums, line, codes, a.x_stride);
      } else {
        for (int64_t l = 0; l < lines; ++l, line += 64, codes += kLineCodes) add_lines<kCodes, 1>(sums, line, codes, a.x_stride);
      }
      TLE_UNROLL for (int r = 0; r < kRows; ++r) {
        const Part scale = broadcast(x_scale[r * groups + g]);
        TLE_UNROLL for (int j = 0; j < kTogether; ++j) {
          Part& to = acc[r][i + j];
          if constexpr (kChannelScale) {
            to = fma(to_float(sums[j][r]), scale, to);
          } else {
            to = fma(to_float(sums[j][r]), mul(scale, part(w_scale, i + j)), to);
            if constexpr (kMin) to = fma(broadcast(float(x_sum[r * groups + g])), mul(scale, part(w_min, i + j)), to);
          }
        }
      }
    }
    w += 64 * lines;
    x += kLineCodes * lines;
  }
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
