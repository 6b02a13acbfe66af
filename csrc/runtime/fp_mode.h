// The floating-point mode that kernels are specified in: round to nearest even, subnormals kept, no traps.
#pragma once

#include <stdint.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace tle {

// Sets the default mode for its lifetime and gives the thread its own mode back (users may have asked torch for
// flush-to-zero, and threads inherit the mode of whoever made them).
class DefaultFpMode {
 public:
  DefaultFpMode() : saved_(read()) {
    if (saved_ != kDefault) write(kDefault);
  }
  ~DefaultFpMode() {
    if (saved_ != kDefault) write(saved_);
  }
  DefaultFpMode(const DefaultFpMode&) = delete;
  DefaultFpMode& operator=(const DefaultFpMode&) = delete;

 private:
#if defined(__x86_64__)
  // Exceptions masked; the six low bits are sticky flags that every operation may set and that mean nothing here.
  static constexpr uint64_t kDefault = 0x1F80;
  static uint64_t read() { return _mm_getcsr() & ~uint64_t(0x3F); }
  static void write(uint64_t mode) { _mm_setcsr(unsigned(mode)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kDefault = 0;
  static uint64_t read() {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void write(uint64_t mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#else
  static constexpr uint64_t kDefault = 0;
  static uint64_t read() { return 0; }
  static void write(uint64_t) {}
#endif
  uint64_t saved_;
};

}  // namespace tle
