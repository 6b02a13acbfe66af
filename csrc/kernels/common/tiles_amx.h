// AMX's tiles: eight of up to 16 rows of 64 bytes. c[m][n] += sum over k of a[m][4 k .. 4 k + 3] b[k][4 n .. 4 n + 3],
// signed bytes into 32 bits that wrap: b's rows are a packed panel's lines. Assembly and not intrinsics: GCC 12's do
// not tell the compiler what memory they read. tests/cpp/simde/tiles.h has the same functions in plain C++.
#pragma once

#include <stdint.h>
#include <string.h>

#include "csrc/kernels/common/registers.h"

namespace tle {
namespace {

// The operand of LDTILECFG.
struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void tile(int t, int64_t row_count, int64_t bytes) {
    rows[t] = uint8_t(row_count);
    row_bytes[t] = uint16_t(bytes);
  }
};
static_assert(sizeof(TileConfig) == 64);

#if !defined(TLE_TILES_EMULATED)

static inline void tiles_configure(const TileConfig& config) { __asm__ volatile("ldtilecfg %0" : : "m"(config)); }
// Without state in the tiles a change of threads has 8 KiB less to save.
static inline void tiles_release() { __asm__ volatile("tilerelease"); }

template <int kTile>
static inline void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

template <int kTile>
static inline void tile_load(const void* p, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
static inline void tile_store(void* p, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(kTile) : "memory");
}

template <int kC, int kA, int kB>
static inline void tile_dot() {
  __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

#endif

}  // namespace
}  // namespace tle
