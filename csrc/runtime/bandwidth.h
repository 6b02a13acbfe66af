// The machine's own measure: how fast a loop that does nothing else reads memory.
#pragma once

#include <stdint.h>

#include <vector>

namespace tle {

// Reads `bytes` bytes, a multiple of 64, with the team's threads and the widest loads that the CPU has. hints: every
// line is asked for ahead, which some CPUs need and others do not (weight_hints_pay()).
void read_memory(const void* data, int64_t bytes, bool hints);

// Bytes per second of read_memory for a buffer of `bytes` bytes, for each of `repeats` passes: with hints or without,
// as is faster. The buffer is written first, so that its pages exist. It is the speed of memory if bytes are several
// times the last-level cache, and otherwise that of a loop over the same bytes again and again, as decoding is one.
std::vector<double> read_bandwidth(int64_t bytes, int repeats);

}  // namespace tle
