// By 16-bit products, four registers a line (see linear_w8_int16.h). Not by VPMADDUBSW as a row of linear_w8: a may
// hold -128 here, whose sign cannot be turned.
#include "csrc/kernels/common/lanes_avx2.h"
#include "csrc/kernels/common/registers.h"

namespace tle {
namespace {

using Sums = __m256i;
using Codes = __m256i;
constexpr int kSums = 4;

static inline Codes four_codes(const int8_t* a) {
  int32_t codes;
  memcpy(&codes, a, 4);
  return _mm256_cvtepi8_epi16(_mm_set1_epi32(codes));
}
static inline Sums start(int32_t) { return _mm256_setzero_si256(); }
static inline void dot(Sums (&acc)[kSums], const int8_t* line, Codes four) {
  TLE_UNROLL for (int i = 0; i < kSums; ++i) {
    const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(line + 16 * i)));
    acc[i] = _mm256_add_epi32(acc[i], _mm256_madd_epi16(words, four));
  }
}
static inline i32x16 channel_sums(const Sums (&acc)[kSums]) {
  // hadd works within 128-bit halves: channels 0 1 4 5 | 2 3 6 7.
  return {_mm256_permute4x64_epi64(_mm256_hadd_epi32(acc[0], acc[1]), 0xD8),
          _mm256_permute4x64_epi64(_mm256_hadd_epi32(acc[2], acc[3]), 0xD8)};
}

}  // namespace
}  // namespace tle

#include "csrc/kernels/sdot_gemv/sdot_gemv_lines.h"

namespace tle {

void sdot_gemv_avx2(const SdotGemvArgs& s) { sdot_gemv_lines(s); }

}  // namespace tle
