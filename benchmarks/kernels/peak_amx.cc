#include "benchmarks/kernels/peak.h"
#include "csrc/kernels/common/tiles_amx.h"

namespace tle::bench {

int64_t int8_peak_amx(int64_t rounds) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.tile(tile, 16, 64);
  tiles_configure(config);
  for (int64_t i = 0; i < rounds; ++i) {
    tile_dot<0, 4, 6>();
    tile_dot<1, 4, 7>();
    tile_dot<2, 5, 6>();
    tile_dot<3, 5, 7>();
  }
  tiles_release();
  return rounds * 4 * 16 * 16 * 64;
}

}  // namespace tle::bench
