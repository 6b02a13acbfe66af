// Working memory of one call: one block per thread that grows to the largest need and is then kept, so that decoding
// allocates nothing once it runs.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

namespace tle {

class Scratch {
 public:
  // The calling thread's scratch, empty. A call that is made while another one of the same thread is under way gets its
  // own (operators do not call each other, so this is a guard and not a path).
  Scratch();
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
  size_t used_ = 0;
  size_t overflow_ = 0;
  std::vector<void*> extra_;
};

// Blocks that scratch took from the system so far, in this process.
int64_t scratch_allocations();

}  // namespace tle
