#include "csrc/engine/norm.h"

#include <algorithm>

#include "csrc/kernels/common/prefetch.h"
#include "csrc/kernels/tables.h"

namespace tle {

namespace {

struct NormStage {
  RmsNormArgs args;
  RmsNormFn* fn;
  int64_t rows_per_unit;
};

const void* advance(const void* p, int64_t bytes) { return p ? static_cast<const char*>(p) + bytes : nullptr; }
void* advance(void* p, int64_t bytes) { return p ? static_cast<char*>(p) + bytes : nullptr; }

void run_unit(const NormStage& stage, int64_t unit, int) {
  RmsNormArgs a = stage.args;
  const int64_t first = unit * stage.rows_per_unit, size = dtype_size(a.dtype);
  a.rows = std::min(stage.rows_per_unit, a.rows - first);
  a.x = advance(a.x, first * a.x_stride * size);
  a.residual = advance(a.residual, first * a.residual_stride * size);
  a.sum = advance(a.sum, first * a.sum_stride * size);
  a.out = advance(a.out, first * a.out_stride * size);
  stage.fn(a);
}

// Of a few rows; many are read in a stream.
void warm_rows(const RmsNormArgs& a) {
  if (a.rows > 1) return;
  const auto warm = [&](const void* p, DType t) {
    if (p != nullptr) prefetch_lines(static_cast<const char*>(p), (a.d * dtype_size(t) + 63) / 64);
  };
  warm(a.weight, a.weight_dtype);
  warm(a.residual, a.dtype);
}

void warm_units(const NormStage& stage, int64_t first, int64_t) {
  if (first == 0) warm_rows(stage.args);
}

struct OwnNorm {
  RmsNormArgs args;
  RmsNormFn* fn;
  int64_t own_stride;
};

}  // namespace

void prepare_rms_norm(Program& program, const RmsNormArgs& args, int64_t own_stride) {
  program.prepare(
      OwnNorm{args, rms_norm_table.get(), own_stride}, args.rows * args.d * dtype_size(args.dtype) * 2,
      +[](const OwnNorm& n, int member, bool has_unit_0) {
        RmsNormArgs a = n.args;
        a.out = advance(a.out, member * n.own_stride);
        if (!has_unit_0) a.sum = nullptr;
        n.fn(a);
      },
      +[](const OwnNorm& n) { warm_rows(n.args); });
}

UnitShape add_rms_norm(Program& program, const RmsNormArgs& args) {
  const int64_t bytes_per_row = std::max<int64_t>(1, args.d) * dtype_size(args.dtype) * 2;
  const int64_t rows_per_unit = std::max<int64_t>(1, 16384 / bytes_per_row);
  program.add(NormStage{args, rms_norm_table.get(), rows_per_unit}, (args.rows + rows_per_unit - 1) / rows_per_unit,
              args.rows * bytes_per_row, run_unit, warm_units);
  return {rows_per_unit, args.d};
}

}  // namespace tle
