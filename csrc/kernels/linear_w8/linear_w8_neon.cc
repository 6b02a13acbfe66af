// NEON without dot products (Armv8.0). Two products of codes fit in 16 bits (2 * 128 * 127 < 2^15): SMULL takes one
// line's, SMLAL adds the next line's, SADALP adds neighbours to the 32-bit sums. Three instructions for 16 products;
// -128 is exact.
#include "csrc/kernels/common/lanes_neon.h"

#include "csrc/kernels/common/registers.h"
#include "csrc/kernels/linear_w8/linear_w8_epilogue.h"

namespace tle {
namespace {

// 4 codes, four times.
static inline int8x16_t four_codes(const int8_t* x) {
  int32_t codes;
  memcpy(&codes, x, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(codes));
}

static inline int8x16_t load_codes(const uint8_t* w) { return vreinterpretq_s8_u8(vld1q_u8(w)); }

// Four channels of a pair of lines: two sums for each channel, channels 0 and 1 in acc[0], 2 and 3 in acc[1].
static inline void dot_pair(int32x4_t (&acc)[2], int8x16_t w0, int8x16_t w1, int8x16_t x0, int8x16_t x1) {
  acc[0] = vpadalq_s16(acc[0], vmlal_s8(vmull_s8(vget_low_s8(w0), vget_low_s8(x0)), vget_low_s8(w1), vget_low_s8(x1)));
  acc[1] = vpadalq_s16(acc[1], vmlal_high_s8(vmull_high_s8(w0, x0), w1, x1));
}

template <int kRows>
static inline void tile(const LinearW8Args& a, int64_t row, int64_t panel) {
  int32x4_t acc[kRows][4][2];
  TLE_UNROLL for (int r = 0; r < kRows; ++r)
    TLE_UNROLL for (int q = 0; q < 4; ++q) acc[r][q][0] = acc[r][q][1] = vdupq_n_s32(0);

  const uint8_t* w = linear_w8_panel(a, panel);
  const int8_t* x = a.x + row * a.x_stride;
  int64_t line = 0;
  for (; line + 2 <= a.lines; line += 2, w += 128, x += 8) {
    int8x16_t x0[kRows], x1[kRows];
    TLE_UNROLL for (int r = 0; r < kRows; ++r) {
      x0[r] = four_codes(x + r * a.x_stride);
      x1[r] = four_codes(x + r * a.x_stride + 4);
    }
    TLE_UNROLL for (int q = 0; q < 4; ++q) {
      const int8x16_t w0 = load_codes(w + 16 * q), w1 = load_codes(w + 64 + 16 * q);
      TLE_UNROLL for (int r = 0; r < kRows; ++r) dot_pair(acc[r][q], w0, w1, x0[r], x1[r]);
      TLE_KEEP_ORDER;
    }
  }
  if (line < a.lines) {
    const int8x16_t none = vdupq_n_s8(0);
    TLE_UNROLL for (int q = 0; q < 4; ++q)
      TLE_UNROLL for (int r = 0; r < kRows; ++r)
        dot_pair(acc[r][q], load_codes(w + 16 * q), none, four_codes(x + r * a.x_stride), none);
  }

  i32x16 sums[kRows];
  TLE_UNROLL for (int r = 0; r < kRows; ++r)
    TLE_UNROLL for (int q = 0; q < 4; ++q) sums[r].v[q] = vpaddq_s32(acc[r][q][0], acc[r][q][1]);
  for (int r = 0; r < kRows; ++r) linear_w8_store(a, row + r, panel, sums[r]);
}

}  // namespace

void linear_w8_neon(const LinearW8Args& a) {
  for (int64_t panel = 0; panel < linear_w8_panels(a); ++panel) {
    int64_t row = 0;
    for (; row + 2 <= a.rows; row += 2) tile<2>(a, row, panel);
    if (row < a.rows) tile<1>(a, row, panel);
  }
}

}  // namespace tle
