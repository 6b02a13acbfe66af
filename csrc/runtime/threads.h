// One team of threads for the whole process.
//
// Work is a list of stages. A stage is a number of equal, independent units, divided into one range per member. A
// member claims units of its own range first, then of the others', several at a time while there are many: a slow core
// does not hold up the rest, and since a unit's result does not depend on who computes it, neither do the bits. The next
// stage starts when every unit of the one before is finished. Nobody waits for a member as such: one that sleeps or is
// preempted without a unit in its hands holds up nothing.
//
// The members run inside one persistent OpenMP region (on the libgomp that torch loads) that a leader thread of our own
// opened once. So calls from many Python threads share the one team (a second caller at the same time computes alone
// instead of waiting), the number of threads stays what was asked for, and a forked child starts a team of its own.
#pragma once

#include <stdint.h>

namespace tle {

struct Stage {
  // Computes unit number `unit`. member: 0 <= member < team_size() of this call, for scratch that is private to a
  // thread.
  void (*run)(const void* context, int64_t unit, int member);
  const void* context;
  int64_t units;
  int64_t context_bytes = 0;  // of the context, to be read ahead
  // Or null: asks the caches for what the units first .. last - 1 will read. Called near the end of the stage before,
  // by somebody with a unit of that one in his hands.
  void (*warm)(const void* context, int64_t first, int64_t last) = nullptr;
  // Or null: the same as run for each of the units first .. last - 1, only faster.
  void (*run_range)(const void* context, int64_t first, int64_t last, int member) = nullptr;
  // Or null: computes what units read and each member has a copy of. A member that has claimed units calls it before
  // the first of them, and once more if it comes to unit 0 later; only who has unit 0 writes what others read later.
  void (*prepare)(const void* context, int member, bool has_unit_0) = nullptr;
};

// Threads that a call may use, the caller included: TLE_NUM_THREADS or the number of usable performance cores.
// Both throw std::runtime_error for a value that is not in 1 .. kMaxThreads.
inline constexpr int kMaxThreads = 512;
int num_threads();
void set_num_threads(int n);

// Runs the stages in order and returns when all are done. bytes: roughly what the whole work reads and writes; work
// that is too small to be worth handing out runs on the caller alone. At most `members` threads take part.
void run_stages(const Stage* stages, int64_t count, int64_t bytes, int members);

// Times run_stages handed work to the team so far.
int64_t parallel_regions();

}  // namespace tle
