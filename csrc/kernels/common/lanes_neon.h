// The 16 canonical lanes as four NEON registers (baseline Armv8-A). See lanes_avx512.h for the rules.
#pragma once

#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#include "csrc/kernels/common/dtype.h"
#include "csrc/kernels/common/exp_constants.h"

namespace tle {
namespace {

struct f32x16 {
  float32x4_t v[4];
};


static inline f32x16 set1(float x) {
  const float32x4_t v = vdupq_n_f32(x);
  return {{v, v, v, v}};
}
static inline f32x16 zero() { return set1(0.0f); }

#define TLE_LANES_BINARY(name, intrinsic)              \
  static inline f32x16 name(f32x16 a, f32x16 b) {      \
    f32x16 r;                                          \
    for (int i = 0; i < 4; ++i) r.v[i] = intrinsic(a.v[i], b.v[i]); \
    return r;                                          \
  }
TLE_LANES_BINARY(add, vaddq_f32)
TLE_LANES_BINARY(sub, vsubq_f32)
TLE_LANES_BINARY(mul, vmulq_f32)
TLE_LANES_BINARY(div, vdivq_f32)
#undef TLE_LANES_BINARY

static inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  f32x16 r;
  for (int i = 0; i < 4; ++i) r.v[i] = vfmaq_f32(c.v[i], a.v[i], b.v[i]);
  return r;
}
// vmaxq would return a NaN of either operand and +0 of a pair of zeros: the select is what x86 does.
static inline f32x16 max_gt(f32x16 a, f32x16 b) {
  f32x16 r;
  for (int i = 0; i < 4; ++i) r.v[i] = vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]);
  return r;
}
static inline f32x16 min_lt(f32x16 a, f32x16 b) {
  f32x16 r;
  for (int i = 0; i < 4; ++i) r.v[i] = vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]);
  return r;
}
static inline f32x16 neg(f32x16 a) {
  f32x16 r;
  for (int i = 0; i < 4; ++i) r.v[i] = vnegq_f32(a.v[i]);
  return r;
}
static inline f32x16 abs(f32x16 a) {
  f32x16 r;
  for (int i = 0; i < 4; ++i) r.v[i] = vabsq_f32(a.v[i]);
  return r;
}
static inline float32x4_t canonical_quarter(float32x4_t a) {
  return vbslq_f32(vceqq_f32(a, a), a, vreinterpretq_f32_u32(vdupq_n_u32(0x7FC00000u)));
}
static inline f32x16 canonical(f32x16 a) {
  f32x16 r;
  for (int i = 0; i < 4; ++i) r.v[i] = canonical_quarter(a.v[i]);
  return r;
}
static inline f32x16 copy_sign(f32x16 a, f32x16 b) {
  const uint32x4_t sign = vdupq_n_u32(0x80000000u);
  f32x16 r;
  for (int i = 0; i < 4; ++i) r.v[i] = vbslq_f32(sign, b.v[i], a.v[i]);
  return r;
}
static inline f32x16 select_equal(f32x16 a, f32x16 b, f32x16 x, f32x16 y) {
  f32x16 r;
  for (int i = 0; i < 4; ++i) r.v[i] = vbslq_f32(vceqq_f32(a.v[i], b.v[i]), x.v[i], y.v[i]);
  return r;
}
static inline f32x16 select_less(f32x16 a, f32x16 b, f32x16 x, f32x16 y) {
  f32x16 r;
  for (int i = 0; i < 4; ++i) r.v[i] = vbslq_f32(vcltq_f32(a.v[i], b.v[i]), x.v[i], y.v[i]);
  return r;
}

static inline f32x16 load(const float* p) {
  return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}};
}
static inline void store(float* p, f32x16 a) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]);
}
static inline f32x16 load_bf16(const uint16_t* p) {
  const uint16x8_t a = vld1q_u16(p), b = vld1q_u16(p + 8);
  return {{vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(a), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(a, 16)),
           vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(b), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(b, 16))}};
}
static inline f32x16 load_f16(const uint16_t* p) {
  const float16x8_t a = vreinterpretq_f16_u16(vld1q_u16(p)), b = vreinterpretq_f16_u16(vld1q_u16(p + 8));
  return {{vcvt_f32_f16(vget_low_f16(a)), vcvt_high_f32_f16(a), vcvt_f32_f16(vget_low_f16(b)), vcvt_high_f32_f16(b)}};
}
static inline f32x16 load_i8(const int8_t* p) {
  const int8x16_t a = vld1q_s8(p);
  const int16x8_t low = vmovl_s8(vget_low_s8(a)), high = vmovl_high_s8(a);
  return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
           vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))}};
}
static inline uint32x4_t bf16_quarter(float32x4_t a) {
  const uint32x4_t u = vreinterpretq_u32_f32(canonical_quarter(a));
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
  return vaddq_u32(vaddq_u32(u, vdupq_n_u32(0x7FFF)), odd);
}
static inline f32x16 round_to_bf16(f32x16 a) {
  for (float32x4_t& v : a.v) v = vreinterpretq_f32_u32(vandq_u32(bf16_quarter(v), vdupq_n_u32(0xFFFF0000u)));
  return a;
}
static inline void store_bf16(uint16_t* p, f32x16 a) {
  for (int i = 0; i < 4; i += 2)
    vst1q_u16(p + 4 * i, vshrn_high_n_u32(vshrn_n_u32(bf16_quarter(a.v[i]), 16), bf16_quarter(a.v[i + 1]), 16));
}
static inline void store_f16(uint16_t* p, f32x16 a) {
  const f32x16 c = canonical(a);
  for (int i = 0; i < 4; i += 2)
    vst1q_u16(p + 4 * i, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(c.v[i]), c.v[i + 1])));
}

