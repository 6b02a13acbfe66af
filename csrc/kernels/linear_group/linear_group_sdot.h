// Sums of a group by SDOT: a line is four registers of four channels, and a lane of x holds the four codes that meet it. Include after
// common/lanes_neon.h, in files compiled with the dot product extension.
#pragma once

#include "csrc/kernels/common/registers.h"
#include "csrc/kernels/linear_group/linear_group.h"
#include "csrc/kernels/linear_group/linear_group_quarters.h"

namespace tle {
namespace {

// The lane is an immediate of the instruction; where `lane` is a constant after unrolling, one of the four is left.
static inline int32x4_t sdot_lane(int32x4_t acc, int8x16_t w, int8x16_t x, int lane) {
  switch (lane) {
    case 0: return vdotq_laneq_s32(acc, w, x, 0);
    case 1: return vdotq_laneq_s32(acc, w, x, 1);
    case 2: return vdotq_laneq_s32(acc, w, x, 2);
    default: return vdotq_laneq_s32(acc, w, x, 3);
  }
}

template <GroupCodes kCodes, int kLines, int kTogether, int kRows>
static inline void add_lines(Sums (&sums)[kTogether][kRows], const uint8_t* w, const int8_t* x, int64_t x_stride) {
  constexpr int kLineFours = kCodes == GroupCodes::kInt8 ? 1 : 2;  // lanes of x for a line
  constexpr int kRegisters = kLines == 1 ? kLineFours : 2;         // of x for a row
  int8x16_t codes[kRows][kRegisters];
  TLE_UNROLL for (int r = 0; r < kRows; ++r)
    TLE_UNROLL for (int i = 0; i < kRegisters; ++i)
      codes[r][i] = kLines == 1 ? four_codes(x + r * x_stride + 4 * i) : vld1q_s8(x + r * x_stride + 16 * i);
  TLE_UNROLL for (int l = 0; l < kLines; ++l)
    TLE_UNROLL for (int j = 0; j < kTogether; ++j) {
      const uint8x16_t line = vld1q_u8(w + 64 * l + 16 * j);
      TLE_UNROLL for (int half = 0; half < kLineFours; ++half) {
        const int8x16_t of_k = kCodes == GroupCodes::kInt8 ? vreinterpretq_s8_u8(line) : half == 0 ? low_nibbles(line) : high_nibbles(line);
        const int four = kLineFours * l + half;  // which four codes of the row
        TLE_UNROLL for (int r = 0; r < kRows; ++r)
          sums[j][r] = kLines == 1 ? vdotq_s32(sums[j][r], of_k, codes[r][half]) : sdot_lane(sums[j][r], of_k, codes[r][four / 4], four % 4);
      }
    }
}

}  // namespace
}  // namespace tle

#include "csrc/kernels/linear_group/linear_group_tiles.h"

namespace tle {
namespace {

// Rows row .. a.rows of every panel.
static inline void sdot_rows(const LinearGroupArgs& a, int64_t row) {
  for (; row + 4 <= a.rows; row += 4) rows_of_tiles<4, 1>(a, row);
  switch (a.rows - row) {
    case 3: return rows_of_tiles<3, 1>(a, row);
    case 2: return rows_of_tiles<2, 2>(a, row);
    case 1: return rows_of_tiles<1, 4>(a, row);
  }
}

}  // namespace
}  // namespace tle
