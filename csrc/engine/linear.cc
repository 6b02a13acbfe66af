#include "csrc/engine/linear.h"

#include <string.h>

#include <algorithm>
#include <stdexcept>

#include "csrc/kernels/common/prefetch.h"
#include "csrc/kernels/common/scalar.h"
#include "csrc/kernels/tables.h"

namespace tle {

namespace {

// Of weights per unit. A member's units lie side by side and are mostly computed several at a time, so they can be
// short: at the end of a stage somebody waits for half a unit. A dense weight is read as several streams of adjacent
// rows (kernels/linear_dense), which want to be long each.
constexpr int64_t kPackedUnitBytes = 16 * 1024, kDenseUnitBytes = 256 * 1024;
// Of weights per unit of a GEMM, which find room in the second-level cache together with the rows.
constexpr int64_t kGemmUnitBytes = 192 * 1024;
constexpr int64_t kGemmRows = 9;           // from here on a product is a GEMM: bound by multiply-adds and not by memory
constexpr int64_t kTilePanels = 3;         // panels that the widest tile takes at once
constexpr int64_t kRowBlock = 64;          // rows per unit of a GEMM
// With tiles (AMX) products are so fast that bringing weights anew for every 64 rows would take longer: so many bytes
// of rows instead, which still find room in the second-level cache of those CPUs.
constexpr int64_t kTileRowBytes = 512 * 1024, kMostTileRows = 256;
constexpr int kMaxWeights = 4;             // that share their rows in one stage
constexpr int64_t kSwigluColumns = 2048;   // per unit
constexpr int64_t kWarmBytes = 4096;       // of the weights that a stage begins with

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How one weight's outputs are divided: units of `panels_per_unit` panels x `row_block` rows, row blocks fastest, so
// that consecutive units find the same weights in the cache.
struct Grid {
  int64_t panels_per_unit, row_block, row_blocks, units;
};

int64_t row_block_of(const LinearWeight& w) {
  if (!w.packed) return kRowBlock;
  const Isa isa = w.header.act_group == 0 ? linear_w8_table.chosen_isa() : linear_group_table.chosen_isa();
  if (isa != Isa::kAmx) return kRowBlock;
  return std::clamp(kTileRowBytes / std::max<int64_t>(1, w.k) / kRowBlock * kRowBlock, kRowBlock, kMostTileRows);
}

Grid grid_of(const LinearWeight& w, int64_t rows, int members) {
  const int64_t panels = ceil_div(w.n, kPanelChannels);
  const int64_t panel_bytes = std::max<int64_t>(1, w.bytes() / std::max<int64_t>(1, panels));
  const int64_t unit_bytes = w.packed ? kPackedUnitBytes : kDenseUnitBytes;
  Grid g;
  if (rows < kGemmRows)
    g.panels_per_unit = std::max<int64_t>(1, unit_bytes / panel_bytes);
  else
    g.panels_per_unit = std::max<int64_t>(1, kGemmUnitBytes / panel_bytes / kTilePanels) * kTilePanels;
  g.row_block = row_block_of(w);
  g.row_blocks = ceil_div(rows, g.row_block);
  // At least four units for each member, so that the last one to finish keeps the others waiting only briefly.
  g.panels_per_unit = std::clamp<int64_t>(panels * g.row_blocks / (4 * members), 1, g.panels_per_unit);
  if (g.panels_per_unit > kTilePanels) g.panels_per_unit -= g.panels_per_unit % kTilePanels;
  g.units = ceil_div(panels, g.panels_per_unit) * g.row_blocks;
  return g;
}

struct Block {
  int64_t channel, channels, row, rows;
};

Block block_of(const LinearWeight& w, const Grid& g, int64_t rows, int64_t unit) {
  Block b;
  b.row = unit % g.row_blocks * g.row_block;
  b.rows = std::min(g.row_block, rows - b.row);
  b.channel = unit / g.row_blocks * g.panels_per_unit * kPanelChannels;
  b.channels = std::min(g.panels_per_unit * kPanelChannels, w.n - b.channel);
  return b;
}

// The kernels of a call, looked up once.
struct Kernels {
  LinearW8Fn* w8 = linear_w8_table.get();
  LinearGroupFn* group = linear_group_table.get();
  LinearDenseFn* dense = linear_dense_table.get();
  SwigluFn* swiglu = swiglu_table.get();
  bool hints = weight_hints_pay();
};

const void* offset(const void* p, int64_t elements, DType t) {
  return p ? static_cast<const char*>(p) + elements * dtype_size(t) : nullptr;
}
void* offset(void* p, int64_t elements, DType t) { return static_cast<char*>(p) + elements * dtype_size(t); }

void compute_w8(const Kernels& kernels, const Activation& x, const LinearWeight& w, const LinearOut& out,
                const Block& b) {
  const PackedLayout& l = w.layout;
  const QuantizedRows& q = x.with_group(0);
  LinearW8Args a;
  a.panels = static_cast<const uint8_t*>(w.data) + sizeof(PackedHeader) + b.channel / kPanelChannels * l.panel_stride;
  a.panel_stride = l.panel_stride;
  a.scale_offset = l.scale_offset;
  a.lines = l.lines;
  a.n = b.channels;
  a.x = q.codes + b.row * q.code_stride;
  a.x_stride = q.code_stride;
  a.x_scale = q.scales + b.row;
  a.x_sum = q.sums + b.row;
  a.rows = b.rows;
  a.bias = offset(w.bias, b.channel, w.bias_dtype);
  a.bias_dtype = w.bias_dtype;
  a.out = offset(out.out, b.row * out.stride + b.channel, out.dtype);
  a.out_stride = out.stride;
  a.out_dtype = out.dtype;
  kernels.w8(a);
}

DType dtype_of(ScaleType t) {
  return t == ScaleType::kF32 ? DType::kF32 : t == ScaleType::kF16 ? DType::kF16 : DType::kBF16;
}

void compute_group(const Kernels& kernels, const Activation& x, const LinearWeight& w, const LinearOut& out,
                   const Block& b) {
  const PackedLayout& l = w.layout;
  const QuantizedRows& q = x.with_group(w.header.act_group);
  const int64_t groups = ceil_div(w.k, w.header.act_group);
  LinearGroupArgs a;
  a.panels = static_cast<const uint8_t*>(w.data) + sizeof(PackedHeader) + b.channel / kPanelChannels * l.panel_stride;
  a.panel_stride = l.panel_stride;
  a.scale_offset = l.scale_offset;
  a.k = w.k;
  a.group = w.header.act_group;
  a.n = b.channels;
  a.codes = w.header.scheme == Scheme::kW8A8   ? GroupCodes::kInt8
            : w.header.scheme == Scheme::kW4A8 ? GroupCodes::kInt4
                                               : GroupCodes::kInt4Min;
  a.channel_scale = w.header.group == 0;
  a.scale_type = dtype_of(w.header.scale_type);
  a.hints = kernels.hints;
  a.x = q.codes + b.row * q.code_stride;
  a.x_stride = q.code_stride;
  a.x_scale = q.scales + b.row * groups;
  a.x_sum = q.sums + b.row * groups;
  a.rows = b.rows;
  a.bias = offset(w.bias, b.channel, w.bias_dtype);
  a.bias_dtype = w.bias_dtype;
  a.out = offset(out.out, b.row * out.stride + b.channel, out.dtype);
  a.out_stride = out.stride;
  a.out_dtype = out.dtype;
  kernels.group(a);
}

void compute_dense(const Kernels& kernels, const Activation& x, const LinearWeight& w, const LinearOut& out,
                   const Block& b) {
  LinearDenseArgs a;
  a.x = offset(x.x, b.row * x.stride, x.dtype);
  a.w = offset(w.data, b.channel * w.row_stride, w.dtype);
  a.bias = offset(w.bias, b.channel, w.bias_dtype);
  a.out = offset(out.out, b.row * out.stride + b.channel, out.dtype);
  a.rows = b.rows;
  a.n = b.channels;
  a.k = w.k;
  a.x_stride = x.stride;
  a.w_stride = w.row_stride;
  a.out_stride = out.stride;
  a.dtype = w.dtype;
  a.bias_dtype = w.bias_dtype;
  a.out_dtype = out.dtype;
  kernels.dense(a);
}

// out[row .. , channel ..] for one block.
void compute(const Kernels& kernels, const Activation& x, const LinearWeight& w, const LinearOut& out, const Block& b) {
  if (!w.packed) return compute_dense(kernels, x, w, out, b);
  if (w.header.act_group == 0) return compute_w8(kernels, x, w, out, b);
  compute_group(kernels, x, w, out, b);
}

int64_t traffic(const LinearWeight& w, int64_t rows) { return w.bytes() * std::max<int64_t>(1, rows / 8); }

// A member's copy, which lies `bytes` behind the first one's.
template <class T>
T* own(T* p, int64_t bytes) {
  return p ? reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(p) + uintptr_t(bytes)) : nullptr;
}

struct QuantizeStage {
  QuantizeRowsArgs args;
  QuantizeRowsFn* fn;
  UnitShape unit;                     // whole groups; more than one row only where a unit has all columns
  int64_t x_stride = 0, q_stride = 0;  // from one member's copy to the next one's, bytes
};

void prepare_quantized(const QuantizeStage& s, int member, bool) {
  QuantizeRowsArgs a = s.args;
  a.x = static_cast<const char*>(a.x) + member * s.x_stride;
  a.codes = own(a.codes, member * s.q_stride);
  a.scales = own(a.scales, member * s.q_stride);
  a.sums = own(a.sums, member * s.q_stride);
  s.fn(a);
}

void run_quantize(const QuantizeStage& s, int64_t unit, int) {
  QuantizeRowsArgs a = s.args;
  const int64_t across = std::max<int64_t>(1, ceil_div(a.k, s.unit.columns));
  const int64_t row = unit / across * s.unit.rows, column = unit % across * s.unit.columns;
  const int64_t groups = a.group ? ceil_div(a.k, a.group) : 1, at = row * groups + (a.group ? column / a.group : 0);
  a.rows = std::min(s.unit.rows, a.rows - row);
  a.x = offset(a.x, row * a.x_stride + column, a.dtype);
  a.codes += row * a.code_stride + column;
  a.scales += at;
  a.sums += at;
  if (across > 1) {
    // Codes end with zeros up to the stride, which here is the place where the next unit's begin.
    const bool last = column + s.unit.columns >= a.k;
    a.code_stride = last ? a.code_stride - column : s.unit.columns;
    a.k = last ? a.k - column : s.unit.columns;
  }
  s.fn(a);
}

struct LinearsStage {
  Kernels kernels;
  Activation x;
  LinearWeight weights[kMaxWeights];
  LinearOut outs[kMaxWeights];
  Grid grids[kMaxWeights];
  int count;
};

void run_linears(const LinearsStage& s, int64_t unit, int member) {
  int i = 0;
  while (unit >= s.grids[i].units) unit -= s.grids[i++].units;
  compute(s.kernels, s.x.of(member), s.weights[i], s.outs[i], block_of(s.weights[i], s.grids[i], s.x.rows, unit));
}

// Few rows: units that are neighbours are one block of channels.
void run_linears_range(const LinearsStage& s, int64_t first, int64_t last, int member) {
  const Activation x = s.x.of(member);
  int i = 0;
  for (; first < last; ++i) {
    const Grid& g = s.grids[i];
    const int64_t end = std::min(last, g.units);
    if (first < end) {
      Block b = block_of(s.weights[i], g, s.x.rows, first);
      b.channels = std::min((end - first) * g.panels_per_unit * kPanelChannels, s.weights[i].n - b.channel);
      compute(s.kernels, x, s.weights[i], s.outs[i], b);
    }
    first = std::max<int64_t>(0, first - g.units);
    last -= g.units;
  }
}

// The beginning of the first unit's weights, for the hardware to go on from.
void warm_linears(const LinearsStage& s, int64_t first, int64_t) {
  int i = 0;
  while (first >= s.grids[i].units) first -= s.grids[i++].units;
  const LinearWeight& w = s.weights[i];
  const int64_t channel = block_of(w, s.grids[i], s.x.rows, first).channel;
  const int64_t at = w.packed ? int64_t(sizeof(PackedHeader)) + channel / kPanelChannels * w.layout.panel_stride
                              : channel * w.row_stride * dtype_size(w.dtype);
  const char* from = static_cast<const char*>(w.data) + at;
  prefetch_lines(from, std::min(kWarmBytes, w.bytes() - at) / 64);
}

struct SwigluStage {
  SwigluArgs args;
  SwigluFn* fn;
  int64_t blocks;          // of kSwigluColumns columns
  int64_t own_stride = 0;  // of out, bytes
};

struct GateUpStage {
  Kernels kernels;
  Activation x;
  LinearWeight gate, up;
  LinearOut out, up_out;
  Grid grid;
};

}  // namespace

