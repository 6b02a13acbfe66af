// What the kernel tests share: buffers that end at an unreadable page, random operands, and the walk over a table's
// rows.
#pragma once

#include <gtest/gtest.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <random>
#include <string>
#include <vector>

#include "csrc/kernels/common/scalar.h"
#include "csrc/kernels/tables.h"

namespace tle::test {

// `bytes` bytes that end exactly where an unreadable page begins, so that reading or writing one byte too many
// is a fault. Filled with 0xFF: a NaN in every floating type, so that an output that was not written shows.
class Guarded {
 public:
  explicit Guarded(size_t bytes) : bytes_(bytes) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    mapped_ = (bytes + page - 1) / page * page + page;
    base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) throw std::bad_alloc();
    mprotect(static_cast<char*>(base_) + mapped_ - page, page, PROT_NONE);
    data_ = static_cast<char*>(base_) + mapped_ - page - bytes;
    memset(data_, 0xFF, bytes);
  }
  ~Guarded() { munmap(base_, mapped_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  template <class T = void>
  T* as() {
    return reinterpret_cast<T*>(data_);
  }
  size_t size() const { return bytes_; }
  bool operator==(const Guarded& other) const {
    return bytes_ == other.bytes_ && memcmp(data_, other.data_, bytes_) == 0;
  }

 private:
  void* base_;
  size_t mapped_, bytes_;
  char* data_;
};

using Random = std::mt19937;

// Normal values times `scale`, rounded to t.
inline void fill_normal(Random& random, DType t, void* p, int64_t n, float scale = 1.0f) {
  std::normal_distribution<float> normal(0.0f, 1.0f);
  for (int64_t i = 0; i < n; ++i) scalar::store(t, p, i, normal(random) * scale);
}

// Uniform in -limit .. limit.
inline void fill_codes(Random& random, int8_t* p, int64_t n, int limit = 127) {
  std::uniform_int_distribution<int> uniform(-limit, limit);
  for (int64_t i = 0; i < n; ++i) p[i] = int8_t(uniform(random));
}

inline const char* name_of(DType t) { return t == DType::kF32 ? "fp32" : t == DType::kBF16 ? "bf16" : "fp16"; }
inline constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

// Calls test(fn) for every row of the table but the reference that this CPU can run, with the level's name in the
// failure trace. The reference is the last row.
template <class Fn, class Test>
void for_each_variant(const KernelTable<Fn>& table, Test test) {
  for (const Variant<Fn>& row : table.rows()) {
    if (row.isa == Isa::kRef || !cpu_supports(row.isa)) continue;
    SCOPED_TRACE(std::string(table.op()) + " " + isa_name(row.isa));
    test(row.fn);
  }
}

}  // namespace tle::test
