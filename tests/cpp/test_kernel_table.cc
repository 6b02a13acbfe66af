#include "csrc/runtime/kernel_table.h"

#include <stdexcept>

#include "tests/cpp/harness.h"

namespace tle::test {
namespace {

typedef int Fn();
int best() { return 2; }
int second() { return 1; }
int reference() { return 0; }

// The tables live as long as the program does: every table is known to set_isa_cap.
KernelTable<Fn>& plain() {
  static auto* table = new KernelTable<Fn>("test_plain", {{supported_isas().back(), best}, {Isa::kRef, reference}});
  return *table;
}

bool pays = false;
KernelTable<Fn>& conditional() {
  static auto* table = new KernelTable<Fn>(
      "test_conditional",
      {{supported_isas().back(), best, [] { return pays; }}, {Isa::kRef, second}, {Isa::kRef, reference}});
  return *table;
}

TEST(KernelTable, TheFirstRowThatTheCpuHasIsChosen) {
  EXPECT_EQ(plain().get()(), 2);
  EXPECT_EQ(plain().chosen_isa(), supported_isas().back());
}

TEST(KernelTable, TheCapLeavesOutHigherLevels) {
  set_isa_cap("ref");
  EXPECT_EQ(plain().chosen_isa(), Isa::kRef);
  set_isa_cap("");
  EXPECT_EQ(plain().chosen_isa(), supported_isas().back());
}

TEST(KernelTable, ARowThatDoesNotPayIsLeftOut) {
  EXPECT_EQ(conditional().get()(), 1);
  pays = true;
  EXPECT_EQ(conditional().get()(), 1) << "the choice is made once";
  conditional().forget_choice();
  EXPECT_EQ(conditional().get()(), 2);
}

TEST(KernelTable, EveryTableEndsWithTheReference) {
  for (KernelTableBase* table : KernelTableBase::all()) EXPECT_EQ(table->isas().back(), Isa::kRef) << table->op();
}

TEST(KernelTable, UnknownAndForeignLevelsAreRefused) {
  EXPECT_THROW(set_isa_cap("avx1024"), std::runtime_error);
#if defined(__x86_64__)
  EXPECT_THROW(set_isa_cap("neon"), std::runtime_error);
#elif defined(__aarch64__)
  EXPECT_THROW(set_isa_cap("avx2"), std::runtime_error);
#endif
  EXPECT_EQ(isa_cap(), supported_isas().back());
}

}  // namespace
}  // namespace tle::test