int64_t LinearWeight::bytes() const {
  return packed ? layout.total_bytes : n * k * dtype_size(dtype);
}

void LinearWeight::row(int64_t i, DType as, void* out, float* values) const {
  if (!packed) {
    memcpy(out, offset(data, i * row_stride, dtype), size_t(k * dtype_size(dtype)));
    return;
  }
  unpack_channel(header, static_cast<const uint8_t*>(data), i, values);
  for (int64_t j = 0; j < k; ++j) scalar::store(as, out, j, values[j]);
}

const QuantizedRows& Activation::with_group(int32_t group) const {
  for (size_t i = 0; i < std::size(kGroups); ++i)
    if (kGroups[i] == group) return quantized[i];
  throw std::logic_error("a packed weight wants activation groups that no scheme has");
}

Activation Activation::of(int member) const {
  Activation a = *this;
  a.x = own(static_cast<const char*>(x), member * own_stride);
  for (QuantizedRows& q : a.quantized) {
    q.codes = own(q.codes, member * q.own_stride);
    q.scales = own(q.scales, member * q.own_stride);
    q.sums = own(q.sums, member * q.own_stride);
  }
  return a;
}

void add_quantize(Program& program, Activation& x, const LinearWeight* const* weights, int count, UnitShape written) {
  // Continuations first: they belong to the stage that is the last one now.
  for (const bool following : {true, false})
    for (int w = 0; w < count; ++w) {
      if (!weights[w]->packed) continue;
      const int32_t group = weights[w]->header.act_group;
      QuantizedRows& q = const_cast<QuantizedRows&>(x.with_group(group));
      if (q.codes != nullptr) continue;
      QuantizeStage stage;
      stage.unit = {std::max<int64_t>(1, 8192 / std::max<int64_t>(1, x.k)), std::max<int64_t>(1, x.k)};
      if (following) {
        const bool whole = written.columns >= x.k;
        const bool groups = written.rows == 1 && group > 0 && written.columns % group == 0;
        if (x.own_stride != 0 || written.rows == 0 || written.columns == 0 || !(whole || groups)) continue;
        stage.unit = written;
      }
      const int64_t units = ceil_div(x.rows, stage.unit.rows) * std::max<int64_t>(1, ceil_div(x.k, stage.unit.columns));
      if (following && !program.can_follow(units)) continue;
      const int64_t groups = group ? ceil_div(x.k, group) : 1;
      q.code_stride = QuantizedRows::stride_for(x.k);
      const int64_t code_bytes = x.rows * q.code_stride, scale_bytes = ceil_div(x.rows * groups * 4, 64) * 64;
      Program::Own memory = {};
      if (!following && x.small()) {
        memory = program.own(code_bytes + 2 * scale_bytes);
        q.own_stride = memory.stride;
      } else {
        memory.memory = program.scratch<char>(code_bytes + 2 * scale_bytes);
      }
      q.codes = reinterpret_cast<int8_t*>(memory.memory);
      q.scales = reinterpret_cast<float*>(memory.memory + code_bytes);
      q.sums = reinterpret_cast<int32_t*>(memory.memory + code_bytes + scale_bytes);
      stage.x_stride = x.own_stride;
      stage.q_stride = q.own_stride;
      stage.args = {x.x, q.codes, q.scales, q.sums, x.rows, x.k, group, x.stride, q.code_stride, x.dtype};
      stage.fn = quantize_rows_table.get();
      const int64_t bytes = x.rows * x.k * dtype_size(x.dtype);
      if (following)
        program.follow(stage, bytes, run_quantize);
      else if (q.own_stride != 0)
        program.prepare(stage, bytes, prepare_quantized);
      else
        program.add(stage, units, bytes, run_quantize);
    }
}

