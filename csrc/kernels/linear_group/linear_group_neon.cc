// NEON without dot products (Armv8.0): SMULL and SMLAL make 16-bit products of two channels x 4 k, and as many of them
// are added there as fit. 4-bit codes: a whole block, 8 * 15 * 127 < 2^15. 8-bit codes: two lines, 2 * 128 * 127 <
// 2^15.
#include "csrc/kernels/common/lanes_neon.h"

#include "csrc/kernels/common/registers.h"
#include "csrc/kernels/linear_group/linear_group.h"
#include "csrc/kernels/linear_group/linear_group_quarters.h"

namespace tle {
namespace {

static inline Part to_float(Sums a) { return vcvtq_f32_s32(a); }

// 4-bit codes are unsigned: their sums are too large by 8 sum(x) where a code of 8 means 0.
template <GroupCodes kCodes, int kXBytes>
static inline Sums first_sums(int32_t x_sum) {
  return vdupq_n_s32(kCodes == GroupCodes::kInt4 ? -8 * x_sum : 0);
}

// Of four channels: 0 and 1 in low, 2 and 3 in high; four sums for each.
struct Products {
  int16x8_t low, high;
};
static inline Products multiply(int8x16_t w, int8x16_t x) {
  return {vmull_s8(vget_low_s8(w), vget_low_s8(x)), vmull_high_s8(w, x)};
}
static inline Products multiply_add(Products p, int8x16_t w, int8x16_t x) {
  return {vmlal_s8(p.low, vget_low_s8(w), vget_low_s8(x)), vmlal_high_s8(p.high, w, x)};
}

// The four codes of x that meet line or half line i: of a block in two registers, or of a single line.
template <int kLines>
static inline int8x16_t codes_of(const int8_t* x, int i) {
  if (kLines == 1) return four_codes(x + 4 * i);
  const int32x4_t four = vreinterpretq_s32_s8(vld1q_s8(x + i / 4 * 16));
  switch (i % 4) {
    case 0: return vreinterpretq_s8_s32(vdupq_laneq_s32(four, 0));
    case 1: return vreinterpretq_s8_s32(vdupq_laneq_s32(four, 1));
    case 2: return vreinterpretq_s8_s32(vdupq_laneq_s32(four, 2));
    default: return vreinterpretq_s8_s32(vdupq_laneq_s32(four, 3));
  }
}

template <int kLines, int kTogether, int kRows>
static inline void add_nibbles(Sums (&sums)[kTogether][kRows], const uint8_t* w, const int8_t* x, int64_t x_stride) {
  Products products[kTogether][kRows];
  TLE_UNROLL for (int l = 0; l < kLines; ++l) {
    int8x16_t x_low[kRows], x_high[kRows];
    TLE_UNROLL for (int r = 0; r < kRows; ++r) {
      x_low[r] = codes_of<kLines>(x + r * x_stride, 2 * l);
      x_high[r] = codes_of<kLines>(x + r * x_stride, 2 * l + 1);
    }
    TLE_UNROLL for (int j = 0; j < kTogether; ++j) {
      const uint8x16_t line = vld1q_u8(w + 64 * l + 16 * j);
      TLE_UNROLL for (int r = 0; r < kRows; ++r) {
        products[j][r] = l == 0 ? multiply(low_nibbles(line), x_low[r])
                                : multiply_add(products[j][r], low_nibbles(line), x_low[r]);
        products[j][r] = multiply_add(products[j][r], high_nibbles(line), x_high[r]);
      }
    }
  }
  TLE_UNROLL for (int j = 0; j < kTogether; ++j)
    TLE_UNROLL for (int r = 0; r < kRows; ++r)
      sums[j][r] = vaddq_s32(sums[j][r], vpaddq_s32(vpaddlq_s16(products[j][r].low), vpaddlq_s16(products[j][r].high)));
}

template <int kLines, int kTogether, int kRows>
static inline void add_bytes(Sums (&sums)[kTogether][kRows], const uint8_t* w, const int8_t* x, int64_t x_stride) {
  int32x4_t low[kTogether][kRows], high[kTogether][kRows];  // two sums for each channel
  TLE_UNROLL for (int l = 0; l < kLines; l += 2) {
    int8x16_t x_first[kRows], x_second[kRows];
    TLE_UNROLL for (int r = 0; r < kRows; ++r) {
      x_first[r] = codes_of<kLines>(x + r * x_stride, l);
      x_second[r] = kLines == 1 ? x_first[r] : codes_of<kLines>(x + r * x_stride, l + 1);
    }
    TLE_UNROLL for (int j = 0; j < kTogether; ++j) {
      const int8x16_t first = vreinterpretq_s8_u8(vld1q_u8(w + 64 * l + 16 * j));
      const int8x16_t second = kLines == 1 ? vdupq_n_s8(0) : vreinterpretq_s8_u8(vld1q_u8(w + 64 * l + 64 + 16 * j));
      TLE_UNROLL for (int r = 0; r < kRows; ++r) {
        const Products p = multiply_add(multiply(first, x_first[r]), second, x_second[r]);
        low[j][r] = l == 0 ? vpaddlq_s16(p.low) : vpadalq_s16(low[j][r], p.low);
        high[j][r] = l == 0 ? vpaddlq_s16(p.high) : vpadalq_s16(high[j][r], p.high);
      }
    }
  }
  TLE_UNROLL for (int j = 0; j < kTogether; ++j)
    TLE_UNROLL for (int r = 0; r < kRows; ++r) sums[j][r] = vaddq_s32(sums[j][r], vpaddq_s32(low[j][r], high[j][r]));
}

template <GroupCodes kCodes, int kXBytes, int kLines, bool kGroup32, int kTogether, int kRows>
[[gnu::always_inline]] static inline void add_lines(Sums (&sums)[kTogether][kRows], const uint8_t* w,
                                                    const int8_t* x, int64_t x_stride) {
  if constexpr (kCodes == GroupCodes::kInt8) {
    add_bytes<kLines>(sums, w, x, x_stride);
  } else {
    add_nibbles<kLines>(sums, w, x, x_stride);
  }
}

}  // namespace
}  // namespace tle

#include "csrc/kernels/linear_group/linear_group_tiles.h"

namespace tle {

void linear_group_neon(const LinearGroupArgs& a) {
  int64_t row = 0;
  for (; row + 2 <= a.rows; row += 2) rows_of_tiles<2, 2>(a, row);
  if (row < a.rows) rows_of_tiles<1, 4>(a, row);
}

}  // namespace tle
