// Sums of a group by vpmaddubsw (unsigned times signed bytes, pairs added in 16 bits), for x86 without VNNI. Include
// after the lanes and after these primitives of the file's width:
//
//   Bytes                          a register of bytes, words or 32-bit integers
//   Bytes load_bytes(const uint8_t*), splat8(int8_t), splat16(int16_t), splat32(int32_t), xor_bits, and_bits, add16, add32
//   Bytes shift16(Bytes)           words >> 4
//   Bytes maddubs(Bytes u, Bytes s), madd(Bytes, Bytes)
//
// Codes stay below 16, so that the products of 32 k add up in 16 bits: a word takes two products of each of 8 steps, 8
// * 2 * 15 * 127 = 30480. 8-bit codes are two such: XOR with 0x80 makes w + 128 = 16 high + low. That is two vpmaddubsw
// and two additions a line, as many as by 16-bit products or by |w| times x with w's sign, without widening x and
// without the reduction of every line to 32 bits.
#pragma once

#include "csrc/kernels/common/registers.h"
#include "csrc/kernels/linear_group/linear_group.h"

namespace tle {
namespace {

static inline Bytes four_codes(const int8_t* x) {
  int32_t codes;
  memcpy(&codes, x, 4);
  return splat32(codes);
}

// As linear_group_tiles.h wants them.
template <GroupCodes kCodes>
static inline Bytes first_sums(int32_t x_sum) {
  constexpr int32_t kOffset = kCodes == GroupCodes::kInt8 ? 128 : kCodes == GroupCodes::kInt4 ? 8 : 0;
  return splat32(-kOffset * x_sum);
}

template <GroupCodes kCodes, int kLines, bool kGroup32, int kTogether, int kRows>
static inline void add_lines(Bytes (&sums)[kTogether][kRows], const uint8_t* w, const int8_t* x, int64_t x_stride) {
  constexpr bool kByte = kCodes == GroupCodes::kInt8;
  // 8 bits: of the low nibbles, of the high ones. 4 bits: both in the first.
  Bytes words[kByte ? 2 : 1][kTogether][kRows];
  TLE_UNROLL for (int i = 0; i < kLines; ++i) {
    Bytes low[kTogether], high[kTogether];
    TLE_UNROLL for (int j = 0; j < kTogether; ++j) {
      Bytes line = load_bytes(w + 64 * i + sizeof(Bytes) * j);
      TLE_IN_REGISTER(line);  // not a second load for the high nibbles
      if (kByte) line = xor_bits(line, splat8(int8_t(0x80)));
      low[j] = and_bits(line, splat8(15));
      high[j] = and_bits(shift16(line), splat8(15));
    }
    TLE_UNROLL for (int r = 0; r < kRows; ++r) {
      const int8_t* four = x + r * x_stride + (kByte ? 4 : 8) * i;
      const Bytes x_low = four_codes(four), x_high = kByte ? x_low : four_codes(four + 4);
      TLE_UNROLL for (int j = 0; j < kTogether; ++j) {
        const Bytes of_low = maddubs(low[j], x_low), of_high = maddubs(high[j], x_high);
        if constexpr (kByte) {
          words[0][j][r] = i == 0 ? of_low : add16(words[0][j][r], of_low);
          words[1][j][r] = i == 0 ? of_high : add16(words[1][j][r], of_high);
        } else {
          words[0][j][r] = i == 0 ? add16(of_low, of_high) : add16(add16(words[0][j][r], of_low), of_high);
        }
      }
    }
  }
  TLE_UNROLL for (int r = 0; r < kRows; ++r)
    TLE_UNROLL for (int j = 0; j < kTogether; ++j) {
      sums[j][r] = add32(sums[j][r], madd(words[0][j][r], splat16(1)));
      if constexpr (kByte) sums[j][r] = add32(sums[j][r], madd(words[1][j][r], splat16(16)));
    }
}

}  // namespace
}  // namespace tle
