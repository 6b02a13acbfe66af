// Sums of a group by vpmaddubsw (unsigned times signed bytes, pairs added in 16 bits), for x86 without VNNI. Include
// after the lanes and after these primitives of the file's width:
//
//   Bytes                          a register of bytes, words or 32-bit integers
//   Bytes load_bytes(const uint8_t*), splat8(int8_t), splat16(int16_t), splat32(int32_t)
//   Bytes xor_bits, and_bits, add16, add32(Bytes, Bytes), shift16(Bytes)   words >> 4
//   Bytes maddubs(Bytes u, Bytes s), madd(Bytes, Bytes)
//   Bytes abs8(Bytes)              as unsigned bytes
//   Bytes signed8(Bytes x, Bytes w)   -x where w is negative, x where it is positive, and where it is 0 anything
//
// 8-bit codes: |w| is at most 128 and x takes w's sign, so that a pair's products stay within 2 * 128 * 127 < 2^15;
// they go to 32 bits at once. Or, with kXBytes of 2 (linear_group_avx2.cc), x comes as |x| and signs, and w takes them
// as ~w = -w - 1: what that leaves out, the |x| of negative x, is the same for all channels; the sums start from it.
//
// 4-bit codes stay below 16, so that the products of 32 k add up in 16 bits: a word takes two products of each of 8
// steps, 8 * 2 * 15 * 127 = 30480.
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
template <GroupCodes kCodes, int kXBytes>
static inline Bytes first_sums(int32_t x_sum) {
  if (kXBytes == 2) return splat32(x_sum);  // of the |x| of negative x
  return splat32(kCodes == GroupCodes::kInt4 ? -8 * x_sum : 0);
}

template <GroupCodes kCodes, int kXBytes, int kLines, bool kGroup32, int kTogether, int kRows>
[[gnu::always_inline]] static inline void add_lines(Bytes (&sums)[kTogether][kRows], const uint8_t* w,
                                                    const int8_t* x, int64_t x_stride) {
  if constexpr (kXBytes == 2) {
    TLE_UNROLL for (int i = 0; i < kLines; ++i) {
      Bytes line[kTogether];
      TLE_UNROLL for (int j = 0; j < kTogether; ++j) line[j] = load_bytes(w + 64 * i + sizeof(Bytes) * j);
      TLE_UNROLL for (int r = 0; r < kRows; ++r) {
        const int8_t* four = x + r * x_stride + 8 * i;
        const Bytes magnitude = four_codes(four), signs = four_codes(four + 4);
        TLE_UNROLL for (int j = 0; j < kTogether; ++j) {
          sums[j][r] = add32(sums[j][r], madd(maddubs(magnitude, xor_bits(line[j], signs)), splat16(1)));
          TLE_IN_REGISTER(sums[j][r]);  // line by line, or the loads of later ones need registers, too
        }
      }
    }
  } else if constexpr (kCodes == GroupCodes::kInt8) {
    TLE_UNROLL for (int i = 0; i < kLines; ++i) {
      Bytes line[kTogether], magnitude[kTogether];
      TLE_UNROLL for (int j = 0; j < kTogether; ++j) {
        line[j] = load_bytes(w + 64 * i + sizeof(Bytes) * j);
        TLE_IN_REGISTER(line[j]);  // not a second load for the signs
        magnitude[j] = abs8(line[j]);
      }
      TLE_UNROLL for (int r = 0; r < kRows; ++r) {
        const Bytes four = four_codes(x + r * x_stride + 4 * i);
        TLE_UNROLL for (int j = 0; j < kTogether; ++j) {
          sums[j][r] = add32(sums[j][r], madd(maddubs(magnitude[j], signed8(four, line[j])), splat16(1)));
          TLE_IN_REGISTER(sums[j][r]);
        }
      }
    }
  } else {
    Bytes words[kTogether][kRows];
    TLE_UNROLL for (int i = 0; i < kLines; ++i) {
      Bytes low[kTogether], high[kTogether];
      TLE_UNROLL for (int j = 0; j < kTogether; ++j) {
        Bytes line = load_bytes(w + 64 * i + sizeof(Bytes) * j);
        TLE_IN_REGISTER(line);  // not a second load for the high nibbles
        low[j] = and_bits(line, splat8(15));
        high[j] = and_bits(shift16(line), splat8(15));
      }
      TLE_UNROLL for (int r = 0; r < kRows; ++r) {
        const int8_t* eight = x + r * x_stride + 8 * i;
        const Bytes x_low = four_codes(eight), x_high = four_codes(eight + 4);
        TLE_UNROLL for (int j = 0; j < kTogether; ++j) {
          const Bytes of_low = maddubs(low[j], x_low), of_high = maddubs(high[j], x_high);
          words[j][r] = i == 0 ? add16(of_low, of_high) : add16(add16(words[j][r], of_low), of_high);
          TLE_IN_REGISTER(words[j][r]);
        }
      }
    }
    TLE_UNROLL for (int r = 0; r < kRows; ++r)
      TLE_UNROLL for (int j = 0; j < kTogether; ++j) sums[j][r] = add32(sums[j][r], madd(words[j][r], splat16(1)));
  }
}

}  // namespace
}  // namespace tle
