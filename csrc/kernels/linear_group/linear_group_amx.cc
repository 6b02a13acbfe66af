// AMX: a tile has the sums of one group, of 16 rows times a panel, which go through memory into the rows' fp32
// accumulators. The 16 of a tile stay in registers while a block of k passes, whose 4-bit codes and scales are unpacked
// once for 64 rows.
#include "csrc/kernels/common/lanes_avx512.h"
#include "csrc/kernels/common/tiles_amx.h"
#include "csrc/kernels/linear_group/linear_group_epilogue.h"

namespace tle {
namespace {

// Even tiles and odd ones take turns, group by group: sums 0 and 1, rows of x 4 and 5, lines 6 and 7.
constexpr int64_t kRowTile = 16, kRows = 64, kPanels = 8;
constexpr int64_t kBlock = 1024, kBlockGroups = kBlock / 32;  // of k

// A panel's groups `first` .. first + count - 1, ready for the tiles.
struct Block {
  int64_t first, count;
  const int8_t* lines[kBlockGroups];  // of 4 signed codes of each of 16 channels
  alignas(64) float scale[kBlockGroups][16], min[kBlockGroups][16];
  alignas(64) int8_t codes[kBlock][16];  // what was unpacked, or has zeros behind a last group that is cut short
};

// 4-bit codes of `count` lines into twice as many.
static inline void unpack(const uint8_t* from, int64_t count, bool symmetric, int8_t* to) {
  const __m512i nibble = _mm512_set1_epi8(15), offset = _mm512_set1_epi8(symmetric ? 8 : 0);
  for (int64_t i = 0; i < count; ++i) {
    const __m512i line = _mm512_loadu_si512(from + 64 * i);
    const __m512i high = _mm512_and_si512(_mm512_srli_epi16(line, 4), nibble);
    _mm512_storeu_si512(to + 128 * i, _mm512_sub_epi8(_mm512_and_si512(line, nibble), offset));
    _mm512_storeu_si512(to + 128 * i + 64, _mm512_sub_epi8(high, offset));
  }
}

static inline void prepare(const LinearGroupArgs& a, int64_t panel, Block& b) {
  const bool wide = a.codes == GroupCodes::kInt8, min = a.codes == GroupCodes::kInt4Min;
  const int64_t scale_bytes = a.channel_scale ? 0 : 16 * dtype_size(a.scale_type);
  const int64_t line_codes = wide ? 4 : 8, group_bytes = a.group / line_codes * 64;
  const int64_t before_lines = 2 * scale_bytes * (min ? 2 : 1), pair_bytes = before_lines + 2 * group_bytes;
  for (int64_t i = 0; i < b.count; ++i) {
    const int64_t g = b.first + i, k = a.k - g * a.group < a.group ? a.k - g * a.group : a.group;
    const int64_t lines = (k + line_codes - 1) / line_codes;
    const uint8_t* pair = linear_group_panel(a, panel) + g / 2 * pair_bytes;
    // A last group that stands alone has its lines only, in the same place.
    const uint8_t* w = pair + before_lines + g % 2 * group_bytes;
    int8_t* codes = b.codes[i * a.group];
    b.lines[i] = codes;
    if (k < a.group) memset(codes, 0, size_t(16 * a.group));
    if (!wide) {
      unpack(w, lines, !min, codes);
    } else if (k < a.group) {
      memcpy(codes, w, size_t(64 * lines));
    } else {
      b.lines[i] = reinterpret_cast<const int8_t*>(w);
    }
    if (a.channel_scale) continue;
    store(b.scale[i], linear_group_load(a.scale_type, pair + g % 2 * scale_bytes));
    if (min) store(b.min[i], linear_group_load(a.scale_type, pair + (2 + g % 2) * scale_bytes));
  }
}

// sums = the group's. kSteps: tiles of k in a group.
template <int kTurn, int kSteps>
[[gnu::always_inline]] static inline void multiply(const int8_t* x, int64_t x_stride, const int8_t* lines,
                                                   int32_t (&sums)[kRowTile][16]) {
  constexpr int kA = 4 + kTurn, kB = 6 + kTurn;
  tile_zero<kTurn>();
  TLE_UNROLL for (int i = 0; i < kSteps; ++i) {
    tile_load<kB>(lines + 1024 * i, 64);
    tile_load<kA>(x + 64 * i, x_stride);
    tile_dot<kTurn, kA, kB>();
  }
  tile_store<kTurn>(sums, 64);
}

// Up to kRows rows of that block of k. Rows up to the end of a tile are there: zeros.
struct Rows {
  const int8_t* x[kRows / kRowTile];  // of each tile
  int64_t x_stride[kRows / kRowTile];
  float scale[kRows][kBlockGroups], sum[kRows][kBlockGroups];
  alignas(64) int8_t copy[kRows][kBlock];  // of tiles that lack rows, or whose last group is cut short
};

static inline void prepare(const LinearGroupArgs& a, int64_t row, int64_t rows, int64_t first, int64_t count,
                           Rows& to) {
  const int64_t groups = linear_group_groups(a), k = first * a.group;
  const int64_t width = a.k - k < count * a.group ? a.k - k : count * a.group;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t from = (row + r) * groups + first;
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
      store(to.scale[r] + i, load(a.x_scale + from + i));
      store(to.sum[r] + i, to_float(i32x16{_mm512_loadu_si512(a.x_sum + from + i)}));
    }
    for (; i < count; ++i) {
      to.scale[r][i] = a.x_scale[from + i];
      to.sum[r][i] = float(a.x_sum[from + i]);
    }
  }
  for (int64_t tile = 0; kRowTile * tile < rows; ++tile) {
    const int64_t begin = kRowTile * tile, end = rows < begin + kRowTile ? rows : begin + kRowTile;
    const int8_t* x = a.x + (row + begin) * a.x_stride + k;
    to.x[tile] = x;
    to.x_stride[tile] = a.x_stride;
    if (end == begin + kRowTile && width == count * a.group) continue;
    memset(to.copy[begin], 0, sizeof(to.copy[0]) * kRowTile);
    for (int64_t r = begin; r < end; ++r) memcpy(to.copy[r], x + (r - begin) * a.x_stride, size_t(width));
    to.x[tile] = to.copy[begin];
    to.x_stride[tile] = kBlock;
    for (int64_t r = end; r < begin + kRowTile; ++r) {
      memset(to.scale[r], 0, sizeof(to.scale[r]));
      memset(to.sum[r], 0, sizeof(to.sum[r]));
    }
  }
}

