// What the layout was made for: SDOT takes a register of it as it is.
#include "csrc/kernels/common/lanes_neon.h"
#include "csrc/kernels/common/registers.h"

namespace tle {
namespace {

using Sums = int32x4_t;
using Codes = int8x16_t;
constexpr int kSums = 4;

static inline Codes four_codes(const int8_t* a) {
  int32_t codes;
  memcpy(&codes, a, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(codes));
}
static inline Sums start(int32_t) { return vdupq_n_s32(0); }
static inline void dot(Sums (&acc)[kSums], const int8_t* line, Codes four) {
  TLE_UNROLL for (int i = 0; i < kSums; ++i) acc[i] = vdotq_s32(acc[i], vld1q_s8(line + 16 * i), four);
}
static inline i32x16 channel_sums(const Sums (&acc)[kSums]) { return {{acc[0], acc[1], acc[2], acc[3]}}; }

}  // namespace
}  // namespace tle

#include "csrc/kernels/sdot_gemv/sdot_gemv_lines.h"

namespace tle {

void sdot_gemv_dotprod(const SdotGemvArgs& s) { sdot_gemv_lines(s); }

}  // namespace tle
