// SMMLA multiplies two rows of 8 codes by two channels of 8 codes: twice the products of SDOT for each instruction. Its
// operands are eight consecutive k of one channel (two lines, zipped) and of one row, so both are zipped; the panel
// once for a block of rows. Fewer than four rows are left to SDOT, which takes the lines as they are.
#include "csrc/kernels/common/lanes_neon.h"

#include "csrc/kernels/linear_w8/linear_w8_sdot.h"

namespace tle {
namespace {

constexpr int kPairs = 2;           // pairs of rows in a tile
constexpr int kBlockPairs = 32;     // pairs of rows that share a zipped piece of a panel
constexpr int64_t kChunk = 128;     // lines of a piece: 8 KiB

// Two lines become eight registers of two channels x 8 k. Missing lines are zeros.
static inline void zip_lines(const uint8_t* w, bool second, int8_t* out) {
  for (int q = 0; q < 4; ++q) {
    const int32x4_t a = vreinterpretq_s32_s8(load_codes(w + 16 * q));
    const int32x4_t b = second ? vreinterpretq_s32_s8(load_codes(w + 64 + 16 * q)) : vdupq_n_s32(0);
    vst1q_s8(out + 32 * q, vreinterpretq_s8_s32(vzip1q_s32(a, b)));
    vst1q_s8(out + 32 * q + 16, vreinterpretq_s8_s32(vzip2q_s32(a, b)));
  }
}

// Sums of a pair of rows: [two channels][row 0: channel, channel + 1; row 1: channel, channel + 1].
using PairSums = int32x4_t[8];

static inline void step(int32x4_t (&acc)[kPairs][8], const int8_t* w, const int8x16_t (&x)[kPairs]) {
  TLE_UNROLL for (int c = 0; c < 8; ++c) {
    const int8x16_t codes = vld1q_s8(w + 16 * c);
    TLE_UNROLL for (int p = 0; p < kPairs; ++p) acc[p][c] = vmmlaq_s32(acc[p][c], x[p], codes);
  }
}

static inline int8x16_t pair_low(int8x16_t a, int8x16_t b) {
  return vreinterpretq_s8_s64(vzip1q_s64(vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b)));
}
static inline int8x16_t pair_high(int8x16_t a, int8x16_t b) {
  return vreinterpretq_s8_s64(vzip2q_s64(vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b)));
}

// The next `bytes` codes of a row (at most 8), then zeros.
static inline int8x8_t some_codes(const int8_t* x, int64_t bytes) {
  int8_t codes[8] = {};
  memcpy(codes, x, size_t(bytes));
  return vld1_s8(codes);
}

// sums += kPairs pairs of rows x a zipped piece of `lines` lines.
static inline void tile(const int8_t* w, const int8_t* x, int64_t x_stride, int64_t lines, PairSums* sums) {
  int32x4_t acc[kPairs][8];
  TLE_UNROLL for (int p = 0; p < kPairs; ++p)
    TLE_UNROLL for (int c = 0; c < 8; ++c) acc[p][c] = sums[p][c];
  int64_t line = 0;
  for (; line + 4 <= lines; line += 4, w += 256, x += 16) {
    int8x16_t low[kPairs], high[kPairs];
    TLE_UNROLL for (int p = 0; p < kPairs; ++p) {
      const int8x16_t a = vld1q_s8(x + 2 * p * x_stride), b = vld1q_s8(x + (2 * p + 1) * x_stride);
      low[p] = pair_low(a, b);
      high[p] = pair_high(a, b);
    }
    step(acc, w, low);
    step(acc, w + 128, high);
  }
  for (; line < lines; line += 2, w += 128, x += 8) {
    const int64_t bytes = lines - line == 1 ? 4 : 8;
    int8x16_t codes[kPairs];
    TLE_UNROLL for (int p = 0; p < kPairs; ++p)
      codes[p] = vcombine_s8(some_codes(x + 2 * p * x_stride, bytes), some_codes(x + (2 * p + 1) * x_stride, bytes));
    step(acc, w, codes);
  }
  TLE_UNROLL for (int p = 0; p < kPairs; ++p)
    TLE_UNROLL for (int c = 0; c < 8; ++c) sums[p][c] = acc[p][c];
}

static inline void store_pair(const LinearW8Args& a, int64_t row, int64_t panel, const PairSums& sums) {
  i32x16 first, second;
  for (int q = 0; q < 4; ++q) {
    const int64x2_t low = vreinterpretq_s64_s32(sums[2 * q]), high = vreinterpretq_s64_s32(sums[2 * q + 1]);
    first.v[q] = vreinterpretq_s32_s64(vzip1q_s64(low, high));
    second.v[q] = vreinterpretq_s32_s64(vzip2q_s64(low, high));
  }
  linear_w8_store(a, row, panel, first);
  linear_w8_store(a, row + 1, panel, second);
}

// A block of rows: a multiple of 2 * kPairs, at most 2 * kBlockPairs.
static inline void block(const LinearW8Args& a, int64_t first, int64_t rows) {
  alignas(16) int8_t piece[kChunk * 64];
  PairSums sums[kBlockPairs];
  for (int64_t panel = 0; panel < linear_w8_panels(a); ++panel) {
    memset(sums, 0, sizeof sums);
    for (int64_t line = 0; line < a.lines; line += kChunk) {
      const int64_t lines = a.lines - line < kChunk ? a.lines - line : kChunk;
      const uint8_t* w = linear_w8_panel(a, panel) + 64 * line;
      for (int64_t i = 0; i < lines; i += 2) zip_lines(w + 64 * i, i + 1 < lines, piece + 64 * i);
      for (int64_t row = 0; row < rows; row += 2 * kPairs)
        tile(piece, a.x + (first + row) * a.x_stride + 4 * line, a.x_stride, lines, sums + row / 2);
    }
    for (int64_t row = 0; row < rows; row += 2) store_pair(a, first + row, panel, sums[row / 2]);
  }
}

}  // namespace

void linear_w8_i8mm(const LinearW8Args& a) {
  int64_t row = 0;
  while (a.rows - row >= 2 * kPairs) {
    const int64_t whole = (a.rows - row) / (2 * kPairs) * (2 * kPairs);
    const int64_t rows = whole < 2 * kBlockPairs ? whole : 2 * kBlockPairs;
    block(a, row, rows);
    row += rows;
  }
  sdot_rows(a, row);
}

}  // namespace tle
