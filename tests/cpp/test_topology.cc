// usable_cores against trees of /sys and /proc that the tests make: the boards and servers that the project is for.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <vector>

#include "csrc/runtime/topology.h"

namespace tle::topology {
namespace {

class Topology : public testing::Test {
 protected:
  Topology() {
    std::string pattern = testing::TempDir() + "tle_topology_XXXXXX";
    root_ = mkdtemp(pattern.data());
  }
  ~Topology() override { std::filesystem::remove_all(root_); }

  void write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text << "\n";
  }
  void cpu(int id, const std::string& file, const std::string& text) {
    write("/sys/devices/system/cpu/cpu" + std::to_string(id) + "/" + file, text);
  }
  int cores(std::vector<int> affinity) { return usable_cores({root_, std::move(affinity)}); }
  static std::vector<int> first(int n) {
    std::vector<int> ids(static_cast<size_t>(n));
    std::iota(ids.begin(), ids.end(), 0);
    return ids;
  }

  std::string root_;
};

TEST_F(Topology, CixP1InterleavesBigMediumAndLittleCores) {
  // 12 cores: A720 at two clocks and four A520, ids in no order of strength.
  const int capacity[12] = {1024, 279, 279, 279, 279, 905, 905, 866, 866, 984, 984, 1024};
  for (int i = 0; i < 12; ++i) cpu(i, "cpu_capacity", std::to_string(capacity[i]));
  EXPECT_EQ(cores(first(12)), 8);
  EXPECT_EQ(cores({0, 1, 2, 5}), 2);   // what an affinity mask leaves
  EXPECT_EQ(cores({1, 2, 3, 4}), 4);   // only little cores are allowed: then those
}

TEST_F(Topology, Rk3588HasFourBigAndFourLittleCores) {
  for (int i = 0; i < 8; ++i) cpu(i, "cpu_capacity", i < 4 ? "530" : "1024");
  EXPECT_EQ(cores(first(8)), 4);
}

TEST_F(Topology, ClockRatesStandInWhereCapacityIsMissing) {
  for (int i = 0; i < 8; ++i) cpu(i, "cpufreq/cpuinfo_max_freq", i < 4 ? "1008000" : "2400000");
  EXPECT_EQ(cores(first(8)), 4);
}

TEST_F(Topology, RaspberryPi5AndGravitonUseAllCores) {
  for (int i = 0; i < 4; ++i) cpu(i, "cpufreq/cpuinfo_max_freq", "2400000");
  EXPECT_EQ(cores(first(4)), 4);
  EXPECT_EQ(usable_cores({root_ + "/nothing_here", first(64)}), 64);
}

TEST_F(Topology, SmtSiblingsCountOnce) {
  for (int i = 0; i < 8; ++i)
    cpu(i, "topology/thread_siblings_list", std::to_string(i % 4) + "," + std::to_string(i % 4 + 4));
  EXPECT_EQ(cores(first(8)), 4);
  EXPECT_EQ(cores({0, 4}), 1);
}

TEST_F(Topology, CgroupV2QuotaLimits) {
  write("/proc/self/cgroup", "0::/app/worker");
  write("/sys/fs/cgroup/app/worker/cpu.max", "max 100000");
  EXPECT_EQ(cores(first(8)), 8);
  write("/sys/fs/cgroup/app/cpu.max", "350000 100000");  // the parent's, rounded down
  EXPECT_EQ(cores(first(8)), 3);
  write("/sys/fs/cgroup/app/worker/cpu.max", "50000 100000");
  EXPECT_EQ(cores(first(8)), 1);
}

TEST_F(Topology, CgroupV1QuotaLimits) {
  write("/proc/self/cgroup", "4:memory:/x\n3:cpu,cpuacct:/box");
  write("/sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", "200000");
  write("/sys/fs/cgroup/cpu/box/cpu.cfs_period_us", "100000");
  EXPECT_EQ(cores(first(8)), 2);
  write("/sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", "-1");
  EXPECT_EQ(cores(first(8)), 8);
}

TEST_F(Topology, GarbageIsIgnored) {
  write("/proc/self/cgroup", "nonsense");
  write("/sys/fs/cgroup/cpu.max", "many");
  for (int i = 0; i < 2; ++i) cpu(i, "cpu_capacity", "unknown");
  EXPECT_EQ(cores(first(2)), 2);
}

TEST(TopologyOfThisMachine, HasAtLeastOneCore) { EXPECT_GE(usable_cores({}), 1); }

}  // namespace
}  // namespace tle::topology
