// linear, the making and reading of packed weights, quantize_rows, swiglu and fused_mlp.
#include "csrc/engine/linear.h"

#include <string.h>

#include <algorithm>
#include <atomic>
#include <cmath>

#include "csrc/kernels/common/scalar.h"
#include "csrc/kernels/tables.h"
#include "csrc/torch/checks.h"
#include "csrc/torch/huge_tensor.h"
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

// What one panel of a float weight needs: 16 rows in fp32, their codes, scales and minima.
struct PackStage {
  Rows const* rows;
  DType dtype;
  PackedHeader header;
  int64_t groups;
  uint8_t* packed;
  float* values;    // [members][k]
  int8_t* codes;    // [members][16][k]
  float *scales, *mins;  // [members][16][groups]
  std::atomic<bool>* too_small_or_large;
};

// fp16 keeps its precision only from 2^-14 to 65504; a zero is exact.
bool fits_f16(float x) { return x == 0.0f || !(std::fabs(x) < 0x1p-14f || std::fabs(x) > 65504.0f); }

void quantize_panel(const PackStage& s, int64_t panel, int member) {
  const PackedHeader& h = s.header;
  const int64_t first = panel * kPanelChannels, channels = std::min(kPanelChannels, h.n - first);
  float* values = s.values + member * h.k;
  int8_t* codes = s.codes + member * kPanelChannels * h.k;
  float* scales = s.scales + member * kPanelChannels * s.groups;
  float* mins = s.mins + member * kPanelChannels * s.groups;
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t k = 0; k < h.k; ++k) values[k] = scalar::load(s.dtype, s.rows->data, (first + c) * s.rows->stride + k);
    quantize_channel(h, values, codes + c * h.k, scales + c * s.groups, mins + c * s.groups);
    for (int64_t g = 0; g < s.groups && h.scale_type == ScaleType::kF16; ++g)
      if (!fits_f16(scales[c * s.groups + g]) || (h.min_type != ScaleType::kNone && !fits_f16(mins[c * s.groups + g])))
        s.too_small_or_large->store(true, std::memory_order_relaxed);
  }
  pack_panel(h, s.packed, panel, codes, h.k, scales, h.min_type == ScaleType::kNone ? nullptr : mins);
}

at::Tensor quantize_linear_weight(const at::Tensor& weight, c10::string_view scheme, int64_t group_size) {
  const char* op = "quantize_linear_weight";
  check_dim(op, "weight", weight, 2);
  const DType dtype = float_dtype(op, "weight", weight);
  const SchemeSpec spec = parse_scheme(std::string(scheme), group_size);
  PackedHeader header = make_header(spec, weight.size(0), weight.size(1));
  const PackedLayout layout = layout_of(header);
  at::Tensor packed = empty_huge({layout.total_bytes}, weight.options().dtype(at::kByte), Arena::kWeights);
  const Rows rows = rows_of(weight);
  // Grouped scales are fp16, as GGUF has them, or bf16 for the whole tensor where one of them is outside fp16's normal
  // range.
  for (bool again = true; again;) {
    Program program(1);
    const int64_t members = program.members();
    std::atomic<bool> outside{false};
    PackStage stage;
    stage.rows = &rows;
    stage.dtype = dtype;
    stage.header = header;
    stage.groups = layout.groups;
    stage.packed = packed.mutable_data_ptr<uint8_t>();
    stage.values = program.scratch<float>(members * header.k);
    stage.codes = program.scratch<int8_t>(members * kPanelChannels * header.k);
    stage.scales = program.scratch<float>(members * kPanelChannels * layout.groups);
    stage.mins = program.scratch<float>(members * kPanelChannels * layout.groups);
    stage.too_small_or_large = &outside;
    program.add(stage, layout.panels, weight.numel() * dtype_size(dtype), quantize_panel);
    program.run();
    again = outside;
    memcpy(packed.mutable_data_ptr(), &header, sizeof header);
    header.scale_type = ScaleType::kBF16;
    if (header.min_type != ScaleType::kNone) header.min_type = ScaleType::kBF16;
  }
  return packed;
}

