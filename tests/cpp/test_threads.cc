#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "csrc/runtime/fp_mode.h"
#include "csrc/runtime/threads.h"

namespace tle::test {
namespace {

constexpr int64_t kLarge = 1 << 20;  // bytes: worth handing out

struct Counts {
  std::atomic<int> done[1000] = {};
};

void count_unit(const void* context, int64_t unit, int) {
  static_cast<Counts*>(const_cast<void*>(context))->done[unit].fetch_add(1);
}

class Threads : public testing::Test {
 protected:
  void SetUp() override { before_ = num_threads(); }
  void TearDown() override { set_num_threads(before_); }
  int before_ = 1;
};

TEST_F(Threads, EveryUnitRunsOnceForEveryTeamSize) {
  for (int threads : {1, 2, 3, 5, 8}) {
    set_num_threads(threads);
    for (int64_t units : {0, 1, 2, 7, 1000}) {
      Counts counts;
      const Stage stage = {count_unit, &counts, units};
      run_stages(&stage, 1, kLarge, threads);
      for (int64_t i = 0; i < 1000; ++i) ASSERT_EQ(counts.done[i].load(), i < units ? 1 : 0) << threads << " " << i;
    }
  }
}

// Each member that runs units has prepared before the first of them, and whoever runs unit 0 knew it then.
TEST_F(Threads, MembersPrepareBeforeTheirUnits) {
  struct Prepared {
    std::atomic<int> by[8] = {}, with_unit_0[8] = {}, shared{0};
    Counts counts;
  };
  for (int threads : {1, 2, 3, 8}) {
    set_num_threads(threads);
    for (int64_t units : {1, 2, 7, 1000})
      for (bool ranges : {false, true}) {
        Prepared p[3];
        Stage stages[3];
        for (int i = 0; i < 3; ++i) {
          Stage& stage = stages[i];
          stage.context = &p[i];
          stage.units = units;
          stage.prepare = [](const void* context, int member, bool has_unit_0) {
            Prepared& here = *static_cast<Prepared*>(const_cast<void*>(context));
            here.by[member].fetch_add(1);
            if (has_unit_0) here.with_unit_0[member].fetch_add(1);
          };
          stage.run = [](const void* context, int64_t unit, int member) {
            Prepared& here = *static_cast<Prepared*>(const_cast<void*>(context));
            EXPECT_GE(here.by[member].load(), 1);
            if (unit == 0) here.shared = here.with_unit_0[member].load();
            count_unit(&here.counts, unit, member);
            if (unit % 5 == 0) std::this_thread::yield();
          };
          if (ranges)
            stage.run_range = [](const void* context, int64_t first, int64_t last, int member) {
              Prepared& here = *static_cast<Prepared*>(const_cast<void*>(context));
              EXPECT_GE(here.by[member].load(), 1);
              for (int64_t unit = first; unit < last; ++unit) {
                if (unit == 0) here.shared = here.with_unit_0[member].load();
                count_unit(&here.counts, unit, member);
              }
            };
        }
        run_stages(stages, 3, kLarge, threads);
        for (Prepared& here : p) {
          int with_unit_0 = 0;
          for (int member = 0; member < threads; ++member) {
            EXPECT_LE(here.by[member].load(), 2) << "the first units, and unit 0";
            with_unit_0 += here.with_unit_0[member].load();
          }
          EXPECT_EQ(with_unit_0, 1);
          EXPECT_EQ(here.shared.load(), 1);
          for (int64_t i = 0; i < units; ++i) ASSERT_EQ(here.counts.done[i].load(), 1);
        }
      }
  }
}

TEST_F(Threads, RangesOfUnitsCoverEachUnitOnce) {
  for (int threads : {1, 2, 3, 8}) {
    set_num_threads(threads);
    for (int64_t units : {1, 2, 7, 64, 1000}) {
      Counts counts[2];
      Stage stage = {[](const void*, int64_t, int) { ADD_FAILURE() << "one by one"; }, &counts[0], units};
      stage.run_range = [](const void* p, int64_t first, int64_t last, int member) {
        EXPECT_LT(first, last);
        for (int64_t unit = first; unit < last; ++unit) count_unit(p, unit, member);
      };
      const Stage stages[] = {stage, {count_unit, &counts[1], units}, stage};
      run_stages(stages, 3, kLarge, threads);
      for (int64_t i = 0; i < 1000; ++i) {
        ASSERT_EQ(counts[0].done[i].load(), i < units ? 2 : 0) << threads << " " << i;
        ASSERT_EQ(counts[1].done[i].load(), i < units ? 1 : 0) << threads << " " << i;
      }
    }
  }
}

TEST_F(Threads, AStageSeesAllOfTheOneBefore) {
  // Stage i adds i to what stage i - 1 left in another unit: a unit that ran early would read an old value.
  constexpr int64_t kUnits = 16, kStages = 300;
  struct Context {
    std::vector<int64_t>* values;
    int64_t stage;
  };
  for (int threads : {2, 3}) {
    set_num_threads(threads);
    std::vector<int64_t> values(size_t((kStages + 1) * kUnits), 0);
    std::vector<Context> contexts;
    std::vector<Stage> stages;
    for (int64_t s = 1; s <= kStages; ++s) contexts.push_back({&values, s});
    for (const Context& c : contexts)
      stages.push_back({[](const void* p, int64_t unit, int) {
                          const Context& c = *static_cast<const Context*>(p);
                          (*c.values)[size_t(c.stage * kUnits + unit)] =
                              (*c.values)[size_t((c.stage - 1) * kUnits + (unit + 5) % kUnits)] + c.stage;
                        },
                        &c, kUnits});
    run_stages(stages.data(), kStages, kLarge, threads);
    for (int64_t u = 0; u < kUnits; ++u)
      ASSERT_EQ(values[size_t(kStages * kUnits + u)], kStages * (kStages + 1) / 2) << threads;
  }
}

TEST_F(Threads, MemberNumbersStayBelowTheLimit) {
  set_num_threads(4);
  std::atomic<int> highest{0};
  const Stage stage = {[](const void* p, int64_t, int member) {
                         auto& highest = *static_cast<std::atomic<int>*>(const_cast<void*>(p));
                         int seen = highest.load();
                         while (member > seen && !highest.compare_exchange_weak(seen, member)) {}
                       },
                       &highest, 2000};
  for (int i = 0; i < 50; ++i) run_stages(&stage, 1, kLarge, 2);
  EXPECT_LT(highest.load(), 2);
}

TEST_F(Threads, SmallWorkStaysWithTheCaller) {
  set_num_threads(2);
  Counts counts;
  const Stage stage = {count_unit, &counts, 10};
  const int64_t regions = parallel_regions();
  run_stages(&stage, 1, 100, 2);
  EXPECT_EQ(parallel_regions(), regions);
  run_stages(&stage, 1, kLarge, 2);
  EXPECT_EQ(parallel_regions(), regions + 1);
}

// A simulation of big.LITTLE: one member takes ten times as long for a unit. With units claimed one by one, the others
// take its share: the whole lasts little longer than the fast members' own pace allows, and never the slow one's even
// share.
TEST_F(Threads, WarmingComesBeforeTheStageAndNeverAfterTheCall) {
  // More members than cores, so that some come late: what they look at then is not to be read any more.
  struct Context {
    std::atomic<int64_t> ran, warmed, too_late;
    std::atomic<bool> over;
  } contexts[3] = {};
  const auto run = [](const void* p, int64_t, int) { static_cast<Context*>(const_cast<void*>(p))->ran.fetch_add(1); };
  const auto warm = [](const void* p, int64_t first, int64_t last) {
    Context& c = *static_cast<Context*>(const_cast<void*>(p));
    c.warmed.fetch_add(last - first);
    if (c.over.load()) c.too_late.fetch_add(1);
  };
  for (int threads : {1, 2, 4, 8}) {
    set_num_threads(threads);
    for (int64_t units : {1, 3, 8, 40}) {
      for (int repetition = 0; repetition < 200; ++repetition) {
        Stage stages[3];
        for (int i = 0; i < 3; ++i) {
          contexts[i].ran = contexts[i].warmed = 0;
          contexts[i].over = false;
          stages[i] = {run, &contexts[i], i == 1 ? 1 : units, 0, warm};
        }
        run_stages(stages, 3, kLarge, threads);
        for (Context& c : contexts) c.over = true;
        ASSERT_EQ(contexts[0].ran.load() + contexts[1].ran.load() + contexts[2].ran.load(), 2 * units + 1);
        ASSERT_EQ(contexts[0].warmed.load(), 0);
        // Once for each range of the stage before that has units.
        ASSERT_GE(contexts[1].warmed.load(), 1);
        ASSERT_GE(contexts[2].warmed.load(), 1);
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    for (Context& c : contexts) ASSERT_EQ(c.too_late.load(), 0) << threads;
  }
}

TEST_F(Threads, ASlowMemberDoesNotHoldTheRest) {
  set_num_threads(2);
  constexpr int64_t kUnits = 40;
  struct Context {
    std::atomic<int> by_member[2] = {};
  } context;
  const Stage stage = {[](const void* p, int64_t, int member) {
                         auto& c = *static_cast<Context*>(const_cast<void*>(p));
                         c.by_member[member].fetch_add(1);
                         std::this_thread::sleep_for(std::chrono::milliseconds(member == 1 ? 20 : 2));
                       },
                       &context, kUnits};
  run_stages(&stage, 1, kLarge, 2);
  EXPECT_EQ(context.by_member[0] + context.by_member[1], kUnits);
  EXPECT_GE(context.by_member[0].load(), kUnits * 3 / 4);  // an even share would be half
}

TEST_F(Threads, ManyCallersShareOneTeam) {
  set_num_threads(2);
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int c = 0; c < 8; ++c)
    callers.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        Counts counts;
        const Stage stages[] = {{count_unit, &counts, 50}, {count_unit, &counts, 50}};
        run_stages(stages, 2, kLarge, 2);
        for (int u = 0; u < 50; ++u) wrong += counts.done[u].load() != 2;
      }
    });
  for (std::thread& t : callers) t.join();
  EXPECT_EQ(wrong.load(), 0);
}

