#include "csrc/runtime/scratch.h"

#include <stdlib.h>

#include <algorithm>
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

constexpr size_t kChunk = 64 * 1024;

}  // namespace

ScratchMemory::~ScratchMemory() { free(memory_); }

ScratchMemory& ScratchMemory::of_this_thread() {
  thread_local ScratchMemory memory;
  return memory;
}

Scratch::Scratch(ScratchMemory& memory) : block_(memory) { ++block_.users_; }

Scratch::~Scratch() {
  for (void* p : extra_) free(p);
  if (--block_.users_ == 0 && used_ + overflow_ > block_.size_) {
    // What did not fit this time fits next time.
    free(block_.memory_);
    block_.size_ = (used_ + overflow_) * 5 / 4 / 64 * 64 + 64;
    block_.memory_ = aligned_alloc(64, block_.size_);
    if (block_.memory_ == nullptr) block_.size_ = 0;  // a destructor does not throw; the next call asks again
    allocations.fetch_add(1, std::memory_order_relaxed);
  }
}

void* Scratch::bytes(size_t n) {
  n = (n + 63) / 64 * 64;
  if (block_.users_ == 1 && used_ + n <= block_.size_) {
    void* p = static_cast<char*>(block_.memory_) + used_;
    used_ += n;
    return p;
  }
  if (chunk_left_ < n || chunk_ == nullptr) {
    const size_t size = std::max(n, kChunk);
    extra_.push_back(aligned(size));
    chunk_ = static_cast<char*>(extra_.back());
    chunk_left_ = size;
  }
  void* p = chunk_;
  chunk_ += n;
  chunk_left_ -= n;
  overflow_ += n;
  return p;
}

int64_t scratch_allocations() { return allocations.load(std::memory_order_relaxed); }

}  // namespace tle
