// Without dot products: SMULL and SADALP. Two products of -128 and -128 do not fit in 16 bits, so none are added there.
#include "csrc/kernels/common/lanes_neon.h"
#include "csrc/kernels/common/registers.h"

namespace tle {
namespace {

using Sums = int32x4_t;
using Codes = int8x16_t;
constexpr int kSums = 8;  // two for each channel, two channels in a register

static inline Codes four_codes(const int8_t* a) {
  int32_t codes;
  memcpy(&codes, a, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(codes));
}
static inline Sums start(int32_t) { return vdupq_n_s32(0); }
static inline void dot(Sums (&acc)[kSums], const int8_t* line, Codes four) {
  TLE_UNROLL for (int i = 0; i < 4; ++i) {
    const int8x16_t codes = vld1q_s8(line + 16 * i);
    acc[2 * i] = vpadalq_s16(acc[2 * i], vmull_s8(vget_low_s8(codes), vget_low_s8(four)));
    acc[2 * i + 1] = vpadalq_s16(acc[2 * i + 1], vmull_high_s8(codes, four));
  }
}
static inline i32x16 channel_sums(const Sums (&acc)[kSums]) {
  return {{vpaddq_s32(acc[0], acc[1]), vpaddq_s32(acc[2], acc[3]), vpaddq_s32(acc[4], acc[5]),
           vpaddq_s32(acc[6], acc[7])}};
}

}  // namespace
}  // namespace tle

#include "csrc/kernels/sdot_gemv/sdot_gemv_lines.h"

namespace tle {

void sdot_gemv_neon(const SdotGemvArgs& s) { sdot_gemv_lines(s); }

}  // namespace tle
