// AMX: a panel's lines are the rows of a tile as they lie. Two tiles of 16 rows of x times two panels: four sums for
// four loads.
#include "csrc/kernels/common/lanes_avx512.h"
#include "csrc/kernels/common/tiles_amx.h"
#include "csrc/kernels/linear_w8/linear_w8_epilogue.h"

namespace tle {
namespace {

// Sums are tiles 0 to 3 (2 row tile + panel), rows of x 4 and 5, lines 6 and 7.
constexpr int64_t kRowTile = 16, kStepLines = 16, kStepBytes = 64;  // k: a line has 4 of a row's bytes

// The last lines, if they are no whole step, with zeros behind them.
template <int kRowTiles, int kPanels>
struct Tail {
  alignas(64) int8_t x[kRowTiles][kRowTile][kStepBytes];
  alignas(64) uint8_t w[kPanels][kStepLines][64];
};

template <int kRowTiles, int kPanels>
static inline void step(const int8_t* const (&x)[kRowTiles], int64_t x_stride, const uint8_t* const (&w)[kPanels]) {
  tile_load<6>(w[0], 64);
  if constexpr (kPanels == 2) tile_load<7>(w[1], 64);
  tile_load<4>(x[0], x_stride);
  tile_dot<0, 4, 6>();
  if constexpr (kPanels == 2) tile_dot<1, 4, 7>();
  if constexpr (kRowTiles == 2) {
    tile_load<5>(x[1], x_stride);
    tile_dot<2, 5, 6>();
    if constexpr (kPanels == 2) tile_dot<3, 5, 7>();
  }
}

// `rows` rows, as many as the tiles are configured for, times kPanels panels.
template <int kRowTiles, int kPanels>
static inline void block(const LinearW8Args& a, int64_t row, int64_t rows, int64_t panel) {
  const int8_t* x[kRowTiles];
  const uint8_t* w[kPanels];
  for (int i = 0; i < kRowTiles; ++i) x[i] = a.x + (row + kRowTile * i) * a.x_stride;
  for (int p = 0; p < kPanels; ++p) w[p] = linear_w8_panel(a, panel + p);

  tile_zero<0>();
  if constexpr (kPanels == 2) tile_zero<1>();
  if constexpr (kRowTiles == 2) {
    tile_zero<2>();
    if constexpr (kPanels == 2) tile_zero<3>();
  }
  int64_t lines = a.lines;
  for (; lines >= kStepLines; lines -= kStepLines) {
    step<kRowTiles, kPanels>(x, a.x_stride, w);
    for (const int8_t*& p : x) p += kStepBytes;
    for (const uint8_t*& p : w) p += 64 * kStepLines;
  }
  if (lines > 0) {
    Tail<kRowTiles, kPanels> tail;
    memset(&tail, 0, sizeof(tail));
    for (int64_t r = 0; r < rows; ++r)
      memcpy(tail.x[r / kRowTile][r % kRowTile], x[0] + r * a.x_stride, size_t(4 * lines));
    for (int p = 0; p < kPanels; ++p) memcpy(tail.w[p], w[p], size_t(64 * lines));
    for (int i = 0; i < kRowTiles; ++i) x[i] = tail.x[i][0];
    for (int p = 0; p < kPanels; ++p) w[p] = tail.w[p][0];
    step<kRowTiles, kPanels>(x, kStepBytes, w);
  }

  alignas(64) int32_t sums[kPanels][kRowTiles * kRowTile][16];
  tile_store<0>(sums[0][0], 64);
  if constexpr (kPanels == 2) tile_store<1>(sums[1][0], 64);
  if constexpr (kRowTiles == 2) {
    tile_store<2>(sums[0][kRowTile], 64);
    if constexpr (kPanels == 2) tile_store<3>(sums[1][kRowTile], 64);
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int p = 0; p < kPanels; ++p) linear_w8_store(a, row + r, panel + p, {_mm512_load_si512(sums[p][r])});
}

template <int kRowTiles>
static inline void rows_of_blocks(const LinearW8Args& a, int64_t row, int64_t rows) {
  TileConfig config;
  for (int i = 0; i < kRowTiles; ++i) {
    const int64_t of_tile = rows - kRowTile * i < kRowTile ? rows - kRowTile * i : kRowTile;
    config.tile(2 * i, of_tile, 64);
    config.tile(2 * i + 1, of_tile, 64);
    config.tile(4 + i, of_tile, kStepBytes);
  }
  config.tile(6, kStepLines, 64);
  config.tile(7, kStepLines, 64);
  tiles_configure(config);
  const int64_t panels = linear_w8_panels(a);
  int64_t panel = 0;
  for (; panel + 2 <= panels; panel += 2) block<kRowTiles, 2>(a, row, rows, panel);
  if (panel < panels) block<kRowTiles, 1>(a, row, rows, panel);
}

}  // namespace

void linear_w8_amx(const LinearW8Args& a) {
  if (a.rows <= 8) return linear_w8_vnni(a);  // bound by memory
  int64_t row = 0;
  for (; row + kRowTile < a.rows; row += 2 * kRowTile) {
    const int64_t left = a.rows - row;
    rows_of_blocks<2>(a, row, left < 2 * kRowTile ? left : 2 * kRowTile);
  }
  if (row < a.rows) rows_of_blocks<1>(a, row, a.rows - row);
  tiles_release();
}

}  // namespace tle
