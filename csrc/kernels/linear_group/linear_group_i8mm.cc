// SMMLA multiplies two rows of 8 codes by two channels of 8 codes: twice the products of SDOT for each instruction. Its
// operands are eight consecutive k of two channels and of two rows. Sums and accumulators keep the instruction's order,
// [row 0: channel, channel + 1; row 1: channel, channel + 1], and so do the scales that meet them. Few rows go to SDOT,
// which takes the lines as they are.
#include "csrc/kernels/common/lanes_neon.h"

#include "csrc/kernels/linear_group/linear_group_sdot.h"

namespace tle {
namespace {

// Fewer rows, and fewer left over, do not pay for the packing and the zeros.
constexpr int64_t kFewRows = 7, kFewLeft = 4;
constexpr int kRowScales = 16, kChannelScales = 16;

static inline int8x16_t zip_low(int8x16_t a, int8x16_t b) {
  return vreinterpretq_s8_s64(vzip1q_s64(vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b)));
}
static inline int8x16_t zip_high(int8x16_t a, int8x16_t b) {
  return vreinterpretq_s8_s64(vzip2q_s64(vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b)));
}

// A tile's registers: of x [8 k][two rows], of weights [8 k][two channels], both for 16 k, of sums [two rows][two
// channels].
static inline void put_rows(int8_t (*to)[16], int pair, int8x16_t a, int8x16_t b) {
  vst1q_s8(to[pair], zip_low(a, b));
  vst1q_s8(to[4 + pair], zip_high(a, b));
}
static inline void put_row_scales(float* to, int pair, float a, float b) {
  vst1q_f32(to + 4 * pair, vcombine_f32(vdup_n_f32(a), vdup_n_f32(b)));
}
static inline void put_channels(int8_t (*to)[16], int four, const int8x16_t (&codes)[4]) {
  TLE_UNROLL for (int i = 0; i < 2; ++i) {
    const int32x4_t a = vreinterpretq_s32_s8(codes[2 * i]), b = vreinterpretq_s32_s8(codes[2 * i + 1]);
    vst1q_s8(to[4 * i + 2 * four], vreinterpretq_s8_s32(vzip1q_s32(a, b)));
    vst1q_s8(to[4 * i + 2 * four + 1], vreinterpretq_s8_s32(vzip2q_s32(a, b)));
  }
}
static inline void put_channel_scales(float* to, float32x4_t first, float32x4_t last) {
  TLE_UNROLL for (int i = 0; i < 2; ++i) {
    const float32x4_t four = i == 0 ? first : last;
    vst1q_f32(to + 8 * i, vcombine_f32(vget_low_f32(four), vget_low_f32(four)));
    vst1q_f32(to + 8 * i + 4, vcombine_f32(vget_high_f32(four), vget_high_f32(four)));
  }
}
static inline void take_rows(const float (*acc)[4], int pair, float32x4_t (&a)[2], float32x4_t (&b)[2]) {
  for (int i = 0; i < 2; ++i) {
    const float64x2_t low = vreinterpretq_f64_f32(vld1q_f32(acc[4 * pair + 2 * i]));
    const float64x2_t high = vreinterpretq_f64_f32(vld1q_f32(acc[4 * pair + 2 * i + 1]));
    a[i] = vreinterpretq_f32_f64(vzip1q_f64(low, high));
    b[i] = vreinterpretq_f32_f64(vzip2q_f64(low, high));
  }
}

// In assembly: of the intrinsic GCC 12 copies accumulators.
static inline void multiply(Sums (&sums)[16], const int8_t (*w)[16], const int8_t (*x)[16]) {
  TLE_UNROLL for (int eight = 0; eight < 8; eight += 4) {
    int8x16_t rows[4], channels[4];
    TLE_UNROLL for (int i = 0; i < 4; ++i) rows[i] = vld1q_s8(x[eight + i]);
    TLE_UNROLL for (int i = 0; i < 4; ++i) channels[i] = vld1q_s8(w[eight + i]);
    TLE_UNROLL for (int p = 0; p < 4; ++p)
      TLE_UNROLL for (int c = 0; c < 4; ++c)
        __asm__("smmla %0.4s, %1.16b, %2.16b" : "+w"(sums[4 * p + c]) : "w"(rows[p]), "w"(channels[c]));
    TLE_KEEP_ORDER;
  }
}

template <bool kChannelScale, bool kMin>
static inline void accumulate(float (*acc)[4], const Sums (&sums)[16], const GroupScales& scales) {
  float32x4_t w[4], w_min[4];
  TLE_UNROLL for (int c = 0; c < 4; ++c) {
    if constexpr (!kChannelScale) w[c] = vld1q_f32(scales.w + 4 * c);
    if constexpr (kMin) w_min[c] = vld1q_f32(scales.w_min + 4 * c);
  }
  TLE_UNROLL for (int p = 0; p < 4; ++p) {
    const float32x4_t x = vld1q_f32(scales.x + 4 * p);
    float32x4_t x_sum;
    if constexpr (kMin) x_sum = vld1q_f32(scales.x_sum + 4 * p);
    TLE_UNROLL for (int c = 0; c < 4; ++c) {
      float32x4_t to = vld1q_f32(acc[4 * p + c]);
      const float32x4_t sum = to_float(sums[4 * p + c]);
      if constexpr (kMin) {
        add_product(to, sum, mul(x, w[c]));
        to = fma(x_sum, mul(x, w_min[c]), to);
      } else {
        TLE_IN_REGISTER(to);  // loaded, not copied
        to = fma(sum, kChannelScale ? x : mul(x, w[c]), to);
      }
      vst1q_f32(acc[4 * p + c], to);
      if (c % 2 == 1) TLE_KEEP_ORDER;
    }
  }
}

}  // namespace
}  // namespace tle

#include "csrc/kernels/linear_group/linear_group_blocks.h"

namespace tle {

void linear_group_i8mm(const LinearGroupArgs& a) {
  sdot_rows(a, many_rows(a, kFewRows, kFewLeft));
}

}  // namespace tle
