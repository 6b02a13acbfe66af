// AVX-512 VNNI: a line is one register, and vpdpbusd multiplies its codes, unsigned, by 4 broadcast codes of x.
//
// 4-bit codes are unsigned; 8-bit ones become so by XOR with 0x80 (w + 128). The sum is then too large by 8 or 128
// sum(x): a group starts at minus that.
#include "csrc/kernels/common/lanes_avx512.h"
#include "csrc/kernels/common/registers.h"
#include "csrc/kernels/linear_group/linear_group.h"

namespace tle {
namespace {

using Sums = __m512i;
using Part = __m512;
constexpr int kParts = 1;

static inline Part part(f32x16 a, int) { return a.v; }
static inline f32x16 whole(const Part a[1]) { return {a[0]}; }
static inline Part to_float(Sums a) { return _mm512_cvtepi32_ps(a); }
static inline Part broadcast(float a) { return _mm512_set1_ps(a); }
static inline Part mul(Part a, Part b) { return _mm512_mul_ps(a, b); }
static inline Part fma(Part a, Part b, Part c) { return _mm512_fmadd_ps(a, b, c); }

template <GroupCodes kCodes, int kXBytes>
static inline Sums first_sums(int32_t x_sum) {
  constexpr int32_t kOffset = kCodes == GroupCodes::kInt8 ? 128 : kCodes == GroupCodes::kInt4 ? 8 : 0;
  return _mm512_set1_epi32(-kOffset * x_sum);
}

static inline __m512i four_codes(const int8_t* x) {
  int32_t codes;
  memcpy(&codes, x, 4);
  return _mm512_set1_epi32(codes);
}

// 4-bit codes of one row would be a long chain of products that wait for each other: low and high ones have sums of
// their own, which start afresh in each block of lines. (8-bit codes come from the second cache no faster.)
template <GroupCodes kCodes, int kXBytes, int kLines, bool kGroup32, int kRows>
[[gnu::always_inline]] static inline void add_lines(Sums (&sums)[1][kRows], const uint8_t* w,
                                                    const int8_t* x, int64_t x_stride) {
  constexpr bool kTwo = kCodes != GroupCodes::kInt8 && kRows == 1 && kLines > 1;
  Sums other[2] = {kTwo && kGroup32 ? sums[0][0] : _mm512_setzero_si512(), _mm512_setzero_si512()};
  TLE_UNROLL for (int i = 0; i < kLines; ++i) {
    __m512i line = _mm512_loadu_si512(w + 64 * i);
    TLE_IN_REGISTER(line);
    if constexpr (kCodes == GroupCodes::kInt8) {
      const __m512i codes = _mm512_xor_si512(line, _mm512_set1_epi8(int8_t(0x80)));
      TLE_UNROLL for (int r = 0; r < kRows; ++r)
        sums[0][r] = _mm512_dpbusd_epi32(sums[0][r], codes, four_codes(x + r * x_stride + 4 * i));
    } else {
      const __m512i nibble = _mm512_set1_epi8(15);
      const __m512i low = _mm512_and_si512(line, nibble), high = _mm512_and_si512(_mm512_srli_epi16(line, 4), nibble);
      TLE_UNROLL for (int r = 0; r < kRows; ++r) {
        Sums& sum = kTwo ? other[0] : sums[0][r];
        sum = _mm512_dpbusd_epi32(sum, low, four_codes(x + r * x_stride + 8 * i));
      }
      TLE_UNROLL for (int r = 0; r < kRows; ++r) {
        Sums& sum = kTwo ? other[1] : sums[0][r];
        sum = _mm512_dpbusd_epi32(sum, high, four_codes(x + r * x_stride + 8 * i + 4));
      }
    }
  }
  if constexpr (kTwo) {
    const Sums both = _mm512_add_epi32(other[0], other[1]);
    sums[0][0] = kGroup32 ? both : _mm512_add_epi32(sums[0][0], both);
  }
}

}  // namespace
}  // namespace tle

#include "csrc/kernels/linear_group/linear_group_tiles.h"

namespace tle {

void linear_group_vnni(const LinearGroupArgs& a) {
  int64_t row = 0;
  for (; row + 8 <= a.rows; row += 8) rows_of_tiles<8, 1>(a, row);
  switch (a.rows - row) {
    case 7: return rows_of_tiles<7, 1>(a, row);
    case 6: return rows_of_tiles<6, 1>(a, row);
    case 5: return rows_of_tiles<5, 1>(a, row);
    case 4: return rows_of_tiles<4, 1>(a, row);
    case 3: return rows_of_tiles<3, 1>(a, row);
    case 2: return rows_of_tiles<2, 1>(a, row);
    case 1: return rows_of_tiles<1, 1>(a, row);
  }
}

}  // namespace tle
