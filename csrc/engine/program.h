// A call's work as a list of stages (runtime/threads.h) with their contexts. Everything lives in the call's scratch:
// building a program allocates nothing once the scratch has grown.
#pragma once

#include <stdint.h>

#include <stdexcept>
#include <type_traits>
#include <utility>

#include "csrc/runtime/scratch.h"
#include "csrc/runtime/threads.h"

namespace tle {

// What a stage's units write of a matrix [.., columns]: unit u the rows from u / n * rows and the columns from
// u % n * columns on, where n units lie beside each other. rows = 0: something else.
struct UnitShape {
  int64_t rows = 0, columns = 0;
};

class Program {
  // The beginning of what prepare() binds.
  struct Preparation {
    void (*run)(const Preparation*, int member, bool has_unit_0);
    void (*warm)(const Preparation*);
    Preparation* next;
  };

 public:
  // In the calling thread's scratch, or in memory of one's own for a program that is kept between calls.
  explicit Program(int64_t max_stages, ScratchMemory& memory = ScratchMemory::of_this_thread())
      : scratch_(memory), stages_(scratch_.get<Stage>(max_stages)), capacity_(max_stages), members_(num_threads()) {}

  // Working memory for the program's lifetime, or until rewind().
  template <class T>
  T* scratch(int64_t count) {
    const int64_t bytes = count * int64_t(sizeof(T));
    if (!recording_) return scratch_.get<T>(count);
    if (next_block_ < blocks_ && block_[next_block_].bytes >= bytes)
      return static_cast<T*>(block_[next_block_++].memory);
    T* memory = scratch_.get<T>(count);
    if (next_block_ < kMaxBlocks) {
      block_[next_block_++] = {memory, bytes};
      blocks_ = next_block_;
    }
    return memory;
  }

  // A model's layers do the same one after another and can share their working memory: what scratch() gives after
  // record() is given again, in the same order, after each rewind(). Nothing in it may be needed by a stage of a later
  // layer.
  void record() { recording_ = true; }
  void rewind() { next_block_ = 0; }

  // Threads that may take part; `member` of a stage's run is below it.
  int members() const { return members_; }

  // Appends a stage of `units` calls run(context, unit, member). bytes: what the stage reads and writes, roughly.
  // warm(context, first, last), if given, asks the caches for what these units read; run_range(context, first, last,
  // member) computes them all faster than run one by one (runtime/threads.h). Nothing may follow() the latter.
  template <class Context>
  void add(const Context& context, int64_t units, int64_t bytes,
           void (*run)(const Context&, int64_t unit, int member),
           void (*warm)(const Context&, int64_t first, int64_t last) = nullptr,
           void (*run_range)(const Context&, int64_t first, int64_t last, int member) = nullptr) {
    if (units == 0 && prepared_ == nullptr) return;
    if (units == 0) throw std::logic_error("what was prepared is for a stage without units");
    if (count_ == capacity_) throw std::logic_error("a program has more stages than it asked for");
    const Call call = bind(context, run, warm, run_range);
    Stage& stage = stages_[count_++];
    stage = {call.run, call.context, units, end_ - static_cast<const char*>(call.context), nullptr};
    Bound<Context>& bound = *static_cast<Bound<Context>*>(const_cast<void*>(call.context));
    bound.prepared = std::exchange(prepared_, nullptr);
    if (bound.prepared != nullptr)
      stage.prepare = [](const void* p, int member, bool has_unit_0) {
        for (const Preparation* q = static_cast<const Bound<Context>*>(p)->prepared; q != nullptr; q = q->next)
          q->run(q, member, has_unit_0);
      };
    if (warm != nullptr || bound.prepared != nullptr)
      stage.warm = [](const void* p, int64_t first, int64_t last) {
        const Bound<Context>& b = *static_cast<const Bound<Context>*>(p);
        for (const Preparation* q = b.prepared; q != nullptr; q = q->next) q->warm(q);
        if (b.warm != nullptr) b.warm(b.context, first, last);
      };
    if (run_range != nullptr)
      stage.run_range = [](const void* p, int64_t first, int64_t last, int member) {
        const Bound<Context>& b = *static_cast<const Bound<Context>*>(p);
        b.run_range(b.context, first, last, member);
      };
    bytes_ += bytes;
  }

