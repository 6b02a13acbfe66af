// Sums of a group by SDOT: a line is four registers of four channels, and a lane of x holds the four codes that meet
// it. Include after common/lanes_neon.h, in files compiled with the dot product extension.
#pragma once

#include "csrc/kernels/common/registers.h"
#include "csrc/kernels/linear_group/linear_group.h"
#include "csrc/kernels/linear_group/linear_group_quarters.h"

namespace tle {
namespace {

// A group's sum lies within 128 * 128 * 127 < 2^22. It is counted up from the bits of 1.5 * 2^23: read as fp32 the
// register then holds 1.5 * 2^23 + sum exactly, and one subtraction does what a conversion does, which keeps the vector
// pipes of Neoverse N1 and N2 busy twice as long.
constexpr int32_t kBits = 0x4B400000;
constexpr float kValue = 12582912.0f;
static inline Part to_float(Sums a) { return vsubq_f32(vreinterpretq_f32_s32(a), vdupq_n_f32(kValue)); }

// 4-bit codes are unsigned: their sums are too large by 8 sum(x) where a code of 8 means 0. The compiler would make one
// register and copy it, and a copy takes a vector pipe, too; an instruction from a general register does not.
template <GroupCodes kCodes, int kXBytes>
static inline Sums first_sums(int32_t x_sum) {
  Sums start;
  __asm__ volatile("dup %0.4s, %w1" : "=w"(start) : "r"(kCodes == GroupCodes::kInt4 ? kBits - 8 * x_sum : kBits));
  return start;
}

// to += a b, where GCC 12 would copy `to` first.
static inline void add_product(float32x4_t& to, float32x4_t a, float32x4_t b) {
  __asm__("fmla %0.4s, %1.4s, %2.4s" : "+w"(to) : "w"(a), "w"(b));
}

// The scales of a group and a tile (linear_group_blocks.h), as its primitives order them.
struct GroupScales {
  const float *x, *x_sum, *w, *w_min;
};

// A line of 8-bit codes in one instruction. For 4 bits the four adjacent registers that it fills cost more copies than
// it saves loads.
template <GroupCodes kCodes, int kTogether>
static inline void load_line(uint8x16_t (&line)[kTogether], const uint8_t* w) {
  if constexpr (kCodes == GroupCodes::kInt8 && kTogether == 4) {
    const uint8x16x4_t all = vld1q_u8_x4(w);
    TLE_UNROLL for (int j = 0; j < 4; ++j) line[j] = all.val[j];
  } else {
    TLE_UNROLL for (int j = 0; j < kTogether; ++j) line[j] = vld1q_u8(w + 16 * j);
  }
}

// The lane is an immediate of the instruction; where `lane` is a constant after unrolling, one of the four is left.
static inline int32x4_t sdot_lane(int32x4_t acc, int8x16_t w, int8x16_t x, int lane) {
  switch (lane) {
    case 0: return vdotq_laneq_s32(acc, w, x, 0);
    case 1: return vdotq_laneq_s32(acc, w, x, 1);
    case 2: return vdotq_laneq_s32(acc, w, x, 2);
    default: return vdotq_laneq_s32(acc, w, x, 3);
  }
}

// The low and the high nibbles of 16 bytes, by general registers and left in memory. In assembly: the compiler would
// use vectors, and move from register to register, which takes a vector pipe, too.
static inline void split_nibbles(uint64_t (&to)[2][2], const uint8_t* w) {
  constexpr uint64_t kLow = 0x0F0F0F0F0F0F0F0F;
  uint64_t words[2];
  memcpy(words, w, 16);
  TLE_UNROLL for (int i = 0; i < 2; ++i) {
    __asm__("and %0, %1, %2" : "=r"(to[0][i]) : "r"(words[i]), "r"(kLow));
    __asm__("and %0, %1, %2, lsr #4" : "=r"(to[1][i]) : "r"(kLow), "r"(words[i]));
    __asm__("" : "+m"(to[0][i]), "+m"(to[1][i]));
  }
}

template <GroupCodes kCodes, int kXBytes, int kLines, bool kGroup32, int kTogether, int kRows>
[[gnu::always_inline]] static inline void add_lines(Sums (&sums)[kTogether][kRows], const uint8_t* w,
                                                    const int8_t* x, int64_t x_stride) {
  constexpr int kLineFours = kCodes == GroupCodes::kInt8 ? 1 : 2;  // lanes of x for a line
  constexpr int kRegisters = kLines == 1 ? kLineFours : 2;         // of x for a row
  int8x16_t codes[kRows][kRegisters];
  TLE_UNROLL for (int r = 0; r < kRows; ++r)
    TLE_UNROLL for (int i = 0; i < kRegisters; ++i)
      codes[r][i] = kLines == 1 ? four_codes(x + r * x_stride + 4 * i) : vld1q_s8(x + r * x_stride + 16 * i);
  // In groups of 32 with minima the two vector pipes of Neoverse N1 and N2 have so much to do, 101 operations for 320
  // bytes, that one core would read less than its memory gives. Six are spared: three lines of the last four channels
  // are unpacked by general registers and come back through memory.
  constexpr int kSplit = kGroup32 && kCodes == GroupCodes::kInt4Min ? 3 : 0, kLast = kTogether - 1;
  alignas(16) uint64_t split[kLines][2][2];  // of lines kLines - kSplit .. kLines: [low, high nibbles][8 bytes]
  if constexpr (kSplit != 0) {
    TLE_UNROLL for (int l = kLines - kSplit; l < kLines; ++l) split_nibbles(split[l], w + 64 * l + 16 * kLast);
  }
  TLE_UNROLL for (int l = 0; l < kLines; ++l) {
    uint8x16_t line[kTogether];
    load_line<kCodes>(line, w + 64 * l);
    TLE_UNROLL for (int j = 0; j < kTogether; ++j) {
      if constexpr (kSplit != 0) TLE_IN_REGISTER(line[j]);  // not a second load for the high nibbles
      TLE_UNROLL for (int half = 0; half < kLineFours; ++half) {
        int8x16_t of_k;
        if (kSplit != 0 && j == kLast && l >= kLines - kSplit) {
          of_k = vreinterpretq_s8_u64(vld1q_u64(split[l][half]));
        } else {
          of_k = kCodes == GroupCodes::kInt8 ? vreinterpretq_s8_u8(line[j])
                 : half == 0                 ? low_nibbles(line[j])
                                             : high_nibbles(line[j]);
        }
        const int four = kLineFours * l + half;  // which four codes of the row
        TLE_UNROLL for (int r = 0; r < kRows; ++r)
          sums[j][r] = kLines == 1 ? vdotq_s32(sums[j][r], of_k, codes[r][half])
                                   : sdot_lane(sums[j][r], of_k, codes[r][four / 4], four % 4);
      }
    }
  }
}

}  // namespace
}  // namespace tle

#include "csrc/kernels/linear_group/linear_group_tiles.h"

namespace tle {
namespace {

// Rows row .. a.rows of every panel.
static inline void sdot_rows(const LinearGroupArgs& a, int64_t row) {
  for (; row + 4 <= a.rows; row += 4) rows_of_tiles<4, 1>(a, row);
  switch (a.rows - row) {
    case 3: return rows_of_tiles<3, 1>(a, row);
    case 2: return rows_of_tiles<2, 2>(a, row);
    case 1: return rows_of_tiles<1, 4>(a, row);
  }
}

}  // namespace
}  // namespace tle
