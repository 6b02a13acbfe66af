// The 16 canonical lanes as two AVX registers (AVX2, FMA and F16C). See lanes_avx512.h for the rules.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "csrc/kernels/common/dtype.h"
#include "csrc/kernels/common/exp_constants.h"

namespace tle {
namespace {

struct f32x16 {
  __m256 lo, hi;
};

static inline f32x16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline f32x16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline f32x16 add(f32x16 a, f32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
static inline f32x16 sub(f32x16 a, f32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
static inline f32x16 mul(f32x16 a, f32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
static inline f32x16 div(f32x16 a, f32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
static inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
static inline f32x16 max_gt(f32x16 a, f32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
static inline f32x16 min_lt(f32x16 a, f32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
static inline f32x16 neg(f32x16 a) {
  const __m256 sign = _mm256_castsi256_ps(_mm256_set1_epi32(int(0x80000000u)));
  return {_mm256_xor_ps(a.lo, sign), _mm256_xor_ps(a.hi, sign)};
}
static inline f32x16 abs(f32x16 a) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
  return {_mm256_and_ps(a.lo, mask), _mm256_and_ps(a.hi, mask)};
}
static inline __m256 canonical_half(__m256 a) {
  return _mm256_blendv_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000)), _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
static inline f32x16 canonical(f32x16 a) { return {canonical_half(a.lo), canonical_half(a.hi)}; }
static inline f32x16 copy_sign(f32x16 a, f32x16 b) {
  const __m256 sign = _mm256_castsi256_ps(_mm256_set1_epi32(int(0x80000000u)));
  return {_mm256_or_ps(_mm256_andnot_ps(sign, a.lo), _mm256_and_ps(sign, b.lo)),
          _mm256_or_ps(_mm256_andnot_ps(sign, a.hi), _mm256_and_ps(sign, b.hi))};
}
static inline f32x16 select_equal(f32x16 a, f32x16 b, f32x16 x, f32x16 y) {
  return {_mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ)),
          _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ))};
}
static inline f32x16 select_less(f32x16 a, f32x16 b, f32x16 x, f32x16 y) {
  return {_mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}

static inline f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, f32x16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
static inline __m256 from_bf16_half(const uint16_t* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
static inline f32x16 load_bf16(const uint16_t* p) { return {from_bf16_half(p), from_bf16_half(p + 8)}; }
static inline f32x16 load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
static inline __m256 from_i8_half(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
static inline f32x16 load_i8(const int8_t* p) { return {from_i8_half(p), from_i8_half(p + 8)}; }
// a rounded to bf16 in the upper halves; what the lower ones hold means nothing.
static inline __m256i bf16_upper_half(__m256 a) {
  const __m256i u = _mm256_castps_si256(canonical_half(a));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  return _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7FFF)), odd);
}
static inline f32x16 round_to_bf16(f32x16 a) {
  const __m256i upper = _mm256_set1_epi32(int(0xFFFF0000u));
  return {_mm256_castsi256_ps(_mm256_and_si256(bf16_upper_half(a.lo), upper)),
          _mm256_castsi256_ps(_mm256_and_si256(bf16_upper_half(a.hi), upper))};
}
static inline void store_bf16(uint16_t* p, f32x16 a) {
  const __m256i lo = _mm256_srli_epi32(bf16_upper_half(a.lo), 16), hi = _mm256_srli_epi32(bf16_upper_half(a.hi), 16);
  const __m256i packed = _mm256_packus_epi32(lo, hi);  // per 128-bit half: lo, hi, lo, hi
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xD8));
}
static inline void store_f16(uint16_t* p, f32x16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(canonical_half(a.lo), _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8),
                   _mm256_cvtps_ph(canonical_half(a.hi), _MM_FROUND_TO_NEAREST_INT));
}

static inline float reduce_add(f32x16 a) {
  const __m256 eight = _mm256_add_ps(a.lo, a.hi);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehdup_ps(four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehl_ps(two, two)));
}

static inline __m256 reduce_add_8(const f32x16 a[8]) {
  __m256 fours[4];  // of values i and i + 4, one in each half
  for (int i = 0; i < 4; ++i) {
    const __m256 x = _mm256_add_ps(a[i].lo, a[i].hi), y = _mm256_add_ps(a[i + 4].lo, a[i + 4].hi);
    fours[i] = _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
  }
  return _mm256_hadd_ps(_mm256_hadd_ps(fours[0], fours[1]), _mm256_hadd_ps(fours[2], fours[3]));
}
// reduce_add of 16 values at once.
static inline f32x16 reduce_add_16(const f32x16 a[16]) { return {reduce_add_8(a), reduce_add_8(a + 8)}; }

struct i32x16 {
  __m256i lo, hi;
};
static inline i32x16 round_to_int(f32x16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
static inline f32x16 to_float(i32x16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
static inline void store_i8(int8_t* p, i32x16 a) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xD8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
static inline i32x16 zero_i32() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
static inline i32x16 add(i32x16 a, i32x16 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
static inline i32x16 sub(i32x16 a, i32x16 b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
static inline __m256 power_of_two(__m256i a) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(a, _mm256_set1_epi32(127)), 23));
}
static inline f32x16 round_even(f32x16 a) {
  return {_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT), _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT)};
}
// 2^n in two factors: only the last product rounds.
static inline __m256 scale_by_power(__m256 a, __m256 n) {
  const __m256i i = _mm256_cvtps_epi32(n), h = _mm256_srai_epi32(i, 1);
  return _mm256_mul_ps(_mm256_mul_ps(a, power_of_two(h)), power_of_two(_mm256_sub_epi32(i, h)));
}
static inline f32x16 scale_by_power(f32x16 a, f32x16 n) {
  return {scale_by_power(a.lo, n.lo), scale_by_power(a.hi, n.hi)};
}
static inline i32x16 abs_bits(f32x16 a) {
  const f32x16 b = abs(a);
  return {_mm256_castps_si256(b.lo), _mm256_castps_si256(b.hi)};
}
static inline i32x16 max(i32x16 a, i32x16 b) { return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)}; }
static inline void store(int32_t* p, i32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), a.hi);
}

// Exact, so in any order.
static inline int32_t reduce_add(i32x16 a) {
  const __m256i eight = _mm256_add_epi32(a.lo, a.hi);
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xB1)));
}
static inline int32_t reduce_max(i32x16 a) {
  const __m256i eight = _mm256_max_epi32(a.lo, a.hi);
  const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xB1)));
}
}  // namespace
}  // namespace tle

#include "csrc/kernels/common/lanes_shared.h"
