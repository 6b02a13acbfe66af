// SVE2, any vector length: a line is 64 / VL registers. Lanes are channels, so a longer vector takes more channels at
// once and needs nothing else; the four codes of a line are one of four groups of x, in every 128 bits.
#include <arm_sve.h>

#include "csrc/kernels/common/lanes_neon.h"
#include "csrc/kernels/linear_w8/linear_w8_epilogue.h"

namespace tle {
namespace {

// Sums of kRows rows (1 to 4) for the channels of one register of every line (two registers if kTwo), the first at byte
// `offset` of the line. Scalable vectors cannot be in arrays, so each row's have names: a and b are the first and
// second register's sums.
template <int kRows, bool kTwo>
static inline void scalable_tile(const LinearW8Args& a, int64_t row, const uint8_t* panel, int64_t offset,
                                 int32_t (*sums)[16]) {
  const int64_t vl = int64_t(svcntb());
  const svbool_t first = svwhilelt_b8_s64(offset, 64), second = svwhilelt_b8_s64(offset + vl, 64);
  svint32_t a0 = svdup_s32(0), a1 = a0, a2 = a0, a3 = a0, b0 = a0, b1 = a0, b2 = a0, b3 = a0;
  const int8_t* w = reinterpret_cast<const int8_t*>(panel) + offset;
  const int8_t* x = a.x + row * a.x_stride;

// One line, whose codes are group `lane` of x0 .. x3.
#define TLE_LINE(line, lane)                                   \
  do {                                                         \
    const svint8_t wa = svld1_s8(first, w + 64 * (line));      \
    a0 = svdot_lane_s32(a0, wa, x0, lane);                     \
    if (kRows > 1) a1 = svdot_lane_s32(a1, wa, x1, lane);      \
    if (kRows > 2) a2 = svdot_lane_s32(a2, wa, x2, lane);      \
    if (kRows > 3) a3 = svdot_lane_s32(a3, wa, x3, lane);      \
    if (!kTwo) break;                                          \
    const svint8_t wb = svld1_s8(second, w + 64 * (line) + vl); \
    b0 = svdot_lane_s32(b0, wb, x0, lane);                     \
    if (kRows > 1) b1 = svdot_lane_s32(b1, wb, x1, lane);      \
    if (kRows > 2) b2 = svdot_lane_s32(b2, wb, x2, lane);      \
    if (kRows > 3) b3 = svdot_lane_s32(b3, wb, x3, lane);      \
  } while (false)

  int64_t line = 0;
  for (; line + 4 <= a.lines; line += 4, w += 256, x += 16) {
    const svbool_t all = svptrue_b8();
    const svint8_t x0 = svld1rq_s8(all, x);
    const svint8_t x1 = kRows > 1 ? svld1rq_s8(all, x + a.x_stride) : x0;
    const svint8_t x2 = kRows > 2 ? svld1rq_s8(all, x + 2 * a.x_stride) : x0;
    const svint8_t x3 = kRows > 3 ? svld1rq_s8(all, x + 3 * a.x_stride) : x0;
    TLE_LINE(0, 0);
    TLE_LINE(1, 1);
    TLE_LINE(2, 2);
    TLE_LINE(3, 3);
  }
  for (; line < a.lines; ++line, w += 64, x += 4) {
    auto four_codes = [&](int r) {
      int32_t codes;
      memcpy(&codes, x + r * a.x_stride, 4);
      return codes;
    };
    const svint8_t x0 = svreinterpret_s8_s32(svdup_s32(four_codes(0)));
    const svint8_t x1 = kRows > 1 ? svreinterpret_s8_s32(svdup_s32(four_codes(1))) : x0;
    const svint8_t x2 = kRows > 2 ? svreinterpret_s8_s32(svdup_s32(four_codes(2))) : x0;
    const svint8_t x3 = kRows > 3 ? svreinterpret_s8_s32(svdup_s32(four_codes(3))) : x0;
    TLE_LINE(0, 0);
  }
#undef TLE_LINE

  const int64_t channel = offset / 4;
  auto store_row = [&](int r, svint32_t sa, svint32_t sb) {
    svst1_s32(svwhilelt_b32_s64(channel, 16), sums[r] + channel, sa);
    if (kTwo) svst1_s32(svwhilelt_b32_s64(channel + vl / 4, 16), sums[r] + channel + vl / 4, sb);
  };
  store_row(0, a0, b0);
  if (kRows > 1) store_row(1, a1, b1);
  if (kRows > 2) store_row(2, a2, b2);
  if (kRows > 3) store_row(3, a3, b3);
}

template <int kRows>
static inline void panel_rows(const LinearW8Args& a, int64_t row, int64_t panel) {
  const int64_t vl = int64_t(svcntb());
  const uint8_t* w = linear_w8_panel(a, panel);
  int32_t sums[kRows][16];
  if (vl >= 64) {
    scalable_tile<kRows, false>(a, row, w, 0, sums);
  } else {
    for (int64_t offset = 0; offset < 64; offset += 2 * vl) scalable_tile<kRows, true>(a, row, w, offset, sums);
  }
  for (int r = 0; r < kRows; ++r) {
    const i32x16 acc = {{vld1q_s32(sums[r]), vld1q_s32(sums[r] + 4), vld1q_s32(sums[r] + 8), vld1q_s32(sums[r] + 12)}};
    linear_w8_store(a, row + r, panel, acc);
  }
}

}  // namespace

void linear_w8_sve2(const LinearW8Args& a) {
  for (int64_t panel = 0; panel < linear_w8_panels(a); ++panel) {
    int64_t row = 0;
    for (; row + 4 <= a.rows; row += 4) panel_rows<4>(a, row, panel);
    switch (a.rows - row) {
      case 3: panel_rows<3>(a, row, panel); break;
      case 2: panel_rows<2>(a, row, panel); break;
      case 1: panel_rows<1>(a, row, panel); break;
    }
  }
}

}  // namespace tle
