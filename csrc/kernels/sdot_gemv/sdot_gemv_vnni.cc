// One VPDPBUSD a line. As in linear_w8_vnni.cc the weights become unsigned by XOR with 0x80, and the sums start at -128
// sum(a).
#include "csrc/kernels/common/lanes_avx512.h"

namespace tle {
namespace {

using Sums = __m512i;
using Codes = __m512i;
constexpr int kSums = 1;

static inline Codes four_codes(const int8_t* a) {
  int32_t codes;
  memcpy(&codes, a, 4);
  return _mm512_set1_epi32(codes);
}
static inline Sums start(int32_t a_sum) { return _mm512_set1_epi32(int32_t(0u - 128u * uint32_t(a_sum))); }
static inline void dot(Sums (&acc)[kSums], const int8_t* line, Codes four) {
  const __m512i codes = _mm512_xor_si512(_mm512_loadu_si512(line), _mm512_set1_epi8(int8_t(0x80)));
  acc[0] = _mm512_dpbusd_epi32(acc[0], codes, four);
}
static inline i32x16 channel_sums(const Sums (&acc)[kSums]) { return {acc[0]}; }

}  // namespace
}  // namespace tle

#include "csrc/kernels/sdot_gemv/sdot_gemv_lines.h"

namespace tle {

void sdot_gemv_vnni(const SdotGemvArgs& s) { sdot_gemv_lines(s); }

}  // namespace tle
