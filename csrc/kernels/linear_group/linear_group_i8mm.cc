// SMMLA multiplies two rows of 8 codes by two channels of 8 codes: twice the products of SDOT for each instruction. Its
// operand is eight consecutive k of two channels: lines are unpacked and zipped to that once for a block of rows. Sums
// and fp32 accumulators keep the instruction's order, [row 0: channel, channel + 1; row 1: channel, channel + 1], and
// so do the scales that meet them. Few rows, and those that are left over, go to SDOT, which takes the lines as they
// are.
#include "csrc/kernels/common/lanes_neon.h"

#include "csrc/kernels/linear_group/linear_group_sdot.h"

namespace tle {
namespace {

constexpr int kPairs = 2;        // pairs of rows in a tile
constexpr int kFewRows = 8;      // fewer rows do not pay for the unpacking
constexpr int kBlockPairs = 64;  // pairs of rows that share an unpacked piece of a panel
constexpr int64_t kPieceK = 512;

// Some groups of a panel as SMMLA and the epilogue want them.
struct Piece {
  int64_t groups, k;                  // k as packed: the last group's padded to whole lines
  int8_t codes[kPieceK / 8][8][16];   // [8 k][two channels][channel, k]
  float scales[kPieceK / 32][8][4];   // [group][two channels][as the sums]
  float mins[kPieceK / 32][8][4];
};

// Accumulators of a pair of rows: [two channels][as the sums].
using PairSums = float32x4_t[8];

static inline void store_twice(float (*out)[4], f32x16 a) {
  for (int i = 0; i < 4; ++i) {
    vst1q_f32(out[2 * i], vcombine_f32(vget_low_f32(a.v[i]), vget_low_f32(a.v[i])));
    vst1q_f32(out[2 * i + 1], vcombine_f32(vget_high_f32(a.v[i]), vget_high_f32(a.v[i])));
  }
}

static inline void store_zipped(int8_t (*out)[16], int8x16_t first, int8x16_t second) {
  const int32x4_t a = vreinterpretq_s32_s8(first), b = vreinterpretq_s32_s8(second);
  vst1q_s8(out[0], vreinterpretq_s8_s32(vzip1q_s32(a, b)));
  vst1q_s8(out[1], vreinterpretq_s8_s32(vzip2q_s32(a, b)));
}

// Unpacks `groups` groups from the even group `first` on; w is where that group's scales or lines begin. Returns where
// the next one does.
template <GroupCodes kCodes, bool kChannelScale>
static inline const uint8_t* unpack(const LinearGroupArgs& a, const uint8_t* w, int64_t first, int64_t groups,
                                    Piece& piece) {
  constexpr int64_t kLineCodes = kCodes == GroupCodes::kInt8 ? 4 : 8;
  constexpr bool kMin = kCodes == GroupCodes::kInt4Min;
  const int64_t scale_bytes = 16 * dtype_size(a.scale_type);
  int64_t eight = 0;
  piece.groups = groups;
  piece.k = 0;
  for (int64_t g = 0; g < groups; ++g) {
    if (!kChannelScale && g % 2 == 0) {
      for (int64_t i = g; i < g + 2 && i < groups; ++i) {
        store_twice(piece.scales[i], linear_group_load(a.scale_type, w + (i - g) * scale_bytes));
        if (kMin) store_twice(piece.mins[i], linear_group_load(a.scale_type, w + (2 + i - g) * scale_bytes));
      }
      w += (kMin ? 4 : 2) * scale_bytes;
    }
    const int64_t left = a.k - (first + g) * a.group, k = left < a.group ? left : a.group;
    const int64_t lines = (k + kLineCodes - 1) / kLineCodes;
    for (int64_t l = 0; l < lines; l += 8 / kLineCodes, ++eight)
      for (int q = 0; q < 4; ++q) {
        const uint8x16_t line = vld1q_u8(w + 64 * l + 16 * q);
        if (kCodes == GroupCodes::kInt8) {
          const uint8x16_t next = l + 1 < lines ? vld1q_u8(w + 64 * l + 64 + 16 * q) : vdupq_n_u8(0);
          store_zipped(piece.codes[eight] + 2 * q, vreinterpretq_s8_u8(line), vreinterpretq_s8_u8(next));
        } else {
          // Signed codes here, once for all rows: SDOT's way, sums that start from -8 sum(x), would cost a start for
          // each.
          const int8x16_t zero = vdupq_n_s8(kCodes == GroupCodes::kInt4 ? 8 : 0);
          const int8x16_t low = vsubq_s8(low_nibbles(line), zero), high = vsubq_s8(high_nibbles(line), zero);
          store_zipped(piece.codes[eight] + 2 * q, low, high);
        }
      }
    w += 64 * lines;
    piece.k += kLineCodes * lines;
  }
  return w;
}

static inline int8x16_t zip_low(int8x16_t a, int8x16_t b) {
  return vreinterpretq_s8_s64(vzip1q_s64(vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b)));
}
static inline int8x16_t zip_high(int8x16_t a, int8x16_t b) {
  return vreinterpretq_s8_s64(vzip2q_s64(vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b)));
}

