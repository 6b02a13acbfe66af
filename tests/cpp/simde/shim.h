// Force-included before the *_avx512.cc, *_vnni.cc and *_amx.cc files when they are built with TLE_SIMDE: the 512-bit intrinsics
// then mean SIMDe's emulation on AVX2, so that the sources of those variants run on every AVX2 machine.
//
// What SIMDe 0.8.2 lacks and the kernels use is below, lane by lane. An intrinsic that is missing in both places does
// not compile ("inlining failed: target specific option mismatch"): add it here.
#pragma once

// The compiler's own header first: its include guard keeps it from coming back once the aliases (macros) exist.
#include <immintrin.h>

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

#include "tests/cpp/simde/tiles.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "compile with -mavx2 -mfma -mf16c: without FMA, SIMDe's fused multiply-adds round twice"
#endif

namespace tle_simde {
namespace {

// The lanes of a vector, and a vector of lanes.
template <class T, class Vector>
struct Lanes {
  T lane[sizeof(Vector) / sizeof(T)];
  Lanes() = default;
  explicit Lanes(Vector v) { memcpy(lane, &v, sizeof(v)); }
  Vector vector() const {
    Vector v;
    memcpy(&v, lane, sizeof(v));
    return v;
  }
};

inline __m256i cvtepi32_epi16(simde__m512i v) {
  const Lanes<int32_t, simde__m512i> x(v);
  Lanes<int16_t, __m256i> out;
  for (int i = 0; i < 16; ++i) out.lane[i] = int16_t(x.lane[i]);
  return out.vector();
}

inline __m128i cvtepi32_epi8(simde__m512i v) {
  const Lanes<int32_t, simde__m512i> x(v);
  Lanes<int8_t, __m128i> out;
  for (int i = 0; i < 16; ++i) out.lane[i] = int8_t(x.lane[i]);
  return out.vector();
}

inline simde__m512i cvtepi8_epi32(__m128i v) {
  const Lanes<int8_t, __m128i> x(v);
  Lanes<int32_t, simde__m512i> out;
  for (int i = 0; i < 16; ++i) out.lane[i] = x.lane[i];
  return out.vector();
}

inline int32_t reduce_add_epi32(simde__m512i v) {
  const Lanes<int32_t, simde__m512i> x(v);
  uint32_t sum = 0;  // wraps, as the hardware does
  for (int i = 0; i < 16; ++i) sum += uint32_t(x.lane[i]);
  return int32_t(sum);
}

// Rounds to nearest even, the only mode that the kernels ask for.
inline __m256i cvtps_ph(simde__m512 v) {
  const Lanes<__m256, simde__m512> x(v);
  Lanes<__m128i, __m256i> out;
  for (int i = 0; i < 2; ++i) out.lane[i] = _mm256_cvtps_ph(x.lane[i], _MM_FROUND_TO_NEAREST_INT);
  return out.vector();
}

// a 2^b for whole b, rounded once: SIMDe multiplies by 2^b, which is no float at the ends of the range.
inline simde__m512 scalef_ps(simde__m512 a, simde__m512 b) {
  const Lanes<float, simde__m512> x(a), n(b);
  Lanes<float, simde__m512> out;
  for (int i = 0; i < 16; ++i) out.lane[i] = n.lane[i] == n.lane[i] ? ldexpf(x.lane[i], int(n.lane[i])) : n.lane[i];
  return out.vector();
}

}  // namespace
}  // namespace tle_simde

#define _mm512_cvtepi32_epi16(v) tle_simde::cvtepi32_epi16(v)
#define _mm512_cvtepi32_epi8(v) tle_simde::cvtepi32_epi8(v)
#define _mm512_cvtepi8_epi32(v) tle_simde::cvtepi8_epi32(v)
#define _mm512_reduce_add_epi32(v) tle_simde::reduce_add_epi32(v)
#undef _mm512_scalef_ps
#define _mm512_scalef_ps(a, b) tle_simde::scalef_ps(a, b)
#define _mm512_cvtps_ph(v, mode)                                                                  \
  ([](simde__m512 value) {                                                                        \
    static_assert(((mode) & 7) == _MM_FROUND_TO_NEAREST_INT, "the emulation knows one rounding"); \
    return tle_simde::cvtps_ph(value);                                                            \
  }(v))
