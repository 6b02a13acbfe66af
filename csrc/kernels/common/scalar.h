// The scalar arithmetic of the specification: conversions, the canonical lanes and exp. Only *_ref.cc files and code
// that is compiled for the baseline include this; vector files have the same functions in lanes_*.h.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "csrc/kernels/common/dtype.h"
#include "csrc/kernels/common/exp_constants.h"

namespace tle::scalar {

static inline uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}

static inline float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

// Every NaN that is stored is this one: x86 makes negative ones, Arm positive ones, and payloads travel differently.
static inline float canonical(float x) { return x == x ? x : float_of(0x7FC00000u); }

static inline float from_bf16(uint16_t h) { return float_of(uint32_t(h) << 16); }

// Round to nearest even; NaN becomes 0x7FC0.
static inline uint16_t to_bf16(float x) {
  const uint32_t u = bits_of(canonical(x));
  return uint16_t(x == x ? (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16 : u >> 16);
}

static inline float from_f16(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 0x3FFu;
  if (exponent == 31) return float_of(sign | 0x7F800000u | (mantissa ? 0x400000u | mantissa << 13 : 0));
  if (exponent == 0) {
    const float magnitude = float(mantissa) * 0x1p-24f;  // exact
    return float_of(sign | bits_of(magnitude));
  }
  return float_of(sign | (exponent + 112u) << 23 | mantissa << 13);
}

// Round to nearest even, overflow to infinity; NaN becomes 0x7E00.
static inline uint16_t to_f16(float x) {
  const uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000u, a = u & 0x7FFFFFFFu;
  if (a > 0x7F800000u) return 0x7E00u;
  if (a >= 0x477FF000u) return uint16_t(sign | 0x7C00u);  // 65520 and above round to infinity
  if (a < 0x38800000u) {                                  // below 2^-14: a multiple of 2^-24
    const float scaled = float_of(a) * 0x1p24f;           // exact: a power of two
    return uint16_t(sign | uint32_t(nearbyintf(scaled)));
  }
  return uint16_t(sign | ((a - 0x38000000u + 0xFFFu + ((a >> 13) & 1u)) >> 13));
}

static inline float load(DType t, const void* p, int64_t i) {
  if (t == DType::kF32) return static_cast<const float*>(p)[i];
  if (t == DType::kI8) return static_cast<const int8_t*>(p)[i];
  const uint16_t h = static_cast<const uint16_t*>(p)[i];
  return t == DType::kBF16 ? from_bf16(h) : from_f16(h);
}

static inline void store(DType t, void* p, int64_t i, float x) {
  if (t == DType::kF32) {
    static_cast<float*>(p)[i] = canonical(x);
  } else {
    static_cast<uint16_t*>(p)[i] = t == DType::kBF16 ? to_bf16(x) : to_f16(x);
  }
}

// x rounded to t and back: what a value is after the unfused modules stored it.
static inline float round_to(DType t, float x) {
  if (t == DType::kF32) return canonical(x);
  return t == DType::kBF16 ? from_bf16(to_bf16(x)) : from_f16(to_f16(x));
}

// The sum over the 16 canonical lanes: j with j + 8, j with j + 4, adjacent pairs, the last two.
static inline float reduce_lanes(const float lane[16]) {
  float a[8], b[4];
  for (int j = 0; j < 8; ++j) a[j] = lane[j] + lane[j + 8];
  for (int j = 0; j < 4; ++j) b[j] = a[j] + a[j + 4];
  return (b[0] + b[1]) + (b[2] + b[3]);
}

// The formula stands in exp_constants.h. 2^n for n in [-150, 128] is split in two factors, so that results below 2^-126
// are rounded once and those above 2^128 become infinity.
static inline float exp(float x) {
  if (!(x == x)) return float_of(0x7FC00000u);
  x = x > TLE_EXP_MAX ? TLE_EXP_MAX : x;
  x = x < TLE_EXP_MIN ? TLE_EXP_MIN : x;
  const float n = nearbyintf(x * TLE_EXP_LOG2E);
  const float r = fmaf(n, -TLE_EXP_LN2_LOW, fmaf(n, -TLE_EXP_LN2_HIGH, x));
  float p = TLE_EXP_C6;
  p = fmaf(p, r, TLE_EXP_C5);
  p = fmaf(p, r, TLE_EXP_C4);
  p = fmaf(p, r, TLE_EXP_C3);
  p = fmaf(p, r, TLE_EXP_C2);
  p = fmaf(p, r, 1.0f);
  p = fmaf(p, r, 1.0f);
  const int32_t i = int32_t(n), half = i >> 1;
  return (p * float_of(uint32_t(half + 127) << 23)) * float_of(uint32_t(i - half + 127) << 23);
}

}  // namespace tle::scalar