void add_linears(Program& program, const Activation& x, const LinearWeight* const* weights, const LinearOut* outs,
                 int count) {
  if (count > kMaxWeights) throw std::logic_error("too many weights in one stage");
  LinearsStage stage;
  stage.x = x;
  stage.count = count;
  int64_t units = 0, bytes = 0;
  for (int i = 0; i < count; ++i) {
    stage.weights[i] = *weights[i];
    stage.outs[i] = outs[i];
    stage.grids[i] = grid_of(*weights[i], x.rows, program.members());
    units += stage.grids[i].units;
    bytes += traffic(*weights[i], x.rows);
  }
  program.add(stage, units, bytes, run_linears, warm_linears, x.rows < kGemmRows ? run_linears_range : nullptr);
}

UnitShape add_swiglu(Program& program, const SwigluArgs& args) {
  const SwigluStage stage = {args, swiglu_table.get(), ceil_div(args.n, kSwigluColumns)};
  const int64_t bytes = 3 * args.rows * args.n * dtype_size(args.dtype);
  program.add(stage, args.rows * stage.blocks, bytes, +[](const SwigluStage& s, int64_t unit, int) {
    const int64_t row = unit / s.blocks, column = unit % s.blocks * kSwigluColumns;
    SwigluArgs a = s.args;
    a.rows = 1;
    a.n = std::min(kSwigluColumns, a.n - column);
    a.gate = offset(a.gate, row * a.gate_stride + column, a.dtype);
    a.up = offset(a.up, row * a.up_stride + column, a.dtype);
    a.out = offset(a.out, row * a.out_stride + column, a.dtype);
    s.fn(a);
  });
  return {1, kSwigluColumns};
}

