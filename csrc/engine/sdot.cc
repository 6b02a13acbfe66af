#include "csrc/engine/sdot.h"

#include <algorithm>

#include "csrc/kernels/tables.h"

namespace tle {

namespace {

constexpr int64_t kMostChannels = 512;  // of a unit: 2 KiB of each kb, a chunk of the kernel
constexpr int64_t kMostRows = 16;       // of a unit

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct SdotStage {
  SdotGemvArgs args;
  SdotGemvFn* fn;
  int64_t channels, channel_blocks;  // of a unit, in all
};

struct QuantizeStage {
  QuantizeRowsArgs args;
  QuantizeRowsFn* fn;
};

}  // namespace

void add_sdot_gemv(Program& program, const SdotGemvArgs& args) {
  SdotStage stage;
  stage.args = args;
  stage.fn = sdot_gemv_table.get();
  // Whole lines of 16 channels, and at least four units for each member.
  stage.channels = std::min(kMostChannels, ceil_div(args.n, 4 * 16 * program.members()) * 16);
  stage.channel_blocks = ceil_div(args.n, std::max<int64_t>(1, stage.channels));
  const int64_t bytes = args.n * 4 * args.blocks * std::max<int64_t>(1, args.rows / 8);
  const int64_t units = stage.channel_blocks * ceil_div(args.rows, kMostRows);
  program.add(stage, units, bytes, +[](const SdotStage& s, int64_t unit, int) {
    SdotGemvArgs a = s.args;
    const int64_t channel = unit % s.channel_blocks * s.channels, row = unit / s.channel_blocks * kMostRows;
    a.n = std::min(s.channels, a.n - channel);
    a.rows = std::min(kMostRows, a.rows - row);
    a.packed += 4 * channel;
    a.a += row * a.a_stride;
    const int64_t first = row * a.out_stride + channel;
    if (a.a_scale) {
      a.a_scale += row;
      a.b_scale += channel;
      a.out = static_cast<uint16_t*>(a.out) + first;
    } else {
      a.out = static_cast<int32_t*>(a.out) + first;
    }
    s.fn(a);
  });
}

void add_sdot_linear(Program& program, const void* x, int64_t x_stride, DType x_dtype, SdotGemvArgs args) {
  const int64_t k = 4 * args.blocks;
  int8_t* codes = program.scratch<int8_t>(args.rows * k);
  float* scales = program.scratch<float>(args.rows);
  int32_t* sums = program.scratch<int32_t>(args.rows);
  QuantizeStage stage;
  stage.args = {x, codes, scales, sums, 1, k, 0, x_stride, k, x_dtype};
  stage.fn = quantize_rows_table.get();
  program.add(stage, args.rows, args.rows * k * dtype_size(x_dtype), +[](const QuantizeStage& s, int64_t row, int) {
    QuantizeRowsArgs a = s.args;
    a.x = static_cast<const char*>(a.x) + row * a.x_stride * dtype_size(a.dtype);
    a.codes += row * a.code_stride;
    a.scales += row;
    a.sums += row;
    s.fn(a);
  });
  args.a = codes;
  args.a_stride = k;
  args.a_scale = scales;
  add_sdot_gemv(program, args);
}

}  // namespace tle
