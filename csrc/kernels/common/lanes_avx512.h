// The 16 canonical lanes as one AVX-512 register. The same set of functions stands in lanes_avx2.h and lanes_neon.h; a
// kernel body that is written with them (OP_lanes.h) gives the same bits on all of them.
// Everything is static: a file with wide flags must not emit a symbol that the linker could pick for others.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "csrc/kernels/common/dtype.h"
#include "csrc/kernels/common/exp_constants.h"

namespace tle {
namespace {

struct f32x16 {
  __m512 v;
};

static inline f32x16 zero() { return {_mm512_setzero_ps()}; }
static inline f32x16 set1(float x) { return {_mm512_set1_ps(x)}; }
static inline f32x16 add(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline f32x16 sub(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline f32x16 mul(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline f32x16 div(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// a > b ? a : b, so that a NaN in a is dropped and one in b stays.
static inline f32x16 max_gt(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
// a < b ? a : b
static inline f32x16 min_lt(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline f32x16 neg(f32x16 a) {
  return {_mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(int(0x80000000u))))};
}
static inline f32x16 abs(f32x16 a) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7FFFFFFF)))};
}
static inline f32x16 canonical(f32x16 a) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), a.v,
                               _mm512_castsi512_ps(_mm512_set1_epi32(0x7FC00000)))};
}

// The magnitude of a with the sign of b.
static inline f32x16 copy_sign(f32x16 a, f32x16 b) {
  const __m512i sign = _mm512_and_si512(_mm512_castps_si512(b.v), _mm512_set1_epi32(int(0x80000000u)));
  return {_mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(abs(a).v), sign))};
}
// a == b ? x : y
static inline f32x16 select_equal(f32x16 a, f32x16 b, f32x16 x, f32x16 y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ), y.v, x.v)};
}
// a < b ? x : y
static inline f32x16 select_less(f32x16 a, f32x16 b, f32x16 x, f32x16 y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}

static inline f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
static inline f32x16 load_bf16(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
// p[0 .. 15] and p[16 .. 31] with one operation each.
static inline void load_2_bf16(const uint16_t* p, f32x16 to[2]) {
  const __m512i words = _mm512_loadu_si512(p);
  const __m512i low = _mm512_setr_epi32(0 << 16, 1 << 16, 2 << 16, 3 << 16, 4 << 16, 5 << 16, 6 << 16, 7 << 16, 8 << 16,
                                        9 << 16, 10 << 16, 11 << 16, 12 << 16, 13 << 16, 14 << 16, 15 << 16);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(16 << 16));
  to[0].v = _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, low, words));
  to[1].v = _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, high, words));
}
static inline f32x16 load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
static inline f32x16 load_i8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
// a rounded to bf16 in the upper halves; what the lower ones hold means nothing.
static inline __m512i bf16_upper_bits(f32x16 a) {
  const __m512i u = _mm512_castps_si512(canonical(a).v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  // The canonical NaN has low bits 0: adding 0x7FFF leaves its upper half alone.
  return _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7FFF)), odd);
}
static inline f32x16 round_to_bf16(f32x16 a) {
  return {_mm512_castsi512_ps(_mm512_and_si512(bf16_upper_bits(a), _mm512_set1_epi32(int(0xFFFF0000u))))};
}
static inline __m256i bf16_bits(f32x16 a) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(bf16_upper_bits(a), 16)); }
static inline void store_bf16(uint16_t* p, f32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bf16_bits(a));
}
static inline void store_f16(uint16_t* p, f32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(canonical(a).v, _MM_FROUND_TO_NEAREST_INT));
}

// The eight sums j + (j + 8), then four, then pairs, then one: the canonical tree.
static inline float reduce_add(f32x16 a) {
  const __m256 low = _mm512_castps512_ps256(a.v);
  const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
  const __m256 eight = _mm256_add_ps(low, high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehdup_ps(four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehl_ps(two, two)));
}

// The first two levels of that tree for four values: quarter i holds the four sums of a[i]. x + y = y + x.
static inline f32x16 join_4(const f32x16 a[4]) {
  // A blend, for which any port will do, and one shuffle.
  const auto halves = [](__m512 x, __m512 y) {
    return _mm512_add_ps(_mm512_mask_blend_ps(0xFF00, x, y), _mm512_shuffle_f32x4(x, y, 0x4E));
  };
  const __m512 x = halves(a[0].v, a[1].v), y = halves(a[2].v, a[3].v);
  return {_mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xDD))};
}

// The last two: the sums of 16 values, whose first two levels are quarters[i] = join_4(a + 4 i).
static inline f32x16 reduce_joined(const f32x16 quarters[4]) {
  const auto neighbours = [](__m512 x, __m512 y) {
    return _mm512_add_ps(_mm512_shuffle_ps(x, y, 0x88), _mm512_shuffle_ps(x, y, 0xDD));
  };
  const __m512 sums = neighbours(neighbours(quarters[0].v, quarters[1].v), neighbours(quarters[2].v, quarters[3].v));
  // Element 4 i + j is the sum of a[4 j + i].
  return {_mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), sums)};
}

// reduce_add of 16 values at once.
static inline f32x16 reduce_add_16(const f32x16 a[16]) {
  const f32x16 quarters[4] = {join_4(a), join_4(a + 4), join_4(a + 8), join_4(a + 12)};
  return reduce_joined(quarters);
}

// Rounds to the nearest integer, ties to even; |a| < 2^31.
struct i32x16 {
  __m512i v;
};
static inline i32x16 round_to_int(f32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }
static inline f32x16 to_float(i32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
static inline void store_i8(int8_t* p, i32x16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}
static inline i32x16 zero_i32() { return {_mm512_setzero_si512()}; }
static inline i32x16 add(i32x16 a, i32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
static inline i32x16 sub(i32x16 a, i32x16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
// a rounded to the nearest integer, ties to even.
static inline f32x16 round_even(f32x16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT)}; }
// a 2^n, rounded once, for integers n in -150 .. 128 and 0.5 < a < 2.
static inline f32x16 scale_by_power(f32x16 a, f32x16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }
// Bit patterns of |a| compared as integers: finite < infinity < NaN, so the maximum keeps a NaN.
static inline i32x16 abs_bits(f32x16 a) {
  return {_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7FFFFFFF))};
}
static inline i32x16 max(i32x16 a, i32x16 b) { return {_mm512_max_epi32(a.v, b.v)}; }
static inline void store(int32_t* p, i32x16 a) { _mm512_storeu_si512(p, a.v); }

// Exact, so in any order.
static inline int32_t reduce_add(i32x16 a) { return _mm512_reduce_add_epi32(a.v); }
static inline int32_t reduce_max(i32x16 a) { return _mm512_reduce_max_epi32(a.v); }
}  // namespace
}  // namespace tle

#include "csrc/kernels/common/lanes_shared.h"
