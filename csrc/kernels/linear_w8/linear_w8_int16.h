// linear_w8 by 16-bit products (vpmaddwd), for x86 without VNNI: codes are sign-extended, so nothing saturates and -128
// is a code like any other. Include after the lanes and after these primitives of the file's vector width:
//
//   Words                          a register of 16-bit words, or of 32-bit sums
//   kWordChannels                  channels in one register: each has its 4 consecutive k in 64 bits
//   Words sign_extend(const void*) kWordChannels * 4 codes
//   Words four_words(const int16_t*) 4 words, to every channel
//   Words dot(Words acc, Words a, Words b)   acc + adjacent pairs of products: two sums for each channel
//   i32x16 channel_sums(const Words acc[16 / kWordChannels])   the two sums of every channel added
#pragma once

#include "csrc/kernels/common/registers.h"
#include "csrc/kernels/linear_w8/linear_w8_epilogue.h"

namespace tle {
namespace {

constexpr int kParts = 16 / kWordChannels;  // registers that hold one line
constexpr int kPartsPerTile = 2;            // registers of a line that a tile works on
constexpr int kChunk = 256;                 // lines for which the rows of a tile are widened at a time
constexpr int kPanelsPerPass = 8;           // panels that share the widened rows

// What a tile of rows has summed up so far.
template <int kRows>
struct Sums {
  Words part[kPanelsPerPass][kParts / kPartsPerTile][kRows][kPartsPerTile];
};

// acc += rows x a part of a panel, over `lines` lines. A register of weights serves kRows rows, a broadcast
// kPartsPerTile registers.
template <int kRows>
static inline void tile(const uint8_t* w, const int16_t (*x)[4 * kChunk], int64_t lines,
                        Words (&total)[kRows][kPartsPerTile]) {
  Words acc[kRows][kPartsPerTile];
  TLE_UNROLL for (int r = 0; r < kRows; ++r)
    TLE_UNROLL for (int i = 0; i < kPartsPerTile; ++i) acc[r][i] = total[r][i];
  for (int64_t line = 0; line < lines; ++line) {
    Words codes[kPartsPerTile];
    prefetch_weights(w, line);
    TLE_UNROLL for (int i = 0; i < kPartsPerTile; ++i) codes[i] = sign_extend(w + 64 * line + 4 * kWordChannels * i);
    TLE_UNROLL for (int r = 0; r < kRows; ++r) {
      const Words four = four_words(x[r] + 4 * line);
      TLE_UNROLL for (int i = 0; i < kPartsPerTile; ++i) {
        acc[r][i] = dot(acc[r][i], codes[i], four);
        TLE_IN_REGISTER(acc[r][i]);
      }
    }
  }
  TLE_UNROLL for (int r = 0; r < kRows; ++r)
    TLE_UNROLL for (int i = 0; i < kPartsPerTile; ++i) total[r][i] = acc[r][i];
}

template <int kRows>
static inline void rows_of_tiles(const LinearW8Args& a, int64_t row) {
  alignas(64) int16_t x[kRows][4 * kChunk];
  Sums<kRows> sums;
  const int64_t panels = linear_w8_panels(a);
  for (int64_t first = 0; first < panels; first += kPanelsPerPass) {
    const int64_t count = panels - first < kPanelsPerPass ? panels - first : kPanelsPerPass;
    memset(&sums, 0, sizeof sums);
    for (int64_t line = 0; line < a.lines; line += kChunk) {
      const int64_t lines = a.lines - line < kChunk ? a.lines - line : kChunk;
      for (int r = 0; r < kRows; ++r) {
        const int8_t* codes = a.x + (row + r) * a.x_stride + 4 * line;
        for (int64_t k = 0; k < 4 * lines; ++k) x[r][k] = codes[k];
      }
      for (int64_t p = 0; p < count; ++p)
        for (int i = 0; i < kParts / kPartsPerTile; ++i) {
          const int64_t offset = 64 * line + 4 * kWordChannels * kPartsPerTile * i;
          tile<kRows>(linear_w8_panel(a, first + p) + offset, x, lines, sums.part[p][i]);
        }
    }
    for (int64_t p = 0; p < count; ++p)
      for (int r = 0; r < kRows; ++r) {
        Words acc[kParts];
        for (int i = 0; i < kParts; ++i) acc[i] = sums.part[p][i / kPartsPerTile][r][i % kPartsPerTile];
        linear_w8_store(a, row + r, first + p, channel_sums(acc));
      }
  }
}

}  // namespace
}  // namespace tle
