#include "csrc/runtime/scratch.h"

#include <stdlib.h>

#include <atomic>
#include <new>

namespace tle {

namespace {

std::atomic<int64_t> allocations{0};

void* aligned(size_t n) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  void* p = aligned_alloc(64, n);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}

struct Block {
  void* memory = nullptr;
  size_t size = 0;
  int users = 0;
  ~Block() { free(memory); }
};
thread_local Block block;

}  // namespace

Scratch::Scratch() { ++block.users; }

Scratch::~Scratch() {
  for (void* p : extra_) free(p);
  if (--block.users == 0 && used_ + overflow_ > block.size) {
    // What did not fit this time fits next time.
    free(block.memory);
    block.size = (used_ + overflow_) * 5 / 4 / 64 * 64 + 64;
    block.memory = aligned_alloc(64, block.size);
    if (block.memory == nullptr) block.size = 0;  // a destructor does not throw; the next call asks again
    allocations.fetch_add(1, std::memory_order_relaxed);
  }
}

void* Scratch::bytes(size_t n) {
  n = (n + 63) / 64 * 64;
  if (block.users == 1 && used_ + n <= block.size) {
    void* p = static_cast<char*>(block.memory) + used_;
    used_ += n;
    return p;
  }
  overflow_ += n;
  extra_.push_back(aligned(n == 0 ? 64 : n));
  return extra_.back();
}

int64_t scratch_allocations() { return allocations.load(std::memory_order_relaxed); }

}  // namespace tle
