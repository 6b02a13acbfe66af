// One set of constants for every variant of exp (scalar.h, lanes_*.h).
// exp(x) = 2^n p(r), n = round(x / ln 2), r = x - n ln 2 in two fma steps (Cody and Waite: the high part of ln 2 has so
// few bits that n times it is exact), p = 1 + r + C2 r^2 + ... + C6 r^6, fitted for the least relative error on
// |r| <= ln(2) / 2 (3.1e-9 before the coefficients are rounded to fp32).
// Above TLE_EXP_MAX the result is infinity (2^128 = exp(88.72284)), below TLE_EXP_MIN 0 (2^-150 = exp(-103.9721)).
#pragma once

#define TLE_EXP_MAX 89.0f
#define TLE_EXP_MIN -104.0f
#define TLE_EXP_LOG2E 0x1.715476p+0f
#define TLE_EXP_LN2_HIGH 0x1.62e400p-1f
#define TLE_EXP_LN2_LOW 0x1.7f7d1cp-20f
#define TLE_EXP_C2 0x1.fffffcp-2f
#define TLE_EXP_C3 0x1.555490p-3f
#define TLE_EXP_C4 0x1.5558f4p-5f
#define TLE_EXP_C5 0x1.123a6cp-7f
#define TLE_EXP_C6 0x1.6a2352p-10f
