// linear_group for many rows on NEON registers, by tiles of 8 rows x 8 channels whose operands are first brought into
// the product's order: a piece of the rows once for several panels, a piece of a panel, with its 4-bit codes unpacked,
// once for all rows of a block. Include after common/lanes_neon.h, linear_group_sdot.h and these primitives:
//
//   kRowScales, kChannelScales   floats that hold the scales of a tile's 8 rows, of its 8 channels
//   void put_rows(int8_t (*to)[16], int pair, int8x16_t a, int8x16_t b)
//                                16 k of a tile's rows 2 pair and 2 pair + 1
//   void put_row_scales(float* to, int pair, float a, float b)
//   void put_channels(int8_t (*to)[16], int four, const int8x16_t (&codes)[4])
//                                16 k of a tile's channels 4 four .. 4 four + 3; codes[i] holds k = 4 i .. 4 i + 3
//   void put_channel_scales(float* to, float32x4_t first, float32x4_t last)
//   void multiply(Sums (&sums)[16], const int8_t (*w)[16], const int8_t (*x)[16])
//                                sums += 16 k of a tile
//   void accumulate<kChannelScale, kMin>(float (*acc)[4], const Sums (&sums)[16], const GroupScales&)
//                                acc += a group of a tile
//   void take_rows(const float (*acc)[4], int pair, float32x4_t (&a)[2], float32x4_t (&b)[2])
//                                the 8 channels of a tile's rows 2 pair and 2 pair + 1
#pragma once

#include "csrc/kernels/common/registers.h"
#include "csrc/kernels/linear_group/linear_group_epilogue.h"