// The next `count` codes of a row (at most 8), then zeros.
static inline int8x8_t some_codes(const int8_t* x, int64_t count) {
  int8_t codes[8] = {};
  memcpy(codes, x, size_t(count));
  return vld1_s8(codes);
}

// [row 0, row 0, row 1, row 1]
static inline float32x4_t twice_each(float row0, float row1) {
  return vcombine_f32(vdup_n_f32(row0), vdup_n_f32(row1));
}

// sums += kPairs pairs of rows x 8 k.
static inline void step(int32x4_t (&sums)[kPairs][8], const int8_t (&w)[8][16], const int8x16_t (&x)[kPairs]) {
  TLE_UNROLL for (int c = 0; c < 8; ++c) {
    const int8x16_t codes = vld1q_s8(w[c]);
    TLE_UNROLL for (int p = 0; p < kPairs; ++p) sums[p][c] = vmmlaq_s32(sums[p][c], x[p], codes);
    if (c == 3) TLE_KEEP_ORDER;
  }
  TLE_KEEP_ORDER;
}

// Where kPairs pairs of rows stand in a piece: their codes, the first row's scales and sums, and the group as SMMLA and
// the epilogue want it.
struct PlaceInPiece {
  const int8_t* x;
  const float* x_scale;
  const int32_t* x_sum;
  const int8_t (*w)[8][16];
  const float (*scales)[4], (*mins)[4];
};

static inline void add_16_k(int32x4_t (&sums)[kPairs][8], PlaceInPiece& at, int64_t x_stride) {
  int8x16_t low[kPairs], high[kPairs];
  TLE_UNROLL for (int p = 0; p < kPairs; ++p) {
    const int8x16_t x0 = vld1q_s8(at.x + 2 * p * x_stride), x1 = vld1q_s8(at.x + (2 * p + 1) * x_stride);
    low[p] = zip_low(x0, x1);
    high[p] = zip_high(x0, x1);
  }
  TLE_KEEP_ORDER;
  step(sums, at.w[0], low);
  step(sums, at.w[1], high);
  at.x += 16;
  at.w += 2;
}

// acc += the next group. kWhole: it is not cut short by the end of k. The integer sums take the registers; the
// accumulators are in memory, where each is met once a group.
template <GroupCodes kCodes, bool kChannelScale, bool kWhole>
static inline void add_group(int64_t k, int64_t x_stride, int64_t groups, PlaceInPiece& at, PairSums* acc) {
  constexpr bool kMin = kCodes == GroupCodes::kInt4Min;
  int32x4_t sums[kPairs][8];
  TLE_UNROLL for (int p = 0; p < kPairs; ++p)
    TLE_UNROLL for (int c = 0; c < 8; ++c) sums[p][c] = vdupq_n_s32(0);
  if constexpr (kWhole) {
    do {
      TLE_UNROLL for (int half = 0; half < 2; ++half) add_16_k(sums, at, x_stride);
    } while ((k -= 32) != 0);
  } else {
    for (; k >= 16; k -= 16) add_16_k(sums, at, x_stride);
    for (; k > 0; k -= 8, at.x += 8, ++at.w) {
      const int64_t count = k < 8 ? k : 8;
      int8x16_t codes[kPairs];
      TLE_UNROLL for (int p = 0; p < kPairs; ++p)
        codes[p] = vcombine_s8(some_codes(at.x + 2 * p * x_stride, count),
                               some_codes(at.x + (2 * p + 1) * x_stride, count));
      step(sums, *at.w, codes);
    }
  }
  float32x4_t scale[kPairs], sum[kPairs];
  TLE_UNROLL for (int p = 0; p < kPairs; ++p) {
    const float* x_scale = at.x_scale + 2 * p * groups;
    const int32_t* x_sum = at.x_sum + 2 * p * groups;
    scale[p] = vcombine_f32(vld1_dup_f32(x_scale), vld1_dup_f32(x_scale + groups));
    if (kMin) sum[p] = twice_each(float(x_sum[0]), float(x_sum[groups]));
  }
  TLE_UNROLL for (int c = 0; c < 8; c += 2) {
    float32x4_t w_scale[2], w_min[2];
    TLE_UNROLL for (int i = 0; i < 2; ++i) {
      if (!kChannelScale) w_scale[i] = vld1q_f32(at.scales[c + i]);
      if (kMin) w_min[i] = vld1q_f32(at.mins[c + i]);
    }
    TLE_UNROLL for (int p = 0; p < kPairs; ++p)
      TLE_UNROLL for (int i = 0; i < 2; ++i) {
        float32x4_t to = acc[p][c + i];
        to = fma(vcvtq_f32_s32(sums[p][c + i]), kChannelScale ? scale[p] : mul(scale[p], w_scale[i]), to);
        if (kMin) to = fma(sum[p], mul(scale[p], w_min[i]), to);
        acc[p][c + i] = to;
      }
    TLE_KEEP_ORDER;
  }
  ++at.x_scale;
  ++at.x_sum;
  at.scales += 8;
  at.mins += 8;
}

