// Few rows take the lines as they are (linear_group_sdot.h). For many, a register of four channels is multiplied by the
// lane of each of 8 rows that holds the same four k.
#include "csrc/kernels/common/lanes_neon.h"

#include "csrc/kernels/linear_group/linear_group_sdot.h"

namespace tle {
namespace {

// Fewer rows, and fewer left over, do not pay for the packing and the zeros.
constexpr int64_t kFewRows = 8, kFewLeft = 6;
constexpr int kRowScales = 8, kChannelScales = 8;

// A tile's registers: of x [row], of weights [4 k][four channels], both for 16 k, of sums [row][four channels].
static inline void put_rows(int8_t (*to)[16], int pair, int8x16_t a, int8x16_t b) {
  vst1q_s8(to[2 * pair], a);
  vst1q_s8(to[2 * pair + 1], b);
}
static inline void put_row_scales(float* to, int pair, float a, float b) {
  to[2 * pair] = a;
  to[2 * pair + 1] = b;
}
static inline void put_channels(int8_t (*to)[16], int four, const int8x16_t (&codes)[4]) {
  TLE_UNROLL for (int i = 0; i < 4; ++i) vst1q_s8(to[2 * i + four], codes[i]);
}
static inline void put_channel_scales(float* to, float32x4_t first, float32x4_t last) {
  vst1q_f32(to, first);
  vst1q_f32(to + 4, last);
}
static inline void take_rows(const float (*acc)[4], int pair, float32x4_t (&a)[2], float32x4_t (&b)[2]) {
  TLE_UNROLL for (int i = 0; i < 2; ++i) {
    a[i] = vld1q_f32(acc[4 * pair + i]);
    b[i] = vld1q_f32(acc[4 * pair + 2 + i]);
  }
}

// In assembly: of the intrinsic GCC 12 copies an accumulator in five.
static inline void multiply(Sums (&sums)[16], const int8_t (*w)[16], const int8_t (*x)[16]) {
  int8x16_t rows[8];
  TLE_UNROLL for (int r = 0; r < 8; ++r) rows[r] = vld1q_s8(x[r]);
  TLE_UNROLL for (int i = 0; i < 4; ++i) {
    const int8x16_t channels[2] = {vld1q_s8(w[2 * i]), vld1q_s8(w[2 * i + 1])};
    TLE_UNROLL for (int r = 0; r < 8; ++r)
      TLE_UNROLL for (int q = 0; q < 2; ++q)
        __asm__("sdot %0.4s, %1.16b, %2.4b[%3]" : "+w"(sums[2 * r + q]) : "w"(channels[q]), "w"(rows[r]), "i"(i));
    TLE_KEEP_ORDER;
  }
}

static inline float32x4_t mul_lane(float32x4_t a, float32x4_t b, int lane) {
  switch (lane) {
    case 0: return vmulq_laneq_f32(a, b, 0);
    case 1: return vmulq_laneq_f32(a, b, 1);
    case 2: return vmulq_laneq_f32(a, b, 2);
    default: return vmulq_laneq_f32(a, b, 3);
  }
}
// a b[lane] + c
static inline float32x4_t fma_lane(float32x4_t a, float32x4_t b, int lane, float32x4_t c) {
  switch (lane) {
    case 0: return vfmaq_laneq_f32(c, a, b, 0);
    case 1: return vfmaq_laneq_f32(c, a, b, 1);
    case 2: return vfmaq_laneq_f32(c, a, b, 2);
    default: return vfmaq_laneq_f32(c, a, b, 3);
  }
}
// to += a b[lane]
static inline void add_product_lane(float32x4_t& to, float32x4_t a, float32x4_t b, int lane) {
  __asm__("fmla %0.4s, %1.4s, %2.s[%3]" : "+w"(to) : "w"(a), "w"(b), "i"(lane));
}

template <bool kChannelScale, bool kMin>
static inline void accumulate(float (*acc)[4], const Sums (&sums)[16], const GroupScales& scales) {
  float32x4_t w[2], w_min[2], x[2], x_sum[2];
  TLE_UNROLL for (int i = 0; i < 2; ++i) {
    x[i] = vld1q_f32(scales.x + 4 * i);
    if constexpr (!kChannelScale) w[i] = vld1q_f32(scales.w + 4 * i);
    if constexpr (kMin) {
      x_sum[i] = vld1q_f32(scales.x_sum + 4 * i);
      w_min[i] = vld1q_f32(scales.w_min + 4 * i);
    }
  }
  TLE_UNROLL for (int r = 0; r < 8; ++r) {
    TLE_UNROLL for (int q = 0; q < 2; ++q) {
      float32x4_t to = vld1q_f32(acc[2 * r + q]);
      const float32x4_t sum = to_float(sums[2 * r + q]);
      if constexpr (kChannelScale) {
        add_product_lane(to, sum, x[r / 4], r % 4);
      } else if constexpr (kMin) {
        add_product(to, sum, mul_lane(w[q], x[r / 4], r % 4));
        to = fma_lane(mul_lane(w_min[q], x[r / 4], r % 4), x_sum[r / 4], r % 4, to);
      } else {
        TLE_IN_REGISTER(to);  // loaded, not copied
        to = fma(sum, mul_lane(w[q], x[r / 4], r % 4), to);
      }
      vst1q_f32(acc[2 * r + q], to);
    }
    TLE_KEEP_ORDER;
  }
}

}  // namespace
}  // namespace tle

#include "csrc/kernels/linear_group/linear_group_blocks.h"

namespace tle {

void linear_group_dotprod(const LinearGroupArgs& a) {
  sdot_rows(a, many_rows(a, kFewRows, kFewLeft));
}

}  // namespace tle
