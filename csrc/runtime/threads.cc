#include "csrc/runtime/threads.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "csrc/runtime/cpu.h"
#include "csrc/runtime/fp_mode.h"

namespace tle {

namespace {

// A member that has nothing to do spins this long for the next call (a token's ops follow each other within it), then
// sleeps.
constexpr auto kIdleSpin = std::chrono::microseconds(200);
// Somebody who waits for units in other hands spins this long: their owner is running and nearly done, or was preempted
// and needs a core more than the waiter does.
constexpr auto kStageSpin = std::chrono::microseconds(30);
// Below this a call is over before another core has even seen it.
constexpr int64_t kMinBytes = 64 * 1024;
constexpr int kSlots = 64;
// Into how many ranges a stage's units are divided, at most: one for each member up to here.
constexpr int kMaxRanges = 16;
// A claim is a locked instruction: it waits for the loads before it and holds up those behind it, so that each one costs
// a wait for memory (on Zen 4, two threads, 16 KiB of weights a unit: a tenth of the whole time). So units that can be
// computed as one, which are short, are claimed by halves of what is left in a range. Of others, which may take long,
// somebody slow should not hold many: a quarter of what is left, and no more than this.
constexpr int64_t kMaxClaim = 16;

void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb" ::: "memory");  // a yield is a no-op on most cores; isb takes some tens of cycles
#endif
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

// Spins until done() or the time is up; says which. The clock is read once in 64 rounds.
template <class Done>
bool spin_until(std::chrono::microseconds limit, Done done) {
  const auto end = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < 64; ++i) {
      if (done()) return true;
      cpu_relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  return done();
}

// How far a stage is.
struct Progress {
  alignas(64) std::atomic<int64_t> done{0};
  std::atomic<uint32_t> finished{0};  // the futex word of those who sleep
  std::atomic<uint32_t> sleepers{0};
};

// Units of one range that have been claimed.
struct Claims {
  alignas(64) std::atomic<int64_t> count{0};
};

// What the next stage will read first: its context was written when the call began, and weights have passed through the
// caches since.
void prefetch_context(const Stage& stage) {
  const char* p = static_cast<const char*>(stage.context);
  for (int64_t i = 0; i < stage.context_bytes; i += 64) __builtin_prefetch(p + i);
}

// The units of a stage, in `ranges` pieces of which each member begins with one.
struct Range {
  int64_t first, size;
  Range(const Stage& stage, int64_t range, int64_t ranges)
      : first(stage.units * range / ranges), size(stage.units * (range + 1) / ranges - first) {}
};

// For a member that will begin with this range of the next stage. Called before the last unit of a range now: late,
// because what units read pushes the rest out of the caches, and early enough to arrive while that unit runs. Only with
// a unit in its hands may a member look at contexts: without one, the call may have returned. Where there are fewer
// units than members, anybody may get any of them.
void warm(const Stage& stage, int64_t range, int64_t ranges) {
  if (stage.warm == nullptr) return;
  const Range mine(stage, range, ranges);
  if (stage.units < ranges)
    stage.warm(stage.context, 0, stage.units);
  else
    stage.warm(stage.context, mine.first, mine.first + mine.size);
}

// Units first .. last - 1, and before the last of them, if that ends the range, what the next stage will read.
// prepared: whether the member ran units of this stage before.
void run_claimed(const Stage& stage, int64_t first, int64_t last, int member, bool prepared, const Stage* next,
                 int64_t range, int64_t ranges) {
  if (stage.prepare != nullptr && (!prepared || first == 0)) stage.prepare(stage.context, member, first == 0);
  const auto run = [&](int64_t from, int64_t to) {
    if (from == to) return;
    if (stage.run_range != nullptr) return stage.run_range(stage.context, from, to, member);
    for (int64_t unit = from; unit < to; ++unit) stage.run(stage.context, unit, member);
  };
  if (next != nullptr) {
    run(first, last - 1);
    warm(*next, range, ranges);
    first = last - 1;
  }
  run(first, last);
}

// A call's work, kept by the team and not by the caller, because a member that was preempted may look at it after the
// call has returned (and find nothing left).
struct Slot {
  std::vector<Stage> stages;
  std::unique_ptr<Progress[]> progress;  // [stages]
  std::unique_ptr<Claims[]> claims;      // [stages][ranges]
  size_t progress_capacity = 0, claims_capacity = 0;
  int members = 0, ranges = 1;
  alignas(64) std::atomic<int> inside{0};  // members that may be looking

