// The table of an operator's implementations. Rows stand best first; the first one that the CPU has, that pays
// there and that TLE_ISA allows is chosen once. Tests and benchmarks walk all().
#pragma once

#include <atomic>
#include <initializer_list>
#include <vector>

#include "csrc/kernels/common/isa.h"
#include "csrc/runtime/cpu.h"

namespace tle {

class KernelTableBase {
 public:
  explicit KernelTableBase(const char* op);
  virtual ~KernelTableBase() = default;
  KernelTableBase(const KernelTableBase&) = delete;

  // Every table of the process, in no particular order.
  static std::vector<KernelTableBase*>& all();

  const char* op() const { return op_; }
  virtual std::vector<Isa> isas() const = 0;
  virtual Isa chosen_isa() = 0;
  virtual void forget_choice() = 0;

 private:
  const char* op_;
};

template <class Fn>
class KernelTable final : public KernelTableBase {
 public:
  KernelTable(const char* op, std::initializer_list<Variant<Fn>> rows) : KernelTableBase(op), rows_(rows) {}

  const std::vector<Variant<Fn>>& rows() const { return rows_; }

  const Variant<Fn>& chosen() {
    const Variant<Fn>* row = chosen_.load(std::memory_order_acquire);
    if (row == nullptr) {
      row = &choose();
      chosen_.store(row, std::memory_order_release);
    }
    return *row;
  }
  Fn* get() { return chosen().fn; }

  std::vector<Isa> isas() const override {
    std::vector<Isa> found;
    for (const auto& row : rows_) found.push_back(row.isa);
    return found;
  }
  Isa chosen_isa() override { return chosen().isa; }
  void forget_choice() override { chosen_.store(nullptr, std::memory_order_release); }

 private:
  const Variant<Fn>& choose() const {
    for (const auto& row : rows_)
      if (row.isa <= isa_cap() && cpu_supports(row.isa) && (row.pays == nullptr || row.pays())) return row;
    return rows_.back();  // the scalar reference, which every table ends with
  }

  std::vector<Variant<Fn>> rows_;
  std::atomic<const Variant<Fn>*> chosen_{nullptr};
};

// Wraps the rows that only exist on one architecture.
#if defined(__x86_64__)
#define TLE_X86(...) __VA_ARGS__
#define TLE_ARM(...)
#elif defined(__aarch64__)
#define TLE_X86(...)
#define TLE_ARM(...) __VA_ARGS__
#else
#define TLE_X86(...)
#define TLE_ARM(...)
#endif

}  // namespace tle
