// Force-included before the *_avx512.cc and *_vnni.cc files when they are built with TLE_SIMDE: the 512-bit intrinsics
// then mean SIMDe's emulation on AVX2, so that the sources of those variants run on every AVX2 machine.
//
// What SIMDe 0.8.2 lacks is below, from the two halves of the register or lane by lane. An intrinsic that is missing
// in both places does not compile ("inlining failed: target specific option mismatch"): add it here.
#pragma once

#pragma GCC diagnostic ignored "-Wpsabi"  // 64-byte vectors are passed differently without AVX-512: all is inlined here

// The compiler's own header first: its include guard keeps it from coming back once the aliases (macros) exist.
#include <immintrin.h>

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

#include <stdint.h>
#include <string.h>

#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "compile with -mavx2 -mfma -mf16c: without FMA, SIMDe's fused multiply-adds round twice"
#endif

namespace tle_simde {
namespace {

// A 512-bit value as its lanes.
template <class T>
struct Lanes {
  T lane[64 / sizeof(T)];
  explicit Lanes(simde__m512i v) { memcpy(lane, &v, 64); }
  simde__m512i value() const {
    simde__m512i v;
    memcpy(&v, lane, 64);
    return v;
  }
};

inline __m256i half(simde__m512i v, int i) {
  __m256i h;
  memcpy(&h, reinterpret_cast<const char*>(&v) + 32 * i, 32);
  return h;
}

inline __m256 half(simde__m512 v, int i) {
  __m256 h;
  memcpy(&h, reinterpret_cast<const char*>(&v) + 32 * i, 32);
  return h;
}

template <class V, class H>
inline V join(H low, H high) {
  static_assert(sizeof(V) == 2 * sizeof(H));
  V v;
  memcpy(&v, &low, sizeof(H));
  memcpy(reinterpret_cast<char*>(&v) + sizeof(H), &high, sizeof(H));
  return v;
}

inline __m256i cvtepi32_epi16(simde__m512i v) {
  const Lanes<int32_t> x(v);
  int16_t out[16];
  for (int i = 0; i < 16; ++i) out[i] = int16_t(x.lane[i]);
  __m256i r;
  memcpy(&r, out, 32);
  return r;
}

inline __m128i cvtepi32_epi8(simde__m512i v) {
  const Lanes<int32_t> x(v);
  int8_t out[16];
  for (int i = 0; i < 16; ++i) out[i] = int8_t(x.lane[i]);
  __m128i r;
  memcpy(&r, out, 16);
  return r;
}

inline simde__m512 permute_ps(simde__m512 v, const int imm) {
  float x[16], out[16];
  memcpy(x, &v, 64);
  for (int i = 0; i < 16; ++i) out[i] = x[(i & ~3) + ((imm >> (2 * (i & 3))) & 3)];
  memcpy(&v, out, 64);
  return v;
}

// A masked load touches only the elements whose bit is set, as the hardware's does: the others may be unmapped.
template <class T>
inline simde__m512i maskz_load(uint64_t mask, const void* p) {
  Lanes<T> r(simde_mm512_setzero_si512());
  for (size_t i = 0; i < 64 / sizeof(T); ++i)
    if ((mask >> i) & 1) memcpy(&r.lane[i], static_cast<const char*>(p) + i * sizeof(T), sizeof(T));
  return r.value();
}

template <class T>
inline void mask_store(void* p, uint64_t mask, simde__m512i v) {
  const Lanes<T> x(v);
  for (size_t i = 0; i < 64 / sizeof(T); ++i)
    if ((mask >> i) & 1) memcpy(static_cast<char*>(p) + i * sizeof(T), &x.lane[i], sizeof(T));
}

}  // namespace
}  // namespace tle_simde

#define _mm512_cvtepi32_epi16(v) tle_simde::cvtepi32_epi16(v)
#define _mm512_cvtepi32_epi8(v) tle_simde::cvtepi32_epi8(v)
#define _mm512_permute_ps(v, imm) tle_simde::permute_ps(v, imm)
#define _mm512_cvtps_ph(v, imm)                                                             \
  tle_simde::join<__m256i>(_mm256_cvtps_ph(tle_simde::half(v, 0), (imm) & 7),               \
                           _mm256_cvtps_ph(tle_simde::half(v, 1), (imm) & 7))
