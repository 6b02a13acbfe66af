// The machine's own measure: how fast a plain loop reads memory.
#pragma once

#include <stdint.h>

#include <vector>

namespace tle {

// Bytes per second at which the team's threads read a buffer of `bytes` bytes, for each of `repeats` passes. The buffer
// is written first, so that its pages exist. For memory, and not a cache, bytes should be several times the last-level
// cache.
std::vector<double> read_bandwidth(int64_t bytes, int repeats);

}  // namespace tle