// acc += group i's sums. x_scale, x_sum: that group's of the first row.
template <bool kChannelScale, bool kMin>
[[gnu::always_inline]] static inline void add_sums(const Block& b, int64_t i, const float* x_scale, const float* x_sum,
                                                   const int32_t (&sums)[kRowTile][16], __m512 (&acc)[kRowTile]) {
  __asm__("" : "+r"(x_scale), "+r"(x_sum));  // one address for all rows, not one for each
  const __m512 w_scale = kChannelScale ? _mm512_setzero_ps() : _mm512_load_ps(b.scale[i]);
  const __m512 w_min = kMin ? _mm512_load_ps(b.min[i]) : _mm512_setzero_ps();
  TLE_UNROLL for (int64_t r = 0; r < kRowTile; ++r) {
    const __m512 scale = _mm512_set1_ps(x_scale[r * kBlockGroups]);
    const __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(sums[r]));
    acc[r] = _mm512_fmadd_ps(sum, kChannelScale ? scale : _mm512_mul_ps(scale, w_scale), acc[r]);
    if constexpr (kMin)
      acc[r] = _mm512_fmadd_ps(_mm512_set1_ps(x_sum[r * kBlockGroups]), _mm512_mul_ps(scale, w_min), acc[r]);
    TLE_IN_REGISTER(acc[r]);
  }
}