  void fill(const Stage* list, int64_t count, int member_limit) {
    stages.assign(list, list + count);
    members = member_limit;
    ranges = std::min(members, kMaxRanges);
    if (progress_capacity < size_t(count)) {
      progress_capacity = size_t(count);
      progress = std::make_unique<Progress[]>(progress_capacity);
    }
    if (claims_capacity < size_t(count * ranges)) {
      claims_capacity = size_t(count * ranges);
      claims = std::make_unique<Claims[]>(claims_capacity);
    }
    for (int64_t i = 0; i < count; ++i) {
      progress[size_t(i)].done.store(0, std::memory_order_relaxed);
      progress[size_t(i)].finished.store(0, std::memory_order_relaxed);
    }
    for (int64_t i = 0; i < count * ranges; ++i) claims[size_t(i)].count.store(0, std::memory_order_relaxed);
  }

  // Each member begins with a range of its own, which lies in one piece, so that it reads memory in long streams, and
  // goes on where others have not finished theirs. Returns how many units it ran.
  int64_t run_units(size_t i, int member) {
    const Stage& stage = stages[i];
    int64_t ran = 0;
    for (int step = 0; step < ranges; ++step) {
      const int index = (member + step) % ranges;
      const Range range(stage, index, ranges);
      std::atomic<int64_t>& claimed = claims[i * size_t(ranges) + size_t(index)].count;
      for (int64_t seen; (seen = claimed.load(std::memory_order_relaxed)) < range.size;) {
        const int64_t left = range.size - seen;
        const int64_t wanted = std::max<int64_t>(1, stage.run_range ? left / 2 : std::min(left / 4, kMaxClaim));
        const int64_t first = claimed.fetch_add(wanted, std::memory_order_relaxed);
        if (first >= range.size) break;
        const int64_t last = std::min(first + wanted, range.size);
        const bool ends = last == range.size && i + 1 < stages.size();
        run_claimed(stage, range.first + first, range.first + last, member, ran > 0, ends ? &stages[i + 1] : nullptr,
                    member % ranges, ranges);
        ran += last - first;
      }
    }
    return ran;
  }

  void work(int member) {
    for (size_t i = 0; i < stages.size(); ++i) {
      const Stage& stage = stages[i];
      Progress& p = progress[i];
      if (i + 1 < stages.size()) {
        prefetch_context(stages[i + 1]);
        __builtin_prefetch(&claims[(i + 1) * size_t(ranges) + size_t(member % ranges)], 1);
        __builtin_prefetch(&progress[i + 1], 1);
      }
      const int64_t mine = run_units(i, member);
      if (mine > 0 && p.done.fetch_add(mine, std::memory_order_seq_cst) + mine == stage.units) {
        p.finished.store(1, std::memory_order_seq_cst);
        if (p.sleepers.load(std::memory_order_seq_cst) > 0) futex_wake_all(p.finished);
        continue;
      }
      auto complete = [&] { return p.done.load(std::memory_order_acquire) == stage.units; };
      if (complete() || spin_until(kStageSpin, complete)) continue;
      p.sleepers.fetch_add(1, std::memory_order_seq_cst);
      while (p.finished.load(std::memory_order_seq_cst) == 0) futex_wait(p.finished, 0);
      p.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    }
  }
};

void run_alone(const Stage* stages, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (i + 1 < count) prefetch_context(stages[i + 1]);
    const Stage* next = i + 1 < count ? &stages[i + 1] : nullptr;
    if (stages[i].units > 0) run_claimed(stages[i], 0, stages[i].units, 0, false, next, 0, 1);
  }
}

class Team {
 public:
  void run(const Stage* stages, int64_t count, int members) {
    std::unique_lock<std::mutex> lock(busy_, std::try_to_lock);
    if (!lock.owns_lock()) return run_alone(stages, count);  // another thread has the team: compute alone, do not queue
    resize(num_threads());
    Slot& slot = publish(stages, count, members);
    slot.work(0);
  }

  void resize(int size) {
    if (size == size_) return;
    stop();
    size_ = size;
    if (size < 2) return;
    quit_.store(false, std::memory_order_relaxed);
    const uint32_t seen = current_.load(std::memory_order_relaxed);
    leader_ = std::thread([this, size, seen] {
#pragma omp parallel num_threads(size - 1)
      serve(seen);
    });
  }

  int64_t regions() const { return regions_.load(std::memory_order_relaxed); }

