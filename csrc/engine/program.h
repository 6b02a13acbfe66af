// A call's work as a list of stages (runtime/threads.h) with their contexts. Everything lives in the call's scratch:
// building a program allocates nothing once the scratch has grown.
#pragma once

#include <stdint.h>

#include <stdexcept>
#include <type_traits>

#include "csrc/runtime/scratch.h"
#include "csrc/runtime/threads.h"

namespace tle {

class Program {
 public:
  explicit Program(int64_t max_stages)
      : stages_(scratch_.get<Stage>(max_stages)), capacity_(max_stages), members_(num_threads()) {}

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
  template <class Context>
  void add(const Context& context, int64_t units, int64_t bytes,
           void (*run)(const Context&, int64_t unit, int member)) {
    static_assert(std::is_trivially_copyable_v<Context> && std::is_trivially_destructible_v<Context>);
    if (units == 0) return;
    if (count_ == capacity_) throw std::logic_error("a program has more stages than it asked for");
    struct Bound {
      Context context;
      void (*run)(const Context&, int64_t, int);
    };
    Bound* bound = scratch_.get<Bound>(1);
    *bound = {context, run};
    stages_[count_++] = {[](const void* p, int64_t unit, int member) {
                           const Bound& b = *static_cast<const Bound*>(p);
                           b.run(b.context, unit, member);
                         },
                         bound, units, int64_t(sizeof(Bound))};
    bytes_ += bytes;
  }

  void run() { run_stages(stages_, count_, bytes_, members_); }

 private:
  static constexpr int kMaxBlocks = 64;
  struct Block {
    void* memory;
    int64_t bytes;
  };

  Scratch scratch_;
  Block block_[kMaxBlocks];
  int blocks_ = 0, next_block_ = 0;
  bool recording_ = false;
  Stage* stages_;
  int64_t capacity_, count_ = 0, bytes_ = 0;
  int members_;
};

}  // namespace tle
