// How many threads are worth starting: which cores this process may use, which of them are performance cores, and how
// much processor time its cgroup grants.
#pragma once

#include <string>
#include <vector>

namespace tle::topology {

// Where to look. The defaults are the running system; tests point root at a tree of their own.
struct System {
  std::string root;                // prefix of /sys and /proc
  std::vector<int> affinity = {};  // empty: ask sched_getaffinity
};

// Usable cores, at least 1: those of the affinity mask whose cpu_capacity (or, without it, cpuinfo_max_freq) is at
// least 3/5 of the largest, no more than the cgroup's cpu quota rounded down (version 2 and 1). SMT siblings count
// once: two threads of one core share its load and arithmetic ports.
int usable_cores(const System& system);

}  // namespace tle::topology
