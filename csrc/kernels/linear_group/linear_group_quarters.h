// What linear_group_tiles.h wants to know of NEON registers, four channels in each, but for first_sums and to_float.
// Include after common/lanes_neon.h.
#pragma once

namespace tle {
namespace {

using Sums = int32x4_t;
using Part = float32x4_t;
constexpr int kParts = 4;

static inline Part part(f32x16 a, int i) { return a.v[i]; }
static inline f32x16 whole(const Part a[4]) { return {{a[0], a[1], a[2], a[3]}}; }
static inline Part broadcast(float a) { return vdupq_n_f32(a); }
static inline Part mul(Part a, Part b) { return vmulq_f32(a, b); }
static inline Part fma(Part a, Part b, Part c) { return vfmaq_f32(c, a, b); }

static inline int8x16_t low_nibbles(uint8x16_t a) { return vreinterpretq_s8_u8(vandq_u8(a, vdupq_n_u8(15))); }
static inline int8x16_t high_nibbles(uint8x16_t a) { return vreinterpretq_s8_u8(vshrq_n_u8(a, 4)); }

// 4 codes, four times.
static inline int8x16_t four_codes(const int8_t* x) {
  int32_t codes;
  memcpy(&codes, x, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(codes));
}

}  // namespace
}  // namespace tle
