// Reading weights ahead.
#pragma once

#include <stdint.h>

namespace tle {
namespace {

// Weights are read once, in order. One core has too few outstanding L1 misses for that to reach the speed of its
// memory, and the hardware's prefetching into L2 stops short, most of all while other cores read too. The hint asks for
// L2 only (locality 2), which leaves the L1 miss buffers to the loads. 5 KiB ahead: on Zen 4 with a busy neighbour one
// row of w8a8 reads at 72-80 % of a plain loop's speed without it or with a hint into L1, at 78-84 % 4 KiB ahead, at
// 87-92 % 5 to 6 KiB ahead and at 78 % from 8 KiB on; alone at 97-99 %.
static inline void prefetch_weights(const uint8_t* p) { __builtin_prefetch(p + 5120, 0, 2); }

}  // namespace
}  // namespace tle
