#include "csrc/runtime/bandwidth.h"

#include <string.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>

#include "csrc/runtime/huge_pages.h"
#include "csrc/runtime/threads.h"

namespace tle {

namespace {

constexpr int64_t kUnit = 1 << 20;

struct Context {
  const uint64_t* words;
  std::atomic<uint64_t>* sink;  // what is read must be used
};

void read_unit(const void* p, int64_t unit, int) {
  const Context& c = *static_cast<const Context*>(p);
  const uint64_t* w = c.words + unit * (kUnit / 8);
  uint64_t sum[8] = {};
  for (int64_t i = 0; i < kUnit / 8; i += 8)
    for (int j = 0; j < 8; ++j) sum[j] ^= w[i + j];
  c.sink->fetch_xor(sum[0] ^ sum[1] ^ sum[2] ^ sum[3] ^ sum[4] ^ sum[5] ^ sum[6] ^ sum[7], std::memory_order_relaxed);
}

}  // namespace

std::vector<double> read_bandwidth(int64_t bytes, int repeats) {
  const int64_t units = std::max<int64_t>(1, bytes / kUnit);
  // In the memory that weights get.
  const HugeBlock block = allocate_huge(units * kUnit, Arena::kWeights);
  const auto release = [](const HugeBlock* b) { free_huge(*b); };
  const std::unique_ptr<const HugeBlock, decltype(release)> owner(&block, release);
  memset(block.data, 1, size_t(units * kUnit));
  std::atomic<uint64_t> sink{0};
  const Context context = {static_cast<const uint64_t*>(block.data), &sink};
  const Stage stage = {read_unit, &context, units};
  std::vector<double> found;
  for (int i = 0; i < repeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    run_stages(&stage, 1, units * kUnit, num_threads());
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    found.push_back(double(units * kUnit) / seconds.count());
  }
  return found;
}

}  // namespace tle
