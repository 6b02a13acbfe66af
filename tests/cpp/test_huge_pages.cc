#include <gtest/gtest.h>

#include <stdint.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "csrc/runtime/huge_pages.h"

namespace tle::test {
namespace {

constexpr int64_t kMega = 1 << 20;

bool all_bytes(const HugeBlock& b, uint8_t value) {
  const uint8_t* p = static_cast<const uint8_t*>(b.data);
  for (int64_t i = 0; i < b.bytes; ++i)
    if (p[i] != value) return false;
  return true;
}

TEST(HugePages, BlocksAreZeroedAlignedAndApart) {
  std::vector<HugeBlock> blocks;
  for (int64_t bytes : {int64_t(1), int64_t(65), 3 * kMega + 7, 20 * kMega, 15 * kMega, 15 * kMega, int64_t(0)})
    for (Arena arena : {Arena::kWeights, Arena::kCache}) blocks.push_back(allocate_huge(bytes, arena));
  for (const HugeBlock& b : blocks) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(b.data) % 64, 0u);
    EXPECT_TRUE(all_bytes(b, 0));
  }
  for (size_t i = 0; i < blocks.size(); ++i) memset(blocks[i].data, int(i + 1), size_t(blocks[i].bytes));
  for (size_t i = 0; i < blocks.size(); ++i) EXPECT_TRUE(all_bytes(blocks[i], uint8_t(i + 1))) << i;
  for (const HugeBlock& b : blocks) free_huge(b);
}

TEST(HugePages, FreeingABlockLeavesItsNeighbours) {
  HugeBlock a = allocate_huge(kMega + 64, Arena::kWeights), b = allocate_huge(9 * kMega, Arena::kWeights),
            c = allocate_huge(kMega + 64, Arena::kWeights);
  memset(a.data, 1, size_t(a.bytes));
  memset(b.data, 2, size_t(b.bytes));
  memset(c.data, 3, size_t(c.bytes));
  free_huge(b);
  EXPECT_TRUE(all_bytes(a, 1));
  EXPECT_TRUE(all_bytes(c, 3));
  // What was freed is not given out again while its region lives: a new block is zeroed.
  const HugeBlock d = allocate_huge(2 * kMega, Arena::kWeights);
  EXPECT_TRUE(all_bytes(d, 0));
  for (const HugeBlock& x : {a, c, d}) free_huge(x);
}

// Blocks share the page at which their region's next block begins.
TEST(HugePages, ABlockAfterFreedOnesIsZeroed) {
  const HugeBlock stays = allocate_huge(3 * kMega, Arena::kCache);
  memset(stays.data, 1, size_t(stays.bytes));
  for (int64_t bytes : {int64_t(100), kMega / 2, 2 * kMega, 5 * kMega + 64, 3 * kMega}) {
    const HugeBlock passes = allocate_huge(bytes, Arena::kCache);
    EXPECT_TRUE(all_bytes(passes, 0));
    memset(passes.data, 2, size_t(bytes));
    free_huge(passes);
  }
  EXPECT_TRUE(all_bytes(stays, 1));
  free_huge(stays);
}

// Forks while other threads are inside: the child must not wait for them.
TEST(HugePages, AForkedChildAllocates) {
  const HugeBlock stays = allocate_huge(64, Arena::kWeights);  // else each block has a region of its own
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t)
    threads.emplace_back([&] {
      while (!stop) free_huge(allocate_huge(64, Arena::kWeights));
    });
  for (int i = 0; i < 20; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(600);  // a child that hangs dies of it
      free_huge(allocate_huge(64, Arena::kWeights));
      _exit(0);
    }
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    if (status != 0) break;
  }
  stop = true;
  for (std::thread& t : threads) t.join();
  free_huge(stays);
}

TEST(HugePages, AnyThreadAllocatesAndFrees) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([t] {
      for (int i = 0; i < 50; ++i) {
        const HugeBlock b = allocate_huge(100'000 * (1 + t), Arena(t % 2));
        memset(b.data, t + 1, size_t(b.bytes));
        EXPECT_TRUE(all_bytes(b, uint8_t(t + 1)));
        free_huge(b);
      }
    });
  for (std::thread& t : threads) t.join();
}

TEST(HugePages, AdviceDoesNotChangeWhatIsThere) {
  std::vector<uint8_t> bytes(5 * kMega + 3, 7);
  advise_huge(bytes.data(), int64_t(bytes.size()));
  advise_huge(bytes.data() + 1, 100);
  advise_huge(nullptr, 0);
  EXPECT_EQ(bytes, std::vector<uint8_t>(5 * kMega + 3, 7));
}

}  // namespace
}  // namespace tle::test
