// Working memory of one call: a block that grows to the largest need and is then kept, so that decoding allocates
// nothing once it runs.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

namespace tle {

// A block: each thread has one, and who keeps a program between calls has his own.
class ScratchMemory {
 public:
  ScratchMemory() = default;
  ~ScratchMemory();
  ScratchMemory(const ScratchMemory&) = delete;
  ScratchMemory& operator=(const ScratchMemory&) = delete;
  static ScratchMemory& of_this_thread();

 private:
  friend class Scratch;
  void* memory_ = nullptr;
  size_t size_ = 0;
  int users_ = 0;
};

class Scratch {
 public:
  // Empty. A call that is made while another one has the same memory allocates (operators do not call each other, so
  // this is a guard and not a path).
  explicit Scratch(ScratchMemory& memory);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // count objects of T on a 64-byte boundary, not initialised. Pointers stay valid for the Scratch's lifetime.
  template <class T>
  T* get(int64_t count) {
    return static_cast<T*>(bytes(size_t(count) * sizeof(T)));
  }

 private:
  void* bytes(size_t n);
  ScratchMemory& block_;
  size_t used_ = 0;
  // What does not fit lies in chunks.
  size_t overflow_ = 0, chunk_left_ = 0;
  char* chunk_ = nullptr;
  std::vector<void*> extra_;
};

// Blocks that scratch took from the system so far, in this process.
int64_t scratch_allocations();

}  // namespace tle