 private:
  // Makes the work visible to the members. The slot is one that nobody looks at and not the current one, so that a
  // member that still holds the old value of current_ can tell that it came too late (see serve). The first such: it is
  // in the caches.
  Slot& publish(const Stage* stages, int64_t count, int members) {
    const uint32_t now = current_.load(std::memory_order_relaxed);
    uint32_t index = 0;
    while (index == now % kSlots || slots_[index].inside.load(std::memory_order_seq_cst) != 0)
      index = (index + 1) % kSlots;
    slots_[index].fill(stages, count, members);
    current_.store((now / kSlots + 1) * kSlots + index, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) futex_wake_all(current_);
    regions_.fetch_add(1, std::memory_order_relaxed);
    return slots_[index];
  }

  // A member's life. Member numbers are handed out by arrival within the team.
  void serve(uint32_t seen) {
    const DefaultFpMode mode;
    const int member = 1 + arrivals_.fetch_add(1, std::memory_order_relaxed);
    while (true) {
      auto news = [&] {
        return current_.load(std::memory_order_acquire) != seen || quit_.load(std::memory_order_relaxed);
      };
      if (!spin_until(kIdleSpin, news)) {
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        while (!news()) futex_wait(current_, seen);
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
      }
      if (quit_.load(std::memory_order_acquire)) return;
      seen = current_.load(std::memory_order_seq_cst);
      Slot& slot = slots_[seen % kSlots];
      slot.inside.fetch_add(1, std::memory_order_seq_cst);
      // Still current: then publish() cannot have taken this slot again before it saw `inside`.
      if (current_.load(std::memory_order_seq_cst) == seen && member < slot.members) slot.work(member);
      slot.inside.fetch_sub(1, std::memory_order_seq_cst);
    }
  }

  void stop() {
    if (!leader_.joinable()) return;
    quit_.store(true, std::memory_order_seq_cst);
    const uint32_t now = current_.load(std::memory_order_relaxed);
    current_.store((now / kSlots + 1) * kSlots + now % kSlots, std::memory_order_seq_cst);
    futex_wake_all(current_);
    leader_.join();
    arrivals_.store(0, std::memory_order_relaxed);
  }

  std::mutex busy_;
  std::thread leader_;
  int size_ = 1;
  std::atomic<bool> quit_{false};
  std::atomic<int> arrivals_{0};
  std::atomic<int64_t> regions_{0};
  alignas(64) std::atomic<uint32_t> current_{0};  // number of the call * kSlots + its slot; the members' futex word
  alignas(64) std::atomic<uint32_t> sleepers_{0};
  Slot slots_[kSlots];
};

// Never destroyed: members may outlive static destruction at exit. A forked child has none of the threads, so it
// gets a new team (the old one's memory is left alone: its mutex may be held by a thread that no longer exists).
std::atomic<Team*> the_team{nullptr};
std::atomic<int> wanted{0};

Team& team() {
  Team* t = the_team.load(std::memory_order_acquire);
  if (t != nullptr) return *t;
  static std::mutex making;
  const std::lock_guard<std::mutex> lock(making);
  t = the_team.load(std::memory_order_acquire);
  if (t == nullptr) {
    static bool registered = false;
    if (!registered) pthread_atfork(nullptr, nullptr, [] { the_team.store(nullptr, std::memory_order_release); });
    registered = true;
    t = new Team;
    the_team.store(t, std::memory_order_release);
  }
  return *t;
}

int checked(long n, const std::string& what) {
  if (n < 1 || n > kMaxThreads)
    throw std::invalid_argument(what + ": the number of threads must be in 1 .. " + std::to_string(kMaxThreads));
  return int(n);
}

}  // namespace

int num_threads() {
  int n = wanted.load(std::memory_order_relaxed);
  if (n > 0) return n;
  const char* text = getenv("TLE_NUM_THREADS");
  if (text != nullptr && *text != '\0') {
    char* end = nullptr;
    const long value = strtol(text, &end, 10);
    n = checked(*end == '\0' ? value : 0, std::string("TLE_NUM_THREADS=") + text);
  } else {
    n = default_num_threads();
  }
  wanted.store(n, std::memory_order_relaxed);
  return n;
}

void set_num_threads(int n) { wanted.store(checked(n, "set_num_threads"), std::memory_order_relaxed); }

void run_stages(const Stage* stages, int64_t count, int64_t bytes, int members) {
  const DefaultFpMode mode;
  if (members < 2 || bytes < kMinBytes) return run_alone(stages, count);
  team().run(stages, count, members);
}

int64_t parallel_regions() {
  const Team* t = the_team.load(std::memory_order_acquire);
  return t == nullptr ? 0 : t->regions();
}

}  // namespace tle
