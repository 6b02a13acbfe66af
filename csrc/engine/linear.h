// Linear layers as stages: quantise the rows once, then multiply by any number of weights that share them.
#pragma once

#include "csrc/engine/program.h"
#include "csrc/kernels/common/dtype.h"
#include "csrc/kernels/swiglu/swiglu.h"
#include "csrc/runtime/packed_weight.h"

namespace tle {

// A weight in place: packed (header) or dense row-major [n, k].
struct LinearWeight {
  const void* data = nullptr;
  bool packed = false;
  PackedHeader header;   // when packed
  PackedLayout layout;   // when packed: of the header, computed once and not for each unit
  DType dtype;           // when dense
  int64_t row_stride;    // when dense: elements
  int64_t n = 0, k = 0;
  const void* bias = nullptr;  // [n] or null
  DType bias_dtype = DType::kF32;
  int64_t bytes() const;

  // Row i of the weight, [k] of `as`, which a dense weight has itself. values: [k] of working memory.
  void row(int64_t i, DType as, void* out, float* values) const;
};

// Rows quantised with one scale a row (group 0) or one for each group of k.
struct QuantizedRows {
  int8_t* codes = nullptr;  // [rows, code_stride]; null: not made
  int64_t code_stride = 0;
  float* scales = nullptr;  // [rows, groups]
  int32_t* sums = nullptr;  // [rows, groups]
  int64_t own_stride = 0;   // bytes from one member's copy to the next one's; 0: all have the same

  // Whole lines of weights, and an odd number of 64 bytes: rows that lie a power of two apart would fight for the same
  // few places in the first-level cache.
  static constexpr int64_t stride_for(int64_t k) { return ((k + 63) / 64 | 1) * 64; }
};

// Rows of activations: as they are, and quantised in the ways that the weights they meet want.
struct Activation {
  static constexpr int32_t kGroups[] = {0, 32, 64, 128};

  const void* x = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0, k = 0, stride = 0;  // stride in elements
  int64_t own_stride = 0;               // of x: as in QuantizedRows
  QuantizedRows quantized[4];           // by kGroups

  // So few that every member computes them for itself (Program::prepare) sooner than all of them meet once more.
  bool small() const { return rows <= kOwnRows && rows * k <= kOwnElements; }
  static constexpr int64_t kOwnRows = 8, kOwnElements = 4096;

  // With this member's copies.
  Activation of(int member) const;

  const QuantizedRows& with_group(int32_t group) const;
};

// Adds what quantises the rows in every way that a weight of the list wants and that was not added before: where the
// units of the last stage, which wrote x, have whole groups in their hands, as their continuation; small rows by every
// member for itself, for the next stage only; otherwise as stages.
void add_quantize(Program& program, Activation& x, const LinearWeight* const* weights, int count,
                  UnitShape written = {});

struct LinearOut {
  void* out;
  int64_t stride;  // elements
  DType dtype;
};

// One stage: out[i] = x weights[i]^T + bias for every i. The rows must have been quantised if a weight is packed.
void add_linears(Program& program, const Activation& x, const LinearWeight* const* weights, const LinearOut* outs,
                 int count);

// One stage: SwiGLU of rows that lie in memory (kernels/swiglu). Returns what its units write of `out`.
UnitShape add_swiglu(Program& program, const SwigluArgs& args);

// One or two stages: out = silu(x gate^T + bias) * (x up^T + bias) in working memory, rounded where the unfused
// operators round. x's type is out's. Sets `written` to what the units of the last one write; a small `out` is computed
// by every member for itself, for the next stage only.
Activation add_gate_up(Program& program, const Activation& x, const LinearWeight& gate, const LinearWeight& up,
                       UnitShape& written);

}  // namespace tle
