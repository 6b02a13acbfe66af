// The machine's own measure: how fast a plain loop reads memory.
#pragma once

#include <stdint.h>

namespace tle {

// Bytes per second at which the team's threads read a buffer of `bytes` bytes once; the best of `repeats` passes. The
// buffer is written first, so that its pages exist. For memory, and not a cache, bytes should be several times the
// last-level cache.
double read_bandwidth(int64_t bytes, int repeats);

}  // namespace tle