  // Before the next stage's units: run(context, member, has_unit_0) for each member that takes part in it, in the order
  // of the calls. What it computes is the member's own, in a copy of `own` memory; what all shall read in later stages
  // only the member with unit 0 writes. Instead of a stage of one unit, which one member computes while all others wait
  // to meet. warm(context), if given, asks the caches for what it reads.
  template <class Context>
  void prepare(const Context& context, int64_t bytes, void (*run)(const Context&, int member, bool has_unit_0),
               void (*warm)(const Context&) = nullptr) {
    static_assert(std::is_trivially_copyable_v<Context> && std::is_trivially_destructible_v<Context>);
    struct Held : Preparation {
      Context context;
      void (*compute)(const Context&, int, bool);
      void (*read_ahead)(const Context&);
    };
    Held* held = scratch_.get<Held>(1);
    held->context = context;
    held->compute = run;
    held->read_ahead = warm;
    held->next = nullptr;
    held->run = [](const Preparation* p, int member, bool has_unit_0) {
      const Held& h = *static_cast<const Held*>(p);
      h.compute(h.context, member, has_unit_0);
    };
    held->warm = [](const Preparation* p) {
      const Held& h = *static_cast<const Held*>(p);
      if (h.read_ahead != nullptr) h.read_ahead(h.context);
    };
    Preparation** last = &prepared_;
    while (*last != nullptr) last = &(*last)->next;
    *last = held;
    bytes_ += bytes;
  }

  // Memory of which each member has a copy: `bytes` for member 0 and, `stride` bytes further, for each one after it.
  struct Own {
    char* memory;
    int64_t stride;
  };
  Own own(int64_t bytes) {
    const int64_t stride = (bytes + 63) / 64 * 64;
    return {scratch<char>(stride * members_), stride};
  }

  // Whether the last stage has this many units, so that one may follow() there.
  bool can_follow(int64_t units) const {
    return count_ > 0 && stages_[count_ - 1].units == units && stages_[count_ - 1].run_range == nullptr;
  }

  // Instead of a stage of its own: each unit of the last stage goes on with run(context, unit, member). That saves the
  // threads' meeting, and what the unit wrote is still in the core's cache. It may read nothing that another unit of
  // that stage writes.
  template <class Context>
  void follow(const Context& context, int64_t bytes, void (*run)(const Context&, int64_t unit, int member)) {
    Call* const next = next_;
    *next = bind<Context>(context, run, nullptr, nullptr);
    Stage& stage = stages_[count_ - 1];
    const int64_t length = end_ - static_cast<const char*>(stage.context);
    if (length > 0 && length <= kMaxContext) stage.context_bytes = length;
    bytes_ += bytes;
  }

  void run() { run_stages(stages_, count_, bytes_, members_); }

 private:
  static constexpr int kMaxBlocks = 64;
  static constexpr int64_t kMaxContext = 4096;  // bytes of a stage's contexts that are read ahead
  struct Block {
    void* memory;
    int64_t bytes;
  };
  struct Call {
    void (*run)(const void* context, int64_t unit, int member) = nullptr;
    const void* context = nullptr;
  };

  template <class Context>
  struct Bound {
    Context context;
    void (*run)(const Context&, int64_t, int);
    void (*warm)(const Context&, int64_t, int64_t);
    void (*run_range)(const Context&, int64_t, int64_t, int);
    Call next;
    const Preparation* prepared;
  };

  template <class Context>
  Call bind(const Context& context, void (*run)(const Context&, int64_t, int),
            void (*warm)(const Context&, int64_t, int64_t),
            void (*run_range)(const Context&, int64_t, int64_t, int)) {
    static_assert(std::is_trivially_copyable_v<Context> && std::is_trivially_destructible_v<Context>);
    Bound<Context>* bound = scratch_.get<Bound<Context>>(1);
    *bound = {context, run, warm, run_range, {}, nullptr};
    next_ = &bound->next;
    end_ = reinterpret_cast<const char*>(bound + 1);
    return {[](const void* p, int64_t unit, int member) {
              const Bound<Context>& b = *static_cast<const Bound<Context>*>(p);
              b.run(b.context, unit, member);
              if (b.next.run != nullptr) b.next.run(b.next.context, unit, member);
            },
            bound};
  }

  Scratch scratch_;
  Block block_[kMaxBlocks];
  int blocks_ = 0, next_block_ = 0;
  bool recording_ = false;
  Stage* stages_;
  Preparation* prepared_ = nullptr;  // for the next stage
  Call* next_ = nullptr;             // of what was bound last
  const char* end_ = nullptr;        // of its context
  int64_t capacity_, count_ = 0, bytes_ = 0;
  int members_;
};

}  // namespace tle