at::Tensor pack_linear_weight(const at::Tensor& codes, const at::Tensor& scales, c10::string_view scheme,
                              const std::optional<at::Tensor>& minima) {
  const char* op = "pack_linear_weight";
  check_dtype(op, "codes", codes, at::kChar);
  check_dim(op, "codes", codes, 2);
  PackedHeader header = make_header(parse_scheme(std::string(scheme)), codes.size(0), codes.size(1));
  const PackedLayout layout = layout_of(header);
  const bool asymmetric = header.min_type != ScaleType::kNone;
  TORCH_CHECK_VALUE(asymmetric == minima.has_value(), op, ": scheme ", scheme,
                    asymmetric ? " needs minima" : " has no minima");
  auto scale_tensor = [&](const char* name, const at::Tensor& t) {
    const DType type = float_dtype(op, name, t);
    TORCH_CHECK_TYPE(header.group != 0 || type == DType::kF32, op, ": ", name, " must be Float, got ", t.scalar_type());
    check_dim(op, name, t, header.group == 0 ? 1 : 2);
    check_size(op, name, t, 0, header.n, "one per row of codes");
    if (header.group != 0) check_size(op, name, t, 1, layout.groups, "one per group");
    if (header.group != 0)
      header.scale_type =
          type == DType::kF32 ? ScaleType::kF32 : type == DType::kF16 ? ScaleType::kF16 : ScaleType::kBF16;
    return t.to(at::kFloat).contiguous();
  };
  const at::Tensor s = scale_tensor("scales", scales);
  at::Tensor m;
  if (asymmetric) {
    m = scale_tensor("minima", *minima);
    TORCH_CHECK_TYPE(minima->scalar_type() == scales.scalar_type(), op, ": minima must have the scales' dtype ",
                     scales.scalar_type(), ", got ", minima->scalar_type());
    header.min_type = header.scale_type;
  }
  const at::Tensor dense = codes.contiguous();
  const int8_t* data = dense.const_data_ptr<int8_t>();
  const int8_t *end = data + dense.numel();
  if (header.code_bits == 4) {
    TORCH_CHECK_VALUE(std::all_of(data, end, [](int8_t q) { return q >= 0 && q <= 15; }), op,
                      ": codes of ", scheme, " must be in 0 .. 15");
  } else {
    TORCH_CHECK_VALUE(header.act_group != 0 || header.k <= kMaxKFullRange || std::find(data, end, int8_t(-128)) == end,
                      op, ": codes of -128 with K = ", header.k, " could overflow an int32 sum; the limit is ",
                      kMaxKFullRange);
  }
  const PackedLayout final_layout = layout_of(header);  // fp32 scales take more room than make_header's
  at::Tensor packed = empty_huge({final_layout.total_bytes}, codes.options().dtype(at::kByte), Arena::kWeights);
  uint8_t* out = packed.mutable_data_ptr<uint8_t>();
  memcpy(out, &header, sizeof header);
  for (int64_t p = 0; p < final_layout.panels; ++p) {
    const int64_t first = p * kPanelChannels;
    pack_panel(header, out, p, data + first * header.k, header.k, s.const_data_ptr<float>() + first * layout.groups,
               asymmetric ? m.const_data_ptr<float>() + first * layout.groups : nullptr);
  }
  return packed;
}

at::Tensor dequantize_linear_weight(const at::Tensor& packed, int64_t out_features, int64_t in_features,
                                    at::ScalarType dtype) {
  const char* op = "dequantize_linear_weight";
  check_dtype(op, "packed", packed, at::kByte);
  check_dim(op, "packed", packed, 1);
  const at::Tensor bytes = packed.contiguous();
  const PackedHeader header = read_header(bytes.const_data_ptr(), bytes.numel());
  TORCH_CHECK_VALUE(header.n == out_features && header.k == in_features, op, ": packed holds [", header.n, ", ",
                    header.k, "], expected [", out_features, ", ", in_features, "]");
  at::Tensor weight = at::empty({out_features, in_features}, packed.options().dtype(at::kFloat));
  float* out = weight.mutable_data_ptr<float>();
  for (int64_t n = 0; n < out_features; ++n)
    unpack_channel(header, bytes.const_data_ptr<uint8_t>(), n, out + n * in_features);
  return weight.to(dtype);
}

// ---- computing ----

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, int64_t out_features,
                  const std::optional<at::Tensor>& bias) {
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

std::tuple<at::Tensor, at::Tensor> quantize_rows(const at::Tensor& x, int64_t group_size) {
  const char* op = "quantize_rows";
  const DType dtype = float_dtype(op, "x", x);
  TORCH_CHECK_VALUE(x.dim() >= 1, op, ": x must have at least one dimension, got a scalar");
  TORCH_CHECK_VALUE(group_size >= 0 && group_size % 16 == 0, op,
                    ": group_size must be 0 (the whole row) or a multiple of 16, got ", group_size);
  auto shape = x.sizes().slice(0, size_t(x.dim() - 1)).vec();
  if (group_size != 0) shape.push_back((x.size(-1) + group_size - 1) / group_size);
  at::Tensor codes = at::empty(x.sizes(), x.options().dtype(at::kChar));
  at::Tensor scales = at::empty(shape, x.options().dtype(at::kFloat)),
             sums = at::empty(shape, x.options().dtype(at::kInt));
  Rows rows = rows_of(x);
  rows.rows = c10::multiply_integers(x.sizes().slice(0, size_t(x.dim() - 1)));
  quantize_rows_table.get()({rows.data, codes.mutable_data_ptr<int8_t>(), scales.mutable_data_ptr<float>(),
                             sums.mutable_data_ptr<int32_t>(), rows.rows, rows.size, group_size, rows.stride, rows.size,
                             dtype});
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

  Program program(1);
  add_swiglu(program, {g.data, u.data, out.mutable_data_ptr(), g.rows, g.size, g.stride, u.stride, g.size, dtype});
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

  Program program(6);  // gate and up may want differently quantised rows
  Activation a = activation_of(rows, dtype);
  const LinearWeight *first[] = {&g, &u}, *second[] = {&d};
  add_quantize(program, a, first, 2);
  UnitShape written;
  Activation inner = add_gate_up(program, a, g, u, written);
  add_quantize(program, inner, second, 1, written);
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
