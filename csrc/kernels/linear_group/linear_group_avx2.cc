// AVX2: a line is two registers of 8 channels.
#include "csrc/kernels/common/lanes_avx2.h"

namespace tle {
namespace {

using Bytes = __m256i;
static inline Bytes load_bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
static inline Bytes splat8(int8_t a) { return _mm256_set1_epi8(a); }
static inline Bytes splat16(int16_t a) { return _mm256_set1_epi16(a); }
static inline Bytes splat32(int32_t a) { return _mm256_set1_epi32(a); }
static inline Bytes and_bits(Bytes a, Bytes b) { return _mm256_and_si256(a, b); }
static inline Bytes add16(Bytes a, Bytes b) { return _mm256_add_epi16(a, b); }
static inline Bytes add32(Bytes a, Bytes b) { return _mm256_add_epi32(a, b); }
static inline Bytes shift16(Bytes a) { return _mm256_srli_epi16(a, 4); }
static inline Bytes abs8(Bytes a) { return _mm256_abs_epi8(a); }
static inline Bytes signed8(Bytes x, Bytes w) { return _mm256_sign_epi8(x, w); }
static inline Bytes maddubs(Bytes u, Bytes s) { return _mm256_maddubs_epi16(u, s); }
static inline Bytes madd(Bytes a, Bytes b) { return _mm256_madd_epi16(a, b); }

using Sums = __m256i;
using Part = __m256;
constexpr int kParts = 2;
static inline Part part(f32x16 a, int i) { return i == 0 ? a.lo : a.hi; }
static inline f32x16 whole(const Part a[2]) { return {a[0], a[1]}; }
static inline Part to_float(Sums a) { return _mm256_cvtepi32_ps(a); }
static inline Part broadcast(float a) { return _mm256_set1_ps(a); }
static inline Part mul(Part a, Part b) { return _mm256_mul_ps(a, b); }
static inline Part fma(Part a, Part b, Part c) { return _mm256_fmadd_ps(a, b, c); }

}  // namespace
}  // namespace tle

#include "csrc/kernels/linear_group/linear_group_maddubs.h"
#include "csrc/kernels/linear_group/linear_group_tiles.h"

namespace tle {

void linear_group_avx2(const LinearGroupArgs& a) {
  int64_t row = 0;
  for (; row + 4 <= a.rows; row += 4) rows_of_tiles<4, 2>(a, row);
  switch (a.rows - row) {
    case 3: return rows_of_tiles<3, 2>(a, row);
    case 2: return rows_of_tiles<2, 2>(a, row);
    case 1: return rows_of_tiles<1, 2>(a, row);
  }
}

}  // namespace tle
