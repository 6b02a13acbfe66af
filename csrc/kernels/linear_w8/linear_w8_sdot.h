// A few rows of linear_w8 by SDOT: a line is four registers of four channels, and a lane of x holds the line's four
// codes. Include after common/lanes_neon.h, in files compiled with the dot product extension.
#pragma once

#include "csrc/kernels/common/registers.h"
#include "csrc/kernels/linear_w8/linear_w8_epilogue.h"

namespace tle {
namespace {

static inline int8x16_t load_codes(const uint8_t* w) { return vreinterpretq_s8_u8(vld1q_u8(w)); }

// One line of kRows rows, whose codes are lane kLane of x.
template <int kLane, int kRows>
static inline void sdot_line(int32x4_t (&acc)[kRows][4], const uint8_t* w, const int8x16_t (&x)[kRows]) {
  const uint8x16x4_t line = vld1q_u8_x4(w);  // one instruction
  TLE_UNROLL for (int q = 0; q < 4; ++q)
    TLE_UNROLL for (int r = 0; r < kRows; ++r)
      acc[r][q] = vdotq_laneq_s32(acc[r][q], vreinterpretq_s8_u8(line.val[q]), x[r], kLane);
}

template <int kRows>
static inline void sdot_tile(const LinearW8Args& a, int64_t row, int64_t panel) {
  int32x4_t acc[kRows][4];
  TLE_UNROLL for (int r = 0; r < kRows; ++r)
    TLE_UNROLL for (int q = 0; q < 4; ++q) acc[r][q] = vdupq_n_s32(0);

  const uint8_t* w = linear_w8_panel(a, panel);
  const int8_t* x = a.x + row * a.x_stride;
  int64_t line = 0;
  for (; line + 4 <= a.lines; line += 4, w += 256, x += 16) {
    int8x16_t codes[kRows];
    TLE_UNROLL for (int r = 0; r < kRows; ++r) codes[r] = vld1q_s8(x + r * a.x_stride);
    sdot_line<0>(acc, w, codes);
    sdot_line<1>(acc, w + 64, codes);
    sdot_line<2>(acc, w + 128, codes);
    sdot_line<3>(acc, w + 192, codes);
  }
  for (; line < a.lines; ++line, w += 64, x += 4) {
    int8x16_t codes[kRows];
    TLE_UNROLL for (int r = 0; r < kRows; ++r) {
      int32_t four;
      memcpy(&four, x + r * a.x_stride, 4);
      codes[r] = vreinterpretq_s8_s32(vdupq_n_s32(four));
    }
    sdot_line<0>(acc, w, codes);
  }

  i32x16 sums[kRows];
  TLE_UNROLL for (int r = 0; r < kRows; ++r)
    TLE_UNROLL for (int q = 0; q < 4; ++q) sums[r].v[q] = acc[r][q];
  for (int r = 0; r < kRows; ++r) linear_w8_store(a, row + r, panel, sums[r]);
}

// Rows row .. a.rows of every panel, four at a time.
static inline void sdot_rows(const LinearW8Args& a, int64_t first) {
  for (int64_t panel = 0; panel < linear_w8_panels(a); ++panel) {
    int64_t row = first;
    for (; row + 4 <= a.rows; row += 4) sdot_tile<4>(a, row, panel);
    switch (a.rows - row) {
      case 3: sdot_tile<3>(a, row, panel); break;
      case 2: sdot_tile<2>(a, row, panel); break;
      case 1: sdot_tile<1>(a, row, panel); break;
    }
  }
}

}  // namespace
}  // namespace tle
