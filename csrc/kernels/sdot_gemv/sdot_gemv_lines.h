// sdot_gemv by lines of 16 channels x 4 k; include after the lanes and after these primitives:
//
//   Sums, kSums                      a register of 32-bit sums, and how many of them a line has
//   Codes four_codes(const int8_t*)  4 codes of a, for every channel
//   void dot(Sums (&acc)[kSums], const int8_t* line, Codes four)     acc += line x four
//   Sums start(int32_t a_sum)        what the sums begin with; a_sum = the sum of a's codes
//   i32x16 channel_sums(const Sums (&acc)[kSums])
//
// Weights are read in the order in which they lie, kStep rows of packed at a time over a chunk of channels, so that the
// reads are a few long streams; the sums of the chunk wait in the cache in the meantime.
#pragma once

#include "csrc/kernels/common/registers.h"
#include "csrc/kernels/sdot_gemv/sdot_gemv.h"

namespace tle {
namespace {

constexpr int kStep = 4;             // kb at a time
constexpr int kChunkLines = 512 / 16;  // of channels
constexpr int kMaxRows = 4;

// 64 bytes from p, of which only the first `bytes` exist.
static inline void copy_line(int8_t (&line)[64], const int8_t* p, int64_t bytes) {
  memset(line, 0, 64);
  memcpy(line, p, size_t(bytes));
}

// Adds kBlocks kb to the sums of one line of channels for kRows rows.
template <int kRows, int kBlocks>
static inline void add_blocks(Sums (*total)[kChunkLines][kSums], int64_t line, const int8_t* const (&w)[kBlocks],
                              const Codes (&a)[kRows][kBlocks]) {
  TLE_UNROLL for (int r = 0; r < kRows; ++r) {
    Sums acc[kSums];
    TLE_UNROLL for (int i = 0; i < kSums; ++i) acc[i] = total[r][line][i];
    TLE_UNROLL for (int b = 0; b < kBlocks; ++b) dot(acc, w[b], a[r][b]);
    TLE_UNROLL for (int i = 0; i < kSums; ++i) total[r][line][i] = acc[i];
  }
}

template <int kRows, int kBlocks>
static inline void step(const SdotGemvArgs& s, int64_t row, int64_t channel, int64_t channels, int64_t kb,
                        Sums (*total)[kChunkLines][kSums]) {
  Codes a[kRows][kBlocks];
  TLE_UNROLL for (int r = 0; r < kRows; ++r)
    TLE_UNROLL for (int b = 0; b < kBlocks; ++b) a[r][b] = four_codes(s.a + (row + r) * s.a_stride + 4 * (kb + b));
  const int8_t* w = s.packed + kb * s.stride + 4 * channel;
  int64_t line = 0;
  for (; 16 * line + 16 <= channels; ++line, w += 64) {
    const int8_t* lines[kBlocks];
    TLE_UNROLL for (int b = 0; b < kBlocks; ++b) lines[b] = w + b * s.stride;
    add_blocks<kRows, kBlocks>(total, line, lines, a);
  }
  if (16 * line < channels) {
    int8_t copies[kBlocks][64];
    const int8_t* lines[kBlocks];
    TLE_UNROLL for (int b = 0; b < kBlocks; ++b) {
      copy_line(copies[b], w + b * s.stride, 4 * (channels - 16 * line));
      lines[b] = copies[b];
    }
    add_blocks<kRows, kBlocks>(total, line, lines, a);
  }
}

static inline void store_sums(const SdotGemvArgs& s, int64_t row, int64_t channel, int64_t channels, i32x16 acc) {
  if (s.a_scale) {
    const f32x16 scale = load_any(DType::kF32, s.b_scale, channel, channels);
    const f32x16 y = mul(mul(to_float(acc), set1(s.a_scale[row])), scale);
    store_any(DType::kBF16, s.out, row * s.out_stride + channel, channels, y);
  } else {
    int32_t sums[16];
    store(sums, acc);
    memcpy(static_cast<int32_t*>(s.out) + row * s.out_stride + channel, sums,
           size_t(channels < 16 ? channels : 16) * 4);
  }
}

template <int kRows>
static inline void rows_of_lines(const SdotGemvArgs& s, int64_t row) {
  Sums begin[kRows];
  for (int r = 0; r < kRows; ++r) {
    int32_t sum = 0;
    for (int64_t k = 0; k < 4 * s.blocks; ++k) sum += s.a[(row + r) * s.a_stride + k];
    begin[r] = start(sum);
  }
  Sums total[kRows][kChunkLines][kSums];
  for (int64_t channel = 0; channel < s.n; channel += 16 * kChunkLines) {
    const int64_t channels = s.n - channel < 16 * kChunkLines ? s.n - channel : 16 * kChunkLines;
    for (int r = 0; r < kRows; ++r)
      for (int line = 0; line < kChunkLines; ++line)
        for (int i = 0; i < kSums; ++i) total[r][line][i] = begin[r];
    int64_t kb = 0;
    for (; kb + kStep <= s.blocks; kb += kStep) step<kRows, kStep>(s, row, channel, channels, kb, total);
    for (; kb < s.blocks; ++kb) step<kRows, 1>(s, row, channel, channels, kb, total);
    for (int r = 0; r < kRows; ++r)
      for (int64_t n = 0; n < channels; n += 16)
        store_sums(s, row + r, channel + n, channels - n, channel_sums(total[r][n / 16]));
  }
}

static inline void sdot_gemv_lines(const SdotGemvArgs& s) {
  int64_t row = 0;
  for (; row + kMaxRows <= s.rows; row += kMaxRows) rows_of_lines<kMaxRows>(s, row);
  for (; row < s.rows; ++row) rows_of_lines<1>(s, row);
}

}  // namespace
}  // namespace tle
