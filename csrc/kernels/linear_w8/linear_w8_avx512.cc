// AVX-512 without VNNI: a line is two registers of 16-bit words.
#include "csrc/kernels/common/lanes_avx512.h"

namespace tle {
namespace {

using Words = __m512i;
constexpr int kWordChannels = 8;

static inline Words sign_extend(const void* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
static inline Words four_words(const int16_t* p) {
  int64_t words;
  memcpy(&words, p, 8);
  return _mm512_set1_epi64(words);
}
static inline Words dot(Words acc, Words a, Words b) { return _mm512_add_epi32(acc, _mm512_madd_epi16(a, b)); }
static inline i32x16 channel_sums(const Words acc[2]) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  return {_mm512_add_epi32(_mm512_permutex2var_epi32(acc[0], even, acc[1]),
                           _mm512_permutex2var_epi32(acc[0], odd, acc[1]))};
}

}  // namespace
}  // namespace tle

#include "csrc/kernels/linear_w8/linear_w8_int16.h"

namespace tle {
namespace {

// One row: the four codes of x are widened on the way, and nothing is stored but the result. One panel at a time:
// memory is fastest when it is read in one stream.
static inline void vector_panel(const LinearW8Args& a, int64_t row, int64_t panel) {
  Words acc[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  const uint8_t* w = linear_w8_panel(a, panel);
  const int8_t* x = a.x + row * a.x_stride;
  for (int64_t line = 0; line < a.lines; ++line) {
    int32_t codes;
    memcpy(&codes, x + 4 * line, 4);
    const Words four = _mm512_cvtepi8_epi16(_mm256_set1_epi32(codes));
    TLE_UNROLL for (int i = 0; i < 2; ++i) acc[i] = dot(acc[i], sign_extend(w + 64 * line + 32 * i), four);
  }
  linear_w8_store(a, row, panel, channel_sums(acc));
}

}  // namespace

void linear_w8_avx512(const LinearW8Args& a) {
  int64_t row = 0;
  for (; row + 8 <= a.rows; row += 8) rows_of_tiles<8>(a, row);
  switch (a.rows - row) {
    case 7: return rows_of_tiles<7>(a, row);
    case 6: return rows_of_tiles<6>(a, row);
    case 5: return rows_of_tiles<5>(a, row);
    case 4: return rows_of_tiles<4>(a, row);
    case 3: return rows_of_tiles<3>(a, row);
    case 2: return rows_of_tiles<2>(a, row);
    case 1:
      for (int64_t panel = 0; panel < linear_w8_panels(a); ++panel) vector_panel(a, row, panel);
  }
}

}  // namespace tle