namespace tle {
namespace {

constexpr int64_t kBlockRows = 64, kBlockTiles = kBlockRows / 8, kBlockPanels = 8;
constexpr int64_t kPieceK = 256, kPieceGroups = kPieceK / 32;  // an even number of groups, whatever their size

// Groups consist of blocks of 32 k; what the last group lacks is zeros in both operands.
using CodesBlock = int8_t[2][8][16];  // [16 k][register][code]

struct RowsPiece {
  alignas(64) CodesBlock codes[kBlockTiles][kPieceGroups];
  float scales[kBlockTiles][kPieceGroups][kRowScales];  // [tile][group]
  float sums[kBlockTiles][kPieceGroups][kRowScales];
};

struct PanelPiece {
  alignas(64) CodesBlock codes[2][kPieceGroups];
  float scales[2][kPieceGroups][kChannelScales];  // [tile][group]
  float mins[2][kPieceGroups][kChannelScales];
};

// Of a tile. In memory: the integer sums take the registers, and an accumulator is met once a group.
using Accumulators = float[16][4];

// Some groups of k.
struct Span {
  int64_t first, groups;  // of the row's
  int64_t group_blocks;   // of each
  int64_t k;              // of all of them, without what the last one lacks
};

static inline Span span_at(const LinearGroupArgs& a, int64_t first) {
  const int64_t most = kPieceK / a.group, all = linear_group_groups(a);
  Span s;
  s.first = first;
  s.groups = all - first < most ? all - first : most;
  s.group_blocks = a.group / 32;
  s.k = first + s.groups < all ? s.groups * a.group : a.k - first * a.group;
  return s;
}

// Rows row .. row + rows of a span. A last tile's missing rows are zeros.
static inline void pack_rows(const LinearGroupArgs& a, const Span& s, int64_t row, int64_t rows, RowsPiece& to) {
  alignas(16) static constexpr int8_t kNoCodes[kPieceK] = {};
  static constexpr float kNoScales[kPieceGroups] = {};
  static constexpr int32_t kNoSums[kPieceGroups] = {};
  const int64_t groups = linear_group_groups(a), whole = s.k / 32, left = s.k % 32, blocks = s.groups * s.group_blocks;
  const auto codes_of = [&](int64_t m) {
    return m < rows ? a.x + (row + m) * a.x_stride + s.first * a.group : kNoCodes;
  };
  for (int64_t m = 0; m < (rows + 7) / 8 * 8; m += 2) {
    const int64_t tile = m / 8;
    const int pair = int(m % 8 / 2);
    const int8_t *x0 = codes_of(m), *x1 = codes_of(m + 1);
    CodesBlock* codes = to.codes[tile];
    for (int64_t i = 0; i < whole; ++i, x0 += 32, x1 += 32) {
      TLE_UNROLL for (int half = 0; half < 2; ++half)
        put_rows(codes[i][half], pair, vld1q_s8(x0 + 16 * half), vld1q_s8(x1 + 16 * half));
    }
    for (int64_t i = whole; i < blocks; ++i) {
      int8_t rest[2][32] = {};
      if (i == whole) {
        memcpy(rest[0], x0, size_t(left));
        memcpy(rest[1], x1, size_t(left));
      }
      for (int half = 0; half < 2; ++half)
        put_rows(codes[i][half], pair, vld1q_s8(rest[0] + 16 * half), vld1q_s8(rest[1] + 16 * half));
    }
    const int64_t at = (row + m) * groups + s.first;
    const float* scale0 = m < rows ? a.x_scale + at : kNoScales;
    const float* scale1 = m + 1 < rows ? a.x_scale + at + groups : kNoScales;
    for (int64_t g = 0; g < s.groups; ++g) put_row_scales(to.scales[tile][g], pair, scale0[g], scale1[g]);
    if (a.codes != GroupCodes::kInt4Min) continue;
    const int32_t* sum0 = m < rows ? a.x_sum + at : kNoSums;
    const int32_t* sum1 = m + 1 < rows ? a.x_sum + at + groups : kNoSums;
    for (int64_t g = 0; g < s.groups; ++g) put_row_scales(to.sums[tile][g], pair, float(sum0[g]), float(sum1[g]));
  }
}

// 32 k of a panel from its lines at w.
template <GroupCodes kCodes>
static inline void pack_block(const uint8_t* w, CodesBlock& first, CodesBlock& last) {
  TLE_UNROLL for (int half = 0; half < 2; ++half)
    TLE_UNROLL for (int q = 0; q < 4; ++q) {
      int8x16_t codes[4];
      if constexpr (kCodes == GroupCodes::kInt8) {
        const uint8_t* lines = w + 256 * half + 16 * q;
        TLE_UNROLL for (int i = 0; i < 4; ++i) codes[i] = vreinterpretq_s8_u8(vld1q_u8(lines + 64 * i));
      } else {
        const int8x16_t zero = vdupq_n_s8(kCodes == GroupCodes::kInt4 ? 8 : 0);
        TLE_UNROLL for (int i = 0; i < 2; ++i) {
          const uint8x16_t line = vld1q_u8(w + 64 * (2 * half + i) + 16 * q);
          codes[2 * i] = vsubq_s8(low_nibbles(line), zero);
          codes[2 * i + 1] = vsubq_s8(high_nibbles(line), zero);
        }
      }
      put_channels((q < 2 ? first : last)[half], q % 2, codes);
    }
}

// A span of a panel, whose scales or lines begin at w.
template <GroupCodes kCodes, bool kChannelScale>
static inline void pack_panel(const LinearGroupArgs& a, const Span& s, const uint8_t* w, PanelPiece& to) {
  constexpr int64_t kLineCodes = kCodes == GroupCodes::kInt8 ? 4 : 8, kBlockBytes = 64 * 32 / kLineCodes;
  constexpr bool kMin = kCodes == GroupCodes::kInt4Min;
  const int64_t scale_bytes = 16 * dtype_size(a.scale_type);
  const int64_t whole = s.k / 32;
  int64_t block = 0;
  for (int64_t g = 0; g < s.groups; g += 2) {
    if constexpr (!kChannelScale) {
      for (int64_t i = g; i < g + 2 && i < s.groups; ++i) {
        const f32x16 scale = linear_group_load(a.scale_type, w + (i - g) * scale_bytes);
        TLE_UNROLL for (int t = 0; t < 2; ++t) put_channel_scales(to.scales[t][i], scale.v[2 * t], scale.v[2 * t + 1]);
        if constexpr (!kMin) continue;
        const f32x16 min = linear_group_load(a.scale_type, w + (2 + i - g) * scale_bytes);
        TLE_UNROLL for (int t = 0; t < 2; ++t) put_channel_scales(to.mins[t][i], min.v[2 * t], min.v[2 * t + 1]);
      }
      w += (kMin ? 4 : 2) * scale_bytes;
    }
    const int64_t next = block + 2 * s.group_blocks;
    for (; block < next && block < whole; ++block, w += kBlockBytes)
      pack_block<kCodes>(w, to.codes[0][block], to.codes[1][block]);
  }
  for (const int64_t blocks = s.groups * s.group_blocks; block < blocks; ++block) {
    uint8_t rest[kBlockBytes] = {};
    if (block == whole) memcpy(rest, w, size_t((s.k % 32 + kLineCodes - 1) / kLineCodes * 64));
    pack_block<kCodes>(rest, to.codes[0][block], to.codes[1][block]);
  }
}

// acc += a span of `tiles` tiles of rows times a panel.
template <bool kChannelScale, bool kMin>
[[gnu::noinline]] static void add_tiles(const Span& s, const RowsPiece& rows, int64_t tiles, const PanelPiece& panel,
                                        Accumulators (*acc)[2]) {
  const int64_t groups = s.groups, group_blocks = s.group_blocks;
  for (int64_t t = 0; t < 2 * tiles; ++t) {
    const CodesBlock *x = rows.codes[t / 2], *w = panel.codes[t % 2];
    GroupScales scales = {rows.scales[t / 2][0], rows.sums[t / 2][0], panel.scales[t % 2][0],
                          panel.mins[t % 2][0]};
    for (int64_t g = 0; g < groups; ++g) {
      Sums sums[16];
      TLE_UNROLL for (int i = 0; i < 16; ++i) sums[i] = first_sums<GroupCodes::kInt8, 1>(0);
      int64_t blocks = group_blocks;
      do {
        TLE_UNROLL for (int half = 0; half < 2; ++half) multiply(sums, (*w)[half], (*x)[half]);
        ++w;
        ++x;
        __asm__("" : "+r"(blocks));  // else the compiler works out where w and x end, and needs copies of them
      } while (--blocks != 0);
      TLE_KEEP_IN_MEMORY;
      accumulate<kChannelScale, kMin>(acc[t / 2][t % 2], sums, scales);
      scales.x += kRowScales;
      scales.x_sum += kRowScales;
      scales.w += kChannelScales;
      scales.w_min += kChannelScales;
      // Pointers, not an index added to each: then one instruction loads two registers.
      __asm__("" : "+r"(scales.x), "+r"(scales.w));
    }
  }
}

// At most kBlockRows rows of at most kBlockPanels panels, panel .. panel + panels.
template <GroupCodes kCodes, bool kChannelScale>
[[gnu::noinline]] static void block(const LinearGroupArgs& a, int64_t row, int64_t rows, int64_t panel,
                                    int64_t panels) {
  constexpr bool kMin = kCodes == GroupCodes::kInt4Min;
  const int64_t groups = linear_group_groups(a), tiles = (rows + 7) / 8;
  const int64_t pair_bytes = (kChannelScale ? 0 : 16 * dtype_size(a.scale_type) * (kMin ? 4 : 2)) +
                             2 * a.group * (kCodes == GroupCodes::kInt8 ? 16 : 8);
  RowsPiece x;
  PanelPiece w;
  alignas(64) Accumulators acc[kBlockPanels][kBlockTiles][2];
  memset(acc, 0, size_t(panels) * sizeof acc[0]);
  for (int64_t first = 0; first < groups; first += kPieceK / a.group) {
    const Span s = span_at(a, first);
    pack_rows(a, s, row, rows, x);
    for (int64_t p = 0; p < panels; ++p) {
      pack_panel<kCodes, kChannelScale>(a, s, linear_group_panel(a, panel + p) + first / 2 * pair_bytes, w);
      add_tiles<kChannelScale, kMin>(s, x, tiles, w, acc[p]);
    }
  }
  for (int64_t p = 0; p < panels; ++p)
    for (int64_t m = 0; m < rows; m += 2) {
      float32x4_t first[2][2], last[2][2];  // [row][four channels]
      take_rows(acc[p][m / 8][0], int(m % 8 / 2), first[0], first[1]);
      take_rows(acc[p][m / 8][1], int(m % 8 / 2), last[0], last[1]);
      linear_group_store(a, row + m, panel + p, {{first[0][0], first[0][1], last[0][0], last[0][1]}});
      if (m + 1 == rows) break;
      linear_group_store(a, row + m + 1, panel + p, {{first[1][0], first[1][1], last[1][0], last[1][1]}});
    }
}

// Computes the first rows, in blocks, and returns their number: none of fewer than `few`, and of those that fill no
// tile none if they are fewer than `few_left`.
static inline int64_t many_rows(const LinearGroupArgs& a, int64_t few, int64_t few_left) {
  if (a.rows < few) return 0;
  const int64_t left = a.rows % 8, end = left < few_left ? a.rows - left : a.rows;
  const int64_t panels = linear_group_panels(a), turns = (panels + kBlockPanels - 1) / kBlockPanels;
  for (int64_t row = 0; row < end; row += kBlockRows) {
    const int64_t rows = end - row < kBlockRows ? end - row : kBlockRows;
    for (int64_t turn = 0; turn < turns; ++turn) {
      const int64_t panel = panels * turn / turns, some = panels * (turn + 1) / turns - panel;
      switch (a.codes) {
        case GroupCodes::kInt8:
          if (a.channel_scale) {
            block<GroupCodes::kInt8, true>(a, row, rows, panel, some);
          } else {
            block<GroupCodes::kInt8, false>(a, row, rows, panel, some);
          }
          break;
        case GroupCodes::kInt4: block<GroupCodes::kInt4, false>(a, row, rows, panel, some); break;
        case GroupCodes::kInt4Min: block<GroupCodes::kInt4Min, false>(a, row, rows, panel, some); break;
      }
    }
  }
  return end;
}

}  // namespace
}  // namespace tle
