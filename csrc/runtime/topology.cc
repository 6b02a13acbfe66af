#include "csrc/runtime/topology.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <set>
#include <sstream>

namespace tle::topology {

namespace {

bool read_line(const std::string& path, std::string& line) {
  std::ifstream file(path);
  return bool(std::getline(file, line));
}

// A number in a file, or -1.
double read_number(const std::string& path) {
  std::string line;
  if (!read_line(path, line)) return -1;
  try {
    return std::stod(line);
  } catch (const std::exception&) {
    return -1;
  }
}

std::vector<int> affinity_of_process() {
  std::vector<int> cpus;
  for (int size = 1024; size <= 1 << 20; size *= 2) {
    cpu_set_t* set = CPU_ALLOC(size_t(size));
    const size_t bytes = CPU_ALLOC_SIZE(size_t(size));
    CPU_ZERO_S(bytes, set);
    const bool fits = sched_getaffinity(0, bytes, set) == 0;
    if (fits)
      for (int cpu = 0; cpu < size; ++cpu)
        if (CPU_ISSET_S(size_t(cpu), bytes, set)) cpus.push_back(cpu);
    CPU_FREE(set);
    if (fits) break;
  }
  return cpus;
}

// The cgroup path of this process for a version 1 controller, or for version 2 (controller empty).
std::string cgroup_path(const System& system, const std::string& controller) {
  std::ifstream file(system.root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const size_t a = line.find(':'), b = line.find(':', a + 1);
    if (a == std::string::npos || b == std::string::npos) continue;
    std::stringstream names(line.substr(a + 1, b - a - 1));
    const std::string path = line.substr(b + 1);
    if (controller.empty() && b == a + 1) return path;
    for (std::string name; std::getline(names, name, ',');)
      if (!controller.empty() && name == controller) return path;
  }
  return "";
}

// The tightest quota on the way from the process's group to the root, in cores; infinity without one.
double cgroup_quota(const System& system) {
  double quota = INFINITY;
  auto walk = [&](const std::string& mount, std::string path, auto&& read) {
    for (;;) {
      quota = std::min(quota, read(mount + (path == "/" ? "" : path)));
      if (path.empty() || path == "/") break;
      path = path.substr(0, path.rfind('/'));
    }
  };
  walk(system.root + "/sys/fs/cgroup", cgroup_path(system, ""), [](const std::string& group) {
    std::string line, max;
    double period = 0;
    if (!read_line(group + "/cpu.max", line)) return double(INFINITY);
    std::stringstream fields(line);
    if (!(fields >> max >> period) || max == "max" || period <= 0) return double(INFINITY);
    return std::stod(max) / period;
  });
  walk(system.root + "/sys/fs/cgroup/cpu", cgroup_path(system, "cpu"), [](const std::string& group) {
    const double us = read_number(group + "/cpu.cfs_quota_us"), period = read_number(group + "/cpu.cfs_period_us");
    return us > 0 && period > 0 ? us / period : double(INFINITY);
  });
  return quota;
}

}  // namespace

int usable_cores(const System& system) {
  const std::vector<int> cpus = system.affinity.empty() ? affinity_of_process() : system.affinity;
  const std::string base = system.root + "/sys/devices/system/cpu/cpu";

  std::vector<double> strength;
  for (int cpu : cpus) {
    const std::string dir = base + std::to_string(cpu);
    double s = read_number(dir + "/cpu_capacity");
    if (s <= 0) s = read_number(dir + "/cpufreq/cpuinfo_max_freq");
    strength.push_back(s);
  }
  const double best = strength.empty() ? 0 : *std::max_element(strength.begin(), strength.end());

  std::set<std::string> cores;
  for (size_t i = 0; i < cpus.size(); ++i) {
    if (strength[i] > 0 && strength[i] < 0.6 * best) continue;
    std::string siblings;
    if (!read_line(base + std::to_string(cpus[i]) + "/topology/thread_siblings_list", siblings))
      siblings = std::to_string(cpus[i]);
    cores.insert(siblings);
  }
  const double quota = std::floor(cgroup_quota(system));
  const double count = std::min(double(cores.size()), quota);
  return std::max(1, int(count));
}

}  // namespace tle::topology
