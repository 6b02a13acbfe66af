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
void warm_units(const NormStage& stage, int64_t first, int64_t) {
  const RmsNormArgs& a = stage.args;
  if (first > 0 || a.rows > 1) return;
  const auto warm = [&](const void* p, DType t) {
    if (p != nullptr) prefetch_lines(static_cast<const char*>(p), (a.d * dtype_size(t) + 63) / 64);
  };
  warm(a.weight, a.weight_dtype);
  warm(a.residual, a.dtype);
}

}  // namespace

UnitShape add_rms_norm(Program& program, const RmsNormArgs& args) {
  const int64_t bytes_per_row = std::max<int64_t>(1, args.d) * dtype_size(args.dtype) * 2;
  const int64_t rows_per_unit = std::max<int64_t>(1, 16384 / bytes_per_row);
  program.add(NormStage{args, rms_norm_table.get(), rows_per_unit}, (args.rows + rows_per_unit - 1) / rows_per_unit,
              args.rows * bytes_per_row, run_unit, warm_units);
  return {rows_per_unit, args.d};
}

}  // namespace tle
