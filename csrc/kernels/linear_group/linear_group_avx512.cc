// AVX-512 without VNNI: a line is one register.
#include "csrc/kernels/common/lanes_avx512.h"

namespace tle {
namespace {

using Bytes = __m512i;
static inline Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
static inline Bytes splat8(int8_t a) { return _mm512_set1_epi8(a); }
static inline Bytes splat16(int16_t a) { return _mm512_set1_epi16(a); }
static inline Bytes splat32(int32_t a) { return _mm512_set1_epi32(a); }
static inline Bytes xor_bits(Bytes a, Bytes b) { return _mm512_xor_si512(a, b); }
static inline Bytes and_bits(Bytes a, Bytes b) { return _mm512_and_si512(a, b); }
static inline Bytes add16(Bytes a, Bytes b) { return _mm512_add_epi16(a, b); }
static inline Bytes add32(Bytes a, Bytes b) { return _mm512_add_epi32(a, b); }
static inline Bytes shift16(Bytes a) { return _mm512_srli_epi16(a, 4); }
static inline Bytes abs8(Bytes a) { return _mm512_abs_epi8(a); }
static inline Bytes signed8(Bytes x, Bytes w) {
  return _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
}
static inline Bytes maddubs(Bytes u, Bytes s) { return _mm512_maddubs_epi16(u, s); }
static inline Bytes madd(Bytes a, Bytes b) { return _mm512_madd_epi16(a, b); }

using Sums = __m512i;
using Part = __m512;
constexpr int kParts = 1;
static inline Part part(f32x16 a, int) { return a.v; }
static inline f32x16 whole(const Part a[1]) { return {a[0]}; }
static inline Part to_float(Sums a) { return _mm512_cvtepi32_ps(a); }
static inline Part broadcast(float a) { return _mm512_set1_ps(a); }
static inline Part mul(Part a, Part b) { return _mm512_mul_ps(a, b); }
static inline Part fma(Part a, Part b, Part c) { return _mm512_fmadd_ps(a, b, c); }

}  // namespace
}  // namespace tle

#include "csrc/kernels/linear_group/linear_group_maddubs.h"
#include "csrc/kernels/linear_group/linear_group_tiles.h"

namespace tle {

void linear_group_avx512(const LinearGroupArgs& a) {
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