TEST_F(Threads, KernelsRunInTheDefaultModeAndTheCallerKeepsItsOwn) {
#if defined(__x86_64__)
  const unsigned flush = _mm_getcsr() | 0x8040;  // flush to zero, denormals are zero
  _mm_setcsr(flush);
#endif
  set_num_threads(2);
  std::atomic<int> flushed{0};
  const Stage stage = {[](const void* p, int64_t, int) {
                         volatile float tiny = 1e-40f;
                         volatile float product = tiny * 1.0f;
                         if (product == 0.0f) static_cast<std::atomic<int>*>(const_cast<void*>(p))->fetch_add(1);
                         std::this_thread::sleep_for(std::chrono::milliseconds(1));
                       },
                       &flushed, 20};
  run_stages(&stage, 1, kLarge, 2);
  EXPECT_EQ(flushed.load(), 0);
#if defined(__x86_64__)
  EXPECT_EQ(_mm_getcsr() & 0x8040u, 0x8040u);
  _mm_setcsr(flush & ~0x8040u);
#endif
}

TEST_F(Threads, ImpossibleCountsAreErrors) {
  for (int n : {0, -1, kMaxThreads + 1}) EXPECT_THROW(set_num_threads(n), std::invalid_argument) << n;
  EXPECT_EQ(num_threads(), before_);
}

}  // namespace
}  // namespace tle::test
