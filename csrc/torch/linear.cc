// linear, the making and reading of packed weights, quantize_rows, swiglu and fused_mlp.
#include "csrc/engine/linear.h"

#include <string.h>

#include <algorithm>

#include "csrc/kernels/tables.h"
#include "csrc/torch/checks.h"
#include "csrc/torch/torch_headers.h"

namespace tle {

namespace {

Activation activation_of(const Rows& rows, DType dtype) {
  Activation x;
  x.x = rows.data;
  x.dtype = dtype;
  x.rows = rows.rows;
  x.k = rows.size;
  x.stride = rows.stride;
  return x;
}

std::vector<int64_t> with_last(at::IntArrayRef sizes, int64_t last) {
  std::vector<int64_t> out = sizes.vec();
  out.back() = last;
  return out;
}

// ---- weights ----

// One panel of a float weight: 16 rows quantised by the row rule and packed.
struct PackStage {
  QuantizeRowsArgs rows;
  QuantizeRowsFn* quantize;
  PackedHeader header;
  uint8_t* packed;
  int8_t* codes;  // [members][16][k]
  float* scales;  // [members][16]
  int32_t* sums;
};

at::Tensor quantize_linear_weight(const at::Tensor& weight, c10::string_view scheme, int64_t group_size) {
  const char* op = "quantize_linear_weight";
  check_dim(op, "weight", weight, 2);
  const DType dtype = float_dtype(op, "weight", weight);
  const SchemeInfo& info = scheme_of(std::string(scheme));
  TORCH_CHECK_VALUE(group_size == 0, op, ": scheme ", info.name, " has one scale per channel; group_size must be 0, got ",
                    group_size);
  const int64_t n = weight.size(0), k = weight.size(1);
  const PackedHeader header = make_header(info.scheme, n, k);
  const PackedLayout layout = layout_of(header);
  at::Tensor packed = at::empty({layout.total_bytes}, weight.options().dtype(at::kByte));
  memcpy(packed.mutable_data_ptr(), &header, sizeof header);
  if (k == 0) return packed.slice(0, int64_t(sizeof header)).zero_(), packed;

  const Rows rows = rows_of(weight);
  Program program(1);
  const int members = program.members();
  PackStage stage;
  stage.rows = {rows.data, nullptr, nullptr, nullptr, n, k, rows.stride, k, dtype};
  stage.quantize = quantize_rows_table.get();
  stage.header = header;
  stage.packed = packed.mutable_data_ptr<uint8_t>();
  stage.codes = program.scratch<int8_t>(members * kPanelChannels * k);
  stage.scales = program.scratch<float>(members * kPanelChannels);
  stage.sums = program.scratch<int32_t>(members * kPanelChannels);
  program.add(stage, layout.panels, weight.numel() * dtype_size(dtype), +[](const PackStage& s, int64_t panel, int member) {
    QuantizeRowsArgs a = s.rows;
    const int64_t first = panel * kPanelChannels;
    a.rows = std::min(kPanelChannels, a.rows - first);
    a.x = static_cast<const char*>(a.x) + first * a.x_stride * dtype_size(a.dtype);
    a.codes = s.codes + member * kPanelChannels * a.k;
    a.scales = s.scales + member * kPanelChannels;
    a.sums = s.sums + member * kPanelChannels;
    s.quantize(a);
    pack_panel_w8(s.header, s.packed, panel, a.codes - first * a.k, a.k, a.scales - first);
  });
  program.run();
  return packed;
}

at::Tensor pack_linear_weight(const at::Tensor& codes, const at::Tensor& scales, c10::string_view scheme) {
  const char* op = "pack_linear_weight";
  check_dtype(op, "codes", codes, at::kChar);
  check_dim(op, "codes", codes, 2);
  check_dtype(op, "scales", scales, at::kFloat);
  check_dim(op, "scales", scales, 1);
  check_size(op, "scales", scales, 0, codes.size(0), "one per row of codes");
  const int64_t n = codes.size(0), k = codes.size(1);
  const at::Tensor dense = codes.contiguous(), s = scales.contiguous();
  const int8_t* data = dense.const_data_ptr<int8_t>();
  TORCH_CHECK_VALUE(k <= kMaxKFullRange || std::find(data, data + n * k, int8_t(-128)) == data + n * k, op,
                    ": codes of -128 with K = ", k, " could overflow an int32 sum; the limit is ", kMaxKFullRange);
  const PackedHeader header = make_header(scheme_of(std::string(scheme)).scheme, n, k);
  const PackedLayout layout = layout_of(header);
  at::Tensor packed = at::empty({layout.total_bytes}, codes.options().dtype(at::kByte));
  uint8_t* out = packed.mutable_data_ptr<uint8_t>();
  memcpy(out, &header, sizeof header);
  for (int64_t p = 0; p < layout.panels; ++p) pack_panel_w8(header, out, p, data, k, s.const_data_ptr<float>());
  return packed;
}

at::Tensor dequantize_linear_weight(const at::Tensor& packed, int64_t out_features, int64_t in_features,
                                    at::ScalarType dtype) {
  const char* op = "dequantize_linear_weight";
  check_dtype(op, "packed", packed, at::kByte);
  check_dim(op, "packed", packed, 1);
  const at::Tensor bytes = packed.contiguous();
  const PackedHeader header = read_header(bytes.const_data_ptr(), bytes.numel());
  TORCH_CHECK_VALUE(header.n == out_features && header.k == in_features, op, ": packed holds [", header.n, ", ", header.k,
                    "], expected [", out_features, ", ", in_features, "]");
  const PackedLayout layout = layout_of(header);
  at::Tensor weight = at::empty({out_features, in_features}, packed.options().dtype(at::kFloat));
  float* out = weight.mutable_data_ptr<float>();
  for (int64_t n = 0; n < out_features; ++n) {
    const uint8_t* panel = bytes.const_data_ptr<uint8_t>() + sizeof header + n / 16 * layout.panel_stride;
    const int8_t* codes = reinterpret_cast<const int8_t*>(panel) + n % 16 * 4;
    float scale;
    memcpy(&scale, panel + layout.scale_offset + n % 16 * 4, 4);
    for (int64_t k = 0; k < in_features; ++k) out[n * in_features + k] = scale * float(codes[k / 4 * 64 + k % 4]);
  }
  return weight.to(dtype);
}

// ---- computing ----

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, int64_t out_features, const std::optional<at::Tensor>& bias) {
  const char* op = "linear";
  const DType dtype = float_dtype(op, "x", x);
  TORCH_CHECK_VALUE(x.dim() >= 1, op, ": x must have at least one dimension, got a scalar");
  std::vector<at::Tensor> keep;
  const LinearWeight w = linear_weight(op, "weight", weight, out_features, x.size(-1), bias, dtype, keep);
  at::Tensor out = at::empty(with_last(x.sizes(), out_features), x.options());
  if (out.numel() == 0) return out;
  Rows rows = rows_of(x);
  rows.rows = out.numel() / out_features;  // K = 0 has rows too: they are the bias

  Program program(2);
  Activation a = activation_of(rows, dtype);
  const LinearWeight* weights[] = {&w};
  const LinearOut outs[] = {{out.mutable_data_ptr(), out_features, dtype}};
  add_quantize(program, a, weights, 1);
  add_linears(program, a, weights, outs, 1);
  program.run();
  return out;
}

std::tuple<at::Tensor, at::Tensor> quantize_rows(const at::Tensor& x) {
  const char* op = "quantize_rows";
  const DType dtype = float_dtype(op, "x", x);
  TORCH_CHECK_VALUE(x.dim() >= 1, op, ": x must have at least one dimension, got a scalar");
  const auto leading = x.sizes().slice(0, size_t(x.dim() - 1));
  at::Tensor codes = at::empty(x.sizes(), x.options().dtype(at::kChar));
  at::Tensor scales = at::empty(leading, x.options().dtype(at::kFloat));
  at::Tensor sums = at::empty(leading, x.options().dtype(at::kInt));
  const Rows rows = rows_of(x);
  quantize_rows_table.get()({rows.data, codes.mutable_data_ptr<int8_t>(), scales.mutable_data_ptr<float>(),
                             sums.mutable_data_ptr<int32_t>(), scales.numel(), rows.size, rows.stride, rows.size, dtype});
  return {codes, scales};
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  const char* op = "swiglu";
  const DType dtype = float_dtype(op, "gate", gate);
  check_dtype(op, "up", up, gate.scalar_type());
  TORCH_CHECK_VALUE(gate.dim() >= 1, op, ": gate must have at least one dimension, got a scalar");
  TORCH_CHECK_VALUE(gate.sizes() == up.sizes(), op, ": up must have gate's shape ", gate.sizes(), ", got ", up.sizes());
  at::Tensor out = at::empty(gate.sizes(), gate.options());
  if (out.numel() == 0) return out;
  const Rows g = rows_of(gate), u = rows_of(up);

  struct SwigluStage {
    SwigluArgs args;
    SwigluFn* fn;
    int64_t columns;  // per unit
  };
  SwigluStage stage{{g.data, u.data, out.mutable_data_ptr(), g.rows, g.size, g.stride, u.stride, g.size, dtype},
                    swiglu_table.get(), 4096};
  const int64_t blocks = (g.size + stage.columns - 1) / stage.columns;
  Program program(1);
  program.add(stage, blocks * g.rows, out.numel() * dtype_size(dtype) * 3, +[](const SwigluStage& s, int64_t unit, int) {
    const int64_t blocks = (s.args.n + s.columns - 1) / s.columns, row = unit / blocks, column = unit % blocks * s.columns;
    const int64_t size = dtype_size(s.args.dtype);
    SwigluArgs a = s.args;
    a.rows = 1;
    a.n = std::min(s.columns, a.n - column);
    a.gate = static_cast<const char*>(a.gate) + (row * a.gate_stride + column) * size;
    a.up = static_cast<const char*>(a.up) + (row * a.up_stride + column) * size;
    a.out = static_cast<char*>(a.out) + (row * a.out_stride + column) * size;
    s.fn(a);
  });
  program.run();
  return out;
}

at::Tensor fused_mlp(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& up, const at::Tensor& down,
                     int64_t intermediate_size, const std::optional<at::Tensor>& gate_bias,
                     const std::optional<at::Tensor>& up_bias, const std::optional<at::Tensor>& down_bias) {
  const char* op = "fused_mlp";
  const DType dtype = float_dtype(op, "x", x);
  TORCH_CHECK_VALUE(x.dim() >= 1, op, ": x must have at least one dimension, got a scalar");
  const int64_t hidden = x.size(-1);
  std::vector<at::Tensor> keep;
  const LinearWeight g = linear_weight(op, "gate", gate, intermediate_size, hidden, gate_bias, dtype, keep);
  const LinearWeight u = linear_weight(op, "up", up, intermediate_size, hidden, up_bias, dtype, keep);
  const LinearWeight d = linear_weight(op, "down", down, hidden, intermediate_size, down_bias, dtype, keep);
  at::Tensor out = at::empty(x.sizes(), x.options());
  if (out.numel() == 0) return out;
  const Rows rows = rows_of(x);

  Program program(4);
  Activation a = activation_of(rows, dtype);
  const LinearWeight *first[] = {&g, &u}, *second[] = {&d};
  add_quantize(program, a, first, 2);
  Activation inner;
  inner.x = program.scratch<char>(rows.rows * intermediate_size * dtype_size(dtype));
  inner.dtype = dtype;
  inner.rows = rows.rows;
  inner.k = inner.stride = intermediate_size;
  add_gate_up(program, a, g, u, {const_cast<void*>(inner.x), inner.stride, dtype});
  add_quantize(program, inner, second, 1);
  const LinearOut outs[] = {{out.mutable_data_ptr(), hidden, dtype}};
  add_linears(program, inner, second, outs, 1);
  program.run();
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(tle, CPU, m) {
  m.impl("quantize_linear_weight", quantize_linear_weight);
  m.impl("pack_linear_weight", pack_linear_weight);
  m.impl("dequantize_linear_weight", dequantize_linear_weight);
  m.impl("linear", linear);
  m.impl("quantize_rows", quantize_rows);
  m.impl("swiglu", swiglu);
  m.impl("fused_mlp", fused_mlp);
}

}  // namespace tle
