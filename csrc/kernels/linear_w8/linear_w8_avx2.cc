// AVX2: many rows by 16-bit products; few by vpmaddubsw, which needs fewer instructions for each byte of weights.
#include "csrc/kernels/common/lanes_avx2.h"

namespace tle {
namespace {

using Words = __m256i;
constexpr int kWordChannels = 4;

static inline Words sign_extend(const void* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
static inline Words four_words(const int16_t* p) {
  int64_t words;
  memcpy(&words, p, 8);
  return _mm256_set1_epi64x(words);
}
static inline Words dot(Words acc, Words a, Words b) { return _mm256_add_epi32(acc, _mm256_madd_epi16(a, b)); }
static inline i32x16 channel_sums(const Words acc[4]) {
  // hadd works within 128-bit halves: channels 0 1 4 5 | 2 3 6 7.
  return {_mm256_permute4x64_epi64(_mm256_hadd_epi32(acc[0], acc[1]), 0xD8),
          _mm256_permute4x64_epi64(_mm256_hadd_epi32(acc[2], acc[3]), 0xD8)};
}

}  // namespace
}  // namespace tle

#include "csrc/kernels/linear_w8/linear_w8_int16.h"

namespace tle {
namespace {

// acc + 8 channels x 4 k. |w| is unsigned and at most 128, x takes w's sign: pairs stay within 2 * 128 * 127 < 2^15, so
// vpmaddubsw never saturates, and -128 is exact.
static inline __m256i dot_bytes(__m256i acc, __m256i w, __m256i magnitude, __m256i x) {
  const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(x, w));
  return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

static inline __m256i four_codes(const int8_t* x) {
  int32_t codes;
  memcpy(&codes, x, 4);
  return _mm256_set1_epi32(codes);
}

// Few rows times whole panels, each read from its beginning to its end.
template <int kRows>
static inline void rows_of_panels(const LinearW8Args& a, int64_t row) {
  for (int64_t panel = 0; panel < linear_w8_panels(a); ++panel) {
    const uint8_t* w = linear_w8_panel(a, panel);
    const int8_t* x = a.x + row * a.x_stride;
    __m256i low_sums[kRows], high_sums[kRows];
    TLE_UNROLL for (int r = 0; r < kRows; ++r) low_sums[r] = high_sums[r] = _mm256_setzero_si256();
    for (int64_t line = 0; line < a.lines; ++line) {
      const __m256i* codes = reinterpret_cast<const __m256i*>(w + 64 * line);
      const __m256i low = _mm256_loadu_si256(codes), high = _mm256_loadu_si256(codes + 1);
      const __m256i low_magnitude = _mm256_abs_epi8(low), high_magnitude = _mm256_abs_epi8(high);
      TLE_UNROLL for (int r = 0; r < kRows; ++r) {
        const __m256i four = four_codes(x + r * a.x_stride + 4 * line);
        low_sums[r] = dot_bytes(low_sums[r], low, low_magnitude, four);
        high_sums[r] = dot_bytes(high_sums[r], high, high_magnitude, four);
      }
    }
    TLE_UNROLL for (int r = 0; r < kRows; ++r) {
      TLE_IN_REGISTER(low_sums[r]);  // until here, and not in the place on the stack where the call wants it
      TLE_IN_REGISTER(high_sums[r]);
    }
    TLE_UNROLL for (int r = 0; r < kRows; ++r) linear_w8_store(a, row + r, panel, {low_sums[r], high_sums[r]});
  }
}

}  // namespace

void linear_w8_avx2(const LinearW8Args& a) {
  int64_t row = 0;
  if (a.rows > 8)
    for (; row + 6 <= a.rows; row += 6) rows_of_tiles<6>(a, row);
  for (; row + 4 <= a.rows; row += 4) rows_of_panels<4>(a, row);
  switch (a.rows - row) {
    case 3: return rows_of_panels<3>(a, row);
    case 2: return rows_of_panels<2>(a, row);
    case 1: return rows_of_panels<1>(a, row);
  }
}

}  // namespace tle