Activation add_gate_up(Program& program, const Activation& x, const LinearWeight& gate, const LinearWeight& up,
                       UnitShape& written) {
  const int64_t bytes = x.rows * gate.n * dtype_size(x.dtype);
  const LinearOut out = {program.scratch<char>(bytes), gate.n, x.dtype};
  const LinearOut up_out = {program.scratch<char>(bytes), up.n, x.dtype};
  Activation inner;
  inner.x = out.out;
  inner.dtype = x.dtype;
  inner.rows = x.rows;
  inner.k = inner.stride = gate.n;
  written = {};
  if (x.rows < kGemmRows) {
    // Memory is read faster in one stream after the other (Zen 4: by 15 %) than with both in turn.
    const LinearWeight* weights[] = {&gate, &up};
    const LinearOut outs[] = {out, up_out};
    add_linears(program, x, weights, outs, 2);
    SwigluArgs args = {out.out, up_out.out, out.out, x.rows, gate.n, out.stride, up_out.stride, out.stride, out.dtype};
    if (!inner.small()) {
      written = add_swiglu(program, args);
      return inner;
    }
    const Program::Own memory = program.own(bytes);
    args.out = memory.memory;
    inner.x = memory.memory;
    inner.own_stride = memory.stride;
    const SwigluStage stage = {args, swiglu_table.get(), 1, memory.stride};
    program.prepare(stage, 3 * bytes, +[](const SwigluStage& s, int member, bool) {
      SwigluArgs a = s.args;
      a.out = static_cast<char*>(a.out) + member * s.own_stride;
      s.fn(a);
    });
    return inner;
  }
  GateUpStage stage;
  stage.x = x;
  stage.gate = gate;
  stage.up = up;
  stage.out = out;
  stage.up_out = up_out;
  stage.grid = grid_of(gate, x.rows, program.members());
  program.add(
      stage, stage.grid.units, traffic(gate, x.rows) + traffic(up, x.rows),
      +[](const GateUpStage& s, int64_t unit, int) {
        const Block b = block_of(s.gate, s.grid, s.x.rows, unit);
        compute(s.kernels, s.x, s.gate, s.out, b);
        compute(s.kernels, s.x, s.up, s.up_out, b);
        SwigluArgs a;
        a.gate = a.out = offset(s.out.out, b.row * s.out.stride + b.channel, s.out.dtype);
        a.up = offset(s.up_out.out, b.row * s.up_out.stride + b.channel, s.up_out.dtype);
        a.rows = b.rows;
        a.n = b.channels;
        a.gate_stride = a.out_stride = s.out.stride;
        a.up_stride = s.up_out.stride;
        a.dtype = s.out.dtype;
        s.kernels.swiglu(a);
      });
  return inner;
}

}  // namespace tle
