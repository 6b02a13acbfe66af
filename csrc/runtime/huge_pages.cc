#include "csrc/runtime/huge_pages.h"

#include <pthread.h>
#include <stddef.h>
#include <sys/mman.h>

#include <mutex>
#include <new>
#include <vector>

namespace tle {

namespace {

constexpr int64_t kHugePage = 2 << 20;
constexpr int64_t kRegion = 64 << 20;
// Blocks from here on have a region for themselves, which ends with them: their last huge page would be half empty, and
// is small pages instead, on average a sixteenth of the block at most.
constexpr int64_t kOwnRegion = kRegion / 4;
#ifndef MADV_COLLAPSE
constexpr int MADV_COLLAPSE = 25;  // Linux 6.1; newer than Debian 12's headers
#endif

// To a whole huge page.
char* rounded_down(uintptr_t p) { return reinterpret_cast<char*>(p / kHugePage * kHugePage); }
char* rounded_up(uintptr_t p) { return rounded_down(p + kHugePage - 1); }

struct Region {
  char *mapping, *begin, *next, *end;  // next: the first byte that was never given out
  size_t mapped;
  int64_t blocks = 0;
  std::vector<int32_t> blocks_on;  // each of its huge pages

  explicit Region(int64_t bytes)
      : mapped(size_t(bytes + kHugePage)), blocks_on(size_t((bytes + kHugePage - 1) / kHugePage)) {
    void* p = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    mapping = static_cast<char*>(p);
    begin = next = rounded_up(reinterpret_cast<uintptr_t>(p));
    end = begin + bytes;
    madvise(begin, size_t(bytes), MADV_HUGEPAGE);
  }
  Region(const Region&) = delete;
  ~Region() { munmap(mapping, mapped); }

  char* take(int64_t size) {
    char* block = next;
    next += size;
    ++blocks;
    for (int64_t page = page_of(block); page <= page_of(block + size - 1); ++page) ++blocks_on[size_t(page)];
    return block;
  }

  // The huge pages on which this was the last block go back to the system, which gives zeros where more is taken there.
  void give_back(char* block, int64_t size) {
    --blocks;
    for (int64_t page = page_of(block); page <= page_of(block + size - 1); ++page)
      if (--blocks_on[size_t(page)] == 0) madvise(begin + page * kHugePage, size_t(kHugePage), MADV_DONTNEED);
  }

  int64_t page_of(const char* p) const { return (p - begin) / kHugePage; }
};

// For the process's life, like the regions: a tensor may be freed while static objects are destroyed. A child that is
// forked while another thread is in here would wait for that thread, which it does not have: the fork waits instead.
std::mutex& mutex() {
  static std::mutex* m = [] {
    pthread_atfork([] { mutex().lock(); }, [] { mutex().unlock(); }, [] { mutex().unlock(); });
    return new std::mutex;
  }();
  return *m;
}
Region* open_regions[2] = {};

int64_t room_of(int64_t bytes) { return bytes == 0 ? 64 : (bytes + 63) / 64 * 64; }

}  // namespace

HugeBlock allocate_huge(int64_t bytes, Arena arena) {
  HugeBlock block;
  block.bytes = bytes;
  const int64_t size = room_of(bytes);
  const std::lock_guard<std::mutex> lock(mutex());
  Region*& open = open_regions[int(arena)];
  if (size < kOwnRegion && (open == nullptr || open->end - open->next < size)) open = new Region(kRegion);
  Region* region = size < kOwnRegion ? open : new Region(size);
  block.data = region->take(size);
  block.region = region;
  return block;
}

void free_huge(const HugeBlock& block) {
  const std::lock_guard<std::mutex> lock(mutex());
  Region* region = static_cast<Region*>(block.region);
  if (region->blocks > 1) {
    region->give_back(static_cast<char*>(block.data), room_of(block.bytes));
    return;
  }
  for (Region*& open : open_regions)
    if (open == region) open = nullptr;
  delete region;
}

void advise_huge(void* data, int64_t bytes) {
  const uintptr_t p = reinterpret_cast<uintptr_t>(data);
  char *const first = rounded_up(p), *const last = rounded_down(p + uintptr_t(bytes));
  if (first >= last) return;
  madvise(first, size_t(last - first), MADV_HUGEPAGE);
  madvise(first, size_t(last - first), MADV_COLLAPSE);
}

}  // namespace tle
