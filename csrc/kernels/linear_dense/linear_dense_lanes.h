// linear_dense on the 16 canonical lanes; include after one of common/lanes_*.h and after
//
//   kTileRows, kTileChannels   rows x channels whose sums fit in registers
//   kVectorChannels            the same for a single row
//   Part, kPart                one register and the lanes that it holds
//   Part load_part(const float*), load_part<T>(const void*, int64_t i), fma_part(a, b, c), store_part(float*, Part)
//
// A tile shares each load of weights among its rows and each load of x among its channels. The lanes of 16 channels are
// added up together (reduce_add_16), so that the trees cost little beside the products even for short K.
#pragma once

#include "csrc/kernels/common/registers.h"
#include "csrc/kernels/linear_dense/linear_dense.h"

namespace tle {
namespace {

constexpr int kParts = 16 / kPart;

// Channels that share the widened rows. A single row has many, for long streams (below).
template <int kRows>
constexpr int64_t kBlock = kRows == 1 ? 256 : 48;

// k for which the rows of a tile are widened to fp32 at a time: 16 KiB, half of a small first-level cache.
template <int kRows>
constexpr int64_t kChunk = 4096 / kRows / 16 * 16;

// total += x w over k elements, for channels that are `step` rows of w apart; x is fp32 and padded with zeros to whole
// lanes. The parts of a line take turns, so that only one register of each channel's weights is in use at a time.
template <DType T, int kRows, int kChannels>
static inline void dense_tile(const float (*x)[kChunk<kRows>], const typename Element<T>::type* w, int64_t w_stride,
                              int64_t k, float (*total)[16], int64_t step) {
  Part acc[kRows][kChannels][kParts];
  TLE_UNROLL for (int r = 0; r < kRows; ++r)
    TLE_UNROLL for (int c = 0; c < kChannels; ++c)
      TLE_UNROLL for (int p = 0; p < kParts; ++p)
        acc[r][c][p] = load_part(total[r * kBlock<kRows> + c * step] + p * kPart);

  int64_t i = 0;
  for (; i + 16 <= k; i += 16) {
    TLE_UNROLL for (int p = 0; p < kParts; ++p) {
      Part weights[kChannels];
      TLE_UNROLL for (int c = 0; c < kChannels; ++c) weights[c] = load_part<T>(w + c * step * w_stride, i + p * kPart);
      TLE_UNROLL for (int r = 0; r < kRows; ++r) {
        Part values = load_part(x[r] + i + p * kPart);
        TLE_IN_REGISTER(values);  // once for all channels, not as a memory operand of each
        TLE_UNROLL for (int c = 0; c < kChannels; ++c) acc[r][c][p] = fma_part(values, weights[c], acc[r][c][p]);
      }
      TLE_KEEP_ORDER;
    }
  }
  if (i < k) {
    typename Element<T>::type tail[kChannels][16] = {};
    for (int c = 0; c < kChannels; ++c)
      memcpy(tail[c], w + c * step * w_stride + i, size_t(k - i) * sizeof(tail[c][0]));
    TLE_UNROLL for (int p = 0; p < kParts; ++p)
      TLE_UNROLL for (int c = 0; c < kChannels; ++c) {
        const Part weights = load_part<T>(tail[c], p * kPart);
        TLE_UNROLL for (int r = 0; r < kRows; ++r)
          acc[r][c][p] = fma_part(load_part(x[r] + i + p * kPart), weights, acc[r][c][p]);
      }
  }

  TLE_UNROLL for (int r = 0; r < kRows; ++r)
    TLE_UNROLL for (int c = 0; c < kChannels; ++c)
      TLE_UNROLL for (int p = 0; p < kParts; ++p)
        store_part(total[r * kBlock<kRows> + c * step] + p * kPart, acc[r][c][p]);
}

// out[row, channel ...] from the lanes of up to 16 channels.
static inline void dense_store(const LinearDenseArgs& a, int64_t row, int64_t channel, const float (*lanes)[16]) {
  const int64_t channels = a.n - channel < 16 ? a.n - channel : 16;
  f32x16 sums[16];
  for (int c = 0; c < 16; ++c) sums[c] = load(lanes[c]);
  f32x16 y = reduce_add_16(sums);
  if (a.bias) y = add(y, load_any(a.bias_dtype, a.bias, channel, channels));
  store_any(a.out_dtype, a.out, row * a.out_stride + channel, channels, y);
}

template <DType T, int kRows>
static inline void dense_rows(const LinearDenseArgs& a, int64_t row) {
  using E = typename Element<T>::type;
  constexpr int kChannels = kRows == 1 ? kVectorChannels : kTileChannels;
  const E* from = static_cast<const E*>(a.x) + row * a.x_stride;
  alignas(64) float x[kRows][kChunk<kRows>];
  alignas(64) float total[kRows * kBlock<kRows>][16];
  for (int64_t first = 0; first < a.n; first += kBlock<kRows>) {
    const int64_t channels = a.n - first < kBlock<kRows> ? a.n - first : kBlock<kRows>;
    const int64_t groups = (channels + 15) / 16;
    for (int r = 0; r < kRows; ++r) memset(total[r * kBlock<kRows>], 0, size_t(groups) * 16 * sizeof total[0]);
    for (int64_t at = 0; at < a.k; at += kChunk<kRows>) {
      const int64_t k = a.k - at < kChunk<kRows> ? a.k - at : kChunk<kRows>;
      for (int r = 0; r < kRows; ++r) {
        int64_t i = 0;
        for (; i + 16 <= k; i += 16) store(x[r] + i, load_as<T>(from + r * a.x_stride + at, i));
        if (i < k) store(x[r] + i, load_tail<T>(from + r * a.x_stride + at, i, k - i));
      }
      const E* w = static_cast<const E*>(a.w) + first * a.w_stride + at;
      // The channels of a tile are not neighbours: each of them goes on to the row that follows in memory, so that a
      // tile reads kChannels long streams. Neighbouring short rows would share a page, where the hardware's prefetching
      // takes them for noise (bf16, K = 576 on Zen 4: 40 % of the bandwidth; like this 90 %).
      const int64_t step = channels / kChannels;
      for (int64_t c = 0; c < step; ++c)
        dense_tile<T, kRows, kChannels>(x, w + c * a.w_stride, a.w_stride, k, total + c, step);
      for (int64_t c = step * kChannels; c < channels; ++c)
        dense_tile<T, kRows, 1>(x, w + c * a.w_stride, a.w_stride, k, total + c, 0);
    }
    for (int r = 0; r < kRows; ++r)
      for (int64_t c = 0; c < channels; c += 16) dense_store(a, row + r, first + c, total + r * kBlock<kRows> + c);
  }
}

// kRows rows at a time, then the same with one row less for what remains.
template <DType T, int kRows>
static inline void dense_tiles(const LinearDenseArgs& a, int64_t row) {
  for (; row + kRows <= a.rows; row += kRows) dense_rows<T, kRows>(a, row);
  if constexpr (kRows > 1) dense_tiles<T, kRows - 1>(a, row);
}

static inline void linear_dense_lanes(const LinearDenseArgs& a) {
  switch (a.dtype) {
    case DType::kF32: return dense_tiles<DType::kF32, kTileRows>(a, 0);
    case DType::kBF16: return dense_tiles<DType::kBF16, kTileRows>(a, 0);
    default: return dense_tiles<DType::kF16, kTileRows>(a, 0);
  }
}

}  // namespace
}  // namespace tle
