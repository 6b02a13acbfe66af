// Reading weights ahead.
#pragma once

#include <stdint.h>

namespace tle {
namespace {

// Weights are read once, in order. One core has too few outstanding L1 misses for that to reach the speed of its memory, and the hardware's
// prefetching into L2 stops short. The hint asks for L2 only (locality 2), which leaves the L1 miss buffers to the loads: on Zen 4 one row reads
// at 72-80 % of a plain loop's speed without it or with a hint into L1, and at 90-95 % with it, 4 KiB ahead (1 to 3 KiB: 82-90 %).
static inline void prefetch_weights(const uint8_t* p) { __builtin_prefetch(p + 4096, 0, 2); }

}  // namespace
}  // namespace tle