// acc += kPairs pairs of rows, from `row` on, x the piece, whose first group is `first`.
template <GroupCodes kCodes, bool kChannelScale>
static inline void tile(const LinearGroupArgs& a, int64_t row, int64_t first, const Piece& piece, PairSums* acc) {
  const int64_t groups = linear_group_groups(a), group = a.group, x_stride = a.x_stride, scale = row * groups + first;
  PlaceInPiece at = {a.x + row * x_stride + first * group, a.x_scale + scale, a.x_sum + scale,
                     piece.codes, piece.scales[0], piece.mins[0]};
  int64_t left = piece.k;
  for (; left >= group; left -= group) add_group<kCodes, kChannelScale, true>(group, x_stride, groups, at, acc);
  if (left > 0) add_group<kCodes, kChannelScale, false>(left, x_stride, groups, at, acc);
}

static inline void store_pair(const LinearGroupArgs& a, int64_t row, int64_t panel, const PairSums& acc) {
  f32x16 first, second;
  for (int q = 0; q < 4; ++q) {
    const float64x2_t low = vreinterpretq_f64_f32(acc[2 * q]), high = vreinterpretq_f64_f32(acc[2 * q + 1]);
    first.v[q] = vreinterpretq_f32_f64(vzip1q_f64(low, high));
    second.v[q] = vreinterpretq_f32_f64(vzip2q_f64(low, high));
  }
  linear_group_store(a, row, panel, first);
  linear_group_store(a, row + 1, panel, second);
}

// A block of rows: a multiple of 2 * kPairs, at most 2 * kBlockPairs.
template <GroupCodes kCodes, bool kChannelScale>
static inline void block(const LinearGroupArgs& a, int64_t row, int64_t rows) {
  const int64_t groups = linear_group_groups(a), per_piece = kPieceK / a.group;
  Piece piece;
  PairSums sums[kBlockPairs];
  for (int64_t panel = 0; panel < linear_group_panels(a); ++panel) {
    memset(sums, 0, sizeof sums);
    const uint8_t* w = linear_group_panel(a, panel);
    for (int64_t first = 0; first < groups; first += per_piece) {
      w = unpack<kCodes, kChannelScale>(a, w, first, groups - first < per_piece ? groups - first : per_piece, piece);
      for (int64_t i = 0; i < rows; i += 2 * kPairs)
        tile<kCodes, kChannelScale>(a, row + i, first, piece, sums + i / 2);
    }
    for (int64_t i = 0; i < rows; i += 2) store_pair(a, row + i, panel, sums[i / 2]);
  }
}

}  // namespace

void linear_group_i8mm(const LinearGroupArgs& a) {
  int64_t row = 0;
  while (a.rows >= kFewRows && a.rows - row >= 2 * kPairs) {
    const int64_t whole = (a.rows - row) / (2 * kPairs) * (2 * kPairs);
    const int64_t rows = whole < 2 * kBlockPairs ? whole : 2 * kBlockPairs;
    switch (a.codes) {
      case GroupCodes::kInt8:
        if (a.channel_scale) {
          block<GroupCodes::kInt8, true>(a, row, rows);
        } else {
          block<GroupCodes::kInt8, false>(a, row, rows);
        }
        break;
      case GroupCodes::kInt4: block<GroupCodes::kInt4, false>(a, row, rows); break;
      case GroupCodes::kInt4Min: block<GroupCodes::kInt4Min, false>(a, row, rows); break;
    }
    row += rows;
  }
  sdot_rows(a, row);
}

}  // namespace tle
