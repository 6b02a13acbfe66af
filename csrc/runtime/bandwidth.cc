#include "csrc/runtime/bandwidth.h"

#include <string.h>

#include <algorithm>
#include <chrono>
#include <memory>

#include "csrc/runtime/cpu.h"
#include "csrc/runtime/huge_pages.h"
#include "csrc/runtime/threads.h"

namespace tle {

namespace {

constexpr int64_t kUnit = 256 * 1024;

typedef uint64_t Line __attribute__((vector_size(64)));
typedef uint64_t ReadFn(const Line* lines, int64_t count);  // their exclusive or

// As wide as the CPU reads: 16 bytes at a time reach half of what 64 do where few loads wait at once (Intel). kHints:
// every line is asked for ahead, which some CPUs' own prefetching makes needless and others need.
template <bool kHints>
[[gnu::always_inline]] inline uint64_t read_lines(const Line* lines, int64_t count) {
  Line sums[4] = {};
  int64_t i = 0;
  for (; i + 4 <= count; i += 4)
    for (int j = 0; j < 4; ++j) {
      if (kHints) __builtin_prefetch(reinterpret_cast<const char*>(lines + i + j) + 4096);
      sums[j] ^= lines[i + j];
    }
  for (; i < count; ++i) sums[0] ^= lines[i];
  const Line sum = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
  return sum[0] ^ sum[1] ^ sum[2] ^ sum[3] ^ sum[4] ^ sum[5] ^ sum[6] ^ sum[7];
}

template <bool kHints>
uint64_t read_baseline(const Line* lines, int64_t count) { return read_lines<kHints>(lines, count); }
#if defined(__x86_64__)
template <bool kHints>
[[gnu::target("avx2")]] uint64_t read_avx2(const Line* lines, int64_t count) {
  return read_lines<kHints>(lines, count);
}
template <bool kHints>
[[gnu::target("avx512f")]] uint64_t read_avx512(const Line* lines, int64_t count) {
  return read_lines<kHints>(lines, count);
}
#endif

template <bool kHints>
ReadFn* widest_read() {
#if defined(__x86_64__)
  if (cpu_supports(Isa::kAvx512)) return read_avx512<kHints>;
  if (cpu_supports(Isa::kAvx2)) return read_avx2<kHints>;
#endif
  return read_baseline<kHints>;
}

struct Context {
  const Line* lines;
  int64_t count;
  ReadFn* read;
};

void read_unit(const void* p, int64_t unit, int) {
  const Context& c = *static_cast<const Context*>(p);
  const int64_t first = unit * (kUnit / 64);
  const uint64_t sum = c.read(c.lines + first, std::min(kUnit / 64, c.count - first));
  __asm__ volatile("" : : "r"(sum));  // what is read must be used
}

}  // namespace

void read_memory(const void* data, int64_t bytes, bool hints) {
  const Context context = {static_cast<const Line*>(data), bytes / 64,
                           hints ? widest_read<true>() : widest_read<false>()};
  const Stage stage = {read_unit, &context, (bytes + kUnit - 1) / kUnit};
  run_stages(&stage, 1, bytes, num_threads());
}

std::vector<double> read_bandwidth(int64_t bytes, int repeats) {
  bytes = std::max<int64_t>(64, bytes / 64 * 64);
  // In the memory that weights get.
  const HugeBlock block = allocate_huge(bytes, Arena::kWeights);
  const auto release = [](const HugeBlock* b) { free_huge(*b); };
  const std::unique_ptr<const HugeBlock, decltype(release)> owner(&block, release);
  memset(block.data, 1, size_t(bytes));
  std::vector<double> found;
  for (int i = 0; i < repeats; ++i) {
    double fastest = 0;
    for (bool hints : {false, true}) {
      const auto start = std::chrono::steady_clock::now();
      read_memory(block.data, bytes, hints);
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
      fastest = std::max(fastest, double(bytes) / seconds.count());
    }
    found.push_back(fastest);
  }
  return found;
}

}  // namespace tle