// to += a tile of rows times the block. A group's sums are computed while those of the one before are added.
template <bool kChannelScale, bool kMin, int kSteps>
static void add_block(const Block& b, const Rows& rows, int64_t group, int64_t tile, float (*to)[16]) {
  alignas(64) int32_t sums[2][kRowTile][16];
  const int8_t* x = rows.x[tile];
  const int64_t x_stride = rows.x_stride[tile];
  const float *x_scale = rows.scale[kRowTile * tile], *x_sum = rows.sum[kRowTile * tile];
  __m512 acc[kRowTile];
  TLE_UNROLL for (int64_t r = 0; r < kRowTile; ++r) acc[r] = _mm512_load_ps(to[r]);
  multiply<0, kSteps>(x, x_stride, b.lines[0], sums[0]);
  int64_t i = 0;
  for (; i + 2 < b.count; i += 2) {
    multiply<1, kSteps>(x + (i + 1) * group, x_stride, b.lines[i + 1], sums[1]);
    add_sums<kChannelScale, kMin>(b, i, x_scale + i, x_sum + i, sums[0], acc);
    multiply<0, kSteps>(x + (i + 2) * group, x_stride, b.lines[i + 2], sums[0]);
    add_sums<kChannelScale, kMin>(b, i + 1, x_scale + i + 1, x_sum + i + 1, sums[1], acc);
  }
  if (i + 2 == b.count) multiply<1, kSteps>(x + (i + 1) * group, x_stride, b.lines[i + 1], sums[1]);
  add_sums<kChannelScale, kMin>(b, i, x_scale + i, x_sum + i, sums[0], acc);
  if (i + 2 == b.count) add_sums<kChannelScale, kMin>(b, i + 1, x_scale + i + 1, x_sum + i + 1, sums[1], acc);
  TLE_UNROLL for (int64_t r = 0; r < kRowTile; ++r) _mm512_store_ps(to[r], acc[r]);
}

template <bool kChannelScale, bool kMin>
static void add_block(const Block& b, const Rows& rows, int64_t group, int64_t tile, float (*to)[16]) {
  if (group == 128) {
    add_block<kChannelScale, kMin, 2>(b, rows, group, tile, to);
  } else {
    add_block<kChannelScale, kMin, 1>(b, rows, group, tile, to);
  }
}

// Up to kRows rows times up to kPanels panels.
static void multiply_panels(const LinearGroupArgs& a, int64_t row, int64_t rows, int64_t panel, int64_t panels) {
  alignas(64) float acc[kPanels][kRows][16];
  Rows of_x;
  Block b;
  memset(acc, 0, sizeof(acc[0]) * size_t(panels));
  const int64_t groups = linear_group_groups(a), most = kBlock / a.group;
  for (b.first = 0; b.first < groups; b.first += most) {
    b.count = groups - b.first < most ? groups - b.first : most;
    prepare(a, row, rows, b.first, b.count, of_x);
    for (int64_t p = 0; p < panels; ++p) {
      prepare(a, panel + p, b);
      for (int64_t tile = 0; kRowTile * tile < rows; ++tile) {
        float (*to)[16] = acc[p] + kRowTile * tile;
        if (a.channel_scale) {
          add_block<true, false>(b, of_x, a.group, tile, to);
        } else if (a.codes == GroupCodes::kInt4Min) {
          add_block<false, true>(b, of_x, a.group, tile, to);
        } else {
          add_block<false, false>(b, of_x, a.group, tile, to);
        }
      }
    }
  }
  for (int64_t p = 0; p < panels; ++p)
    for (int64_t r = 0; r < rows; ++r) linear_group_store(a, row + r, panel + p, load(acc[p][r]));
}

}  // namespace

void linear_group_amx(const LinearGroupArgs& a) {
  if (a.rows <= 8) return linear_group_vnni(a);  // bound by memory
  TileConfig config;
  const int64_t step = a.group < 64 ? a.group : 64;
  for (int turn = 0; turn < 2; ++turn) {
    config.tile(turn, kRowTile, 64);
    config.tile(4 + turn, kRowTile, step);
    config.tile(6 + turn, step / 4, 64);
  }
  tiles_configure(config);
  const int64_t panels = linear_group_panels(a);
  for (int64_t row = 0; row < a.rows; row += kRows)
    for (int64_t panel = 0; panel < panels; panel += kPanels)
      multiply_panels(a, row, a.rows - row < kRows ? a.rows - row : kRows, panel,
                      panels - panel < kPanels ? panels - panel : kPanels);
  tiles_release();
}

}  // namespace tle
