// csrc/kernels/common/tiles_amx.h for CPUs without tiles.
#pragma once

#include <stdint.h>
#include <string.h>

#define TLE_TILES_EMULATED 1

namespace tle {
namespace {

struct TileConfig;

struct Tiles {
  uint8_t rows[8];
  uint16_t row_bytes[8];
  uint8_t bytes[8][16][64];
};
inline thread_local Tiles tiles;

// Takes the operand of LDTILECFG apart as the hardware does.
inline void tiles_configure(const TileConfig& config) {
  uint8_t operand[64];
  memcpy(operand, reinterpret_cast<const uint8_t*>(&config), 64);
  memset(&tiles, 0, sizeof(tiles));
  memcpy(tiles.row_bytes, operand + 16, sizeof(tiles.row_bytes));
  memcpy(tiles.rows, operand + 48, sizeof(tiles.rows));
}
inline void tiles_release() { memset(&tiles, 0, sizeof(tiles)); }

template <int kTile>
inline void tile_zero() {
  memset(tiles.bytes[kTile], 0, sizeof(tiles.bytes[kTile]));
}

template <int kTile>
inline void tile_load(const void* p, int64_t stride) {
  tile_zero<kTile>();
  for (int r = 0; r < tiles.rows[kTile]; ++r)
    memcpy(tiles.bytes[kTile][r], static_cast<const char*>(p) + r * stride, tiles.row_bytes[kTile]);
}

template <int kTile>
inline void tile_store(void* p, int64_t stride) {
  for (int r = 0; r < tiles.rows[kTile]; ++r)
    memcpy(static_cast<char*>(p) + r * stride, tiles.bytes[kTile][r], tiles.row_bytes[kTile]);
}

template <int kC, int kA, int kB>
inline void tile_dot() {
  for (int m = 0; m < tiles.rows[kC]; ++m)
    for (int k = 0; k < tiles.row_bytes[kA] / 4; ++k)
      for (int n = 0; n < tiles.row_bytes[kC] / 4; ++n) {
        uint32_t sum;  // wraps, as the hardware's does
        memcpy(&sum, tiles.bytes[kC][m] + 4 * n, 4);
        for (int i = 0; i < 4; ++i)
          sum += uint32_t(int8_t(tiles.bytes[kA][m][4 * k + i]) * int8_t(tiles.bytes[kB][k][4 * n + i]));
        memcpy(tiles.bytes[kC][m] + 4 * n, &sum, 4);
      }
}

}  // namespace
}  // namespace tle
