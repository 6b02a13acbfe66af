#include "csrc/runtime/huge_pages.h"

#include <stddef.h>
#include <sys/mman.h>

#include <mutex>
#include <new>

namespace tle {

namespace {

constexpr int64_t kHugePage = 2 << 20;
constexpr int64_t kRegion = 64 << 20;
constexpr int64_t kOwnRegion = kRegion / 2;  // blocks from here on have one for themselves
#ifndef MADV_COLLAPSE
constexpr int MADV_COLLAPSE = 25;  // Linux 6.1; newer than Debian 12's headers
#endif

char* round_up(char* p, int64_t unit) {
  return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(p) + uintptr_t(unit) - 1) / uintptr_t(unit) * uintptr_t(unit));
}
char* round_down(char* p, int64_t unit) {
  return reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(p) / uintptr_t(unit) * uintptr_t(unit));
}

// The whole huge pages in [first, last).
template <class Do>
void whole_pages(char* first, char* last, Do what) {
  first = round_up(first, kHugePage);
  last = round_down(last, kHugePage);
  if (first < last) what(first, size_t(last - first));
}

struct Region {
  char *mapping, *next, *end;  // next: the first byte that was never given out
  size_t mapped;
  int64_t blocks = 0;

  explicit Region(int64_t bytes) : mapped(size_t(bytes + kHugePage)) {
    void* p = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    mapping = static_cast<char*>(p);
    next = round_up(mapping, kHugePage);
    end = next + bytes;
    madvise(next, size_t(bytes), MADV_HUGEPAGE);
  }
  ~Region() { munmap(mapping, mapped); }
};

// Both for the process's life: a tensor may be freed while static objects are destroyed.
std::mutex& mutex() {
  static std::mutex* m = new std::mutex;
  return *m;
}
Region* open_regions[2] = {};

}  // namespace

HugeBlock allocate_huge(int64_t bytes, Arena arena) {
  HugeBlock block;
  block.bytes = bytes;
  const int64_t size = (bytes + 63) / 64 * 64;
  const std::lock_guard<std::mutex> lock(mutex());
  Region*& open = open_regions[int(arena)];
  if (size < kOwnRegion && (open == nullptr || open->end - open->next < size)) open = new Region(kRegion);
  Region* region = size < kOwnRegion ? open : new Region(size);
  block.data = region->next;
  block.region = region;
  region->next += size;
  ++region->blocks;
  return block;
}

void free_huge(const HugeBlock& block) {
  const std::lock_guard<std::mutex> lock(mutex());
  Region* region = static_cast<Region*>(block.region);
  if (--region->blocks == 0) {
    for (Region*& open : open_regions)
      if (open == region) open = nullptr;
    delete region;
    return;
  }
  char* first = static_cast<char*>(block.data);
  whole_pages(first, first + block.bytes, [](char* p, size_t n) { madvise(p, n, MADV_DONTNEED); });
}

void advise_huge(void* data, int64_t bytes) {
  char* first = static_cast<char*>(data);
  whole_pages(first, first + bytes, [](char* p, size_t n) {
    madvise(p, n, MADV_HUGEPAGE);
    madvise(p, n, MADV_COLLAPSE);
  });
}

}  // namespace tle