static inline float reduce_add(f32x16 a) {
  const float32x4_t four = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
  const float32x4_t two = vpaddq_f32(four, four);
  return vgetq_lane_f32(vpaddq_f32(two, two), 0);
}

// reduce_add of 16 values at once.
static inline f32x16 reduce_add_16(const f32x16 a[16]) {
  f32x16 r;
  for (int i = 0; i < 4; ++i) {
    float32x4_t four[4];
    for (int j = 0; j < 4; ++j) {
      const f32x16 x = a[4 * i + j];
      four[j] = vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
    }
    r.v[i] = vpaddq_f32(vpaddq_f32(four[0], four[1]), vpaddq_f32(four[2], four[3]));
  }
  return r;
}

struct i32x16 {
  int32x4_t v[4];
};
static inline i32x16 round_to_int(f32x16 a) {
  i32x16 r;
  for (int i = 0; i < 4; ++i) r.v[i] = vcvtnq_s32_f32(a.v[i]);
  return r;
}
static inline f32x16 to_float(i32x16 a) {
  f32x16 r;
  for (int i = 0; i < 4; ++i) r.v[i] = vcvtq_f32_s32(a.v[i]);
  return r;
}
static inline void store_i8(int8_t* p, i32x16 a) {
  const int16x8_t low = vcombine_s16(vmovn_s32(a.v[0]), vmovn_s32(a.v[1]));
  const int16x8_t high = vcombine_s16(vmovn_s32(a.v[2]), vmovn_s32(a.v[3]));
  vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}
static inline i32x16 zero_i32() {
  const int32x4_t v = vdupq_n_s32(0);
  return {{v, v, v, v}};
}
static inline i32x16 add(i32x16 a, i32x16 b) {
  i32x16 r;
  for (int i = 0; i < 4; ++i) r.v[i] = vaddq_s32(a.v[i], b.v[i]);
  return r;
}
static inline i32x16 sub(i32x16 a, i32x16 b) {
  i32x16 r;
  for (int i = 0; i < 4; ++i) r.v[i] = vsubq_s32(a.v[i], b.v[i]);
  return r;
}
static inline float32x4_t power_of_two(int32x4_t a) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(a, vdupq_n_s32(127)), 23));
}
static inline f32x16 round_even(f32x16 a) {
  f32x16 r;
  for (int i = 0; i < 4; ++i) r.v[i] = vrndnq_f32(a.v[i]);
  return r;
}
// 2^n in two factors: only the last product rounds.
static inline f32x16 scale_by_power(f32x16 a, f32x16 n) {
  f32x16 r;
  for (int i = 0; i < 4; ++i) {
    const int32x4_t k = vcvtq_s32_f32(n.v[i]), h = vshrq_n_s32(k, 1);
    r.v[i] = vmulq_f32(vmulq_f32(a.v[i], power_of_two(h)), power_of_two(vsubq_s32(k, h)));
  }
  return r;
}
static inline i32x16 abs_bits(f32x16 a) {
  i32x16 r;
  for (int i = 0; i < 4; ++i) r.v[i] = vandq_s32(vreinterpretq_s32_f32(a.v[i]), vdupq_n_s32(0x7FFFFFFF));
  return r;
}
static inline i32x16 max(i32x16 a, i32x16 b) {
  i32x16 r;
  for (int i = 0; i < 4; ++i) r.v[i] = vmaxq_s32(a.v[i], b.v[i]);
  return r;
}
static inline void store(int32_t* p, i32x16 a) {
  for (int i = 0; i < 4; ++i) vst1q_s32(p + 4 * i, a.v[i]);
}

// Exact, so in any order.
static inline int32_t reduce_add(i32x16 a) {
  return vaddvq_s32(vaddq_s32(vaddq_s32(a.v[0], a.v[1]), vaddq_s32(a.v[2], a.v[3])));
}
static inline int32_t reduce_max(i32x16 a) {
  return vmaxvq_s32(vmaxq_s32(vmaxq_s32(a.v[0], a.v[1]), vmaxq_s32(a.v[2], a.v[3])));
}
}  // namespace
}  // namespace tle
#include "csrc/kernels/common/lanes_shared.h"
