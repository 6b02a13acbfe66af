#include "csrc/torch/checks.h"

#include "csrc/torch/torch_headers.h"

namespace tle {

void check_cpu(const char* op, const char* name, const at::Tensor& t) {
  TORCH_CHECK(t.device().is_cpu(), op, ": ", name, " must be on the CPU, got ", t.device());
  TORCH_CHECK(t.layout() == at::kStrided, op, ": ", name, " must be a dense (strided) tensor, got ", t.layout());
}

DType float_dtype(const char* op, const char* name, const at::Tensor& t) {
  check_cpu(op, name, t);
  switch (t.scalar_type()) {
    case at::kFloat: return DType::kF32;
    case at::kBFloat16: return DType::kBF16;
    case at::kHalf: return DType::kF16;
    default: TORCH_CHECK_TYPE(false, op, ": ", name, " must be bfloat16, float16 or float32, got ", t.scalar_type());
  }
}

at::ScalarType scalar_type(DType t) {
  return t == DType::kF32 ? at::kFloat : t == DType::kBF16 ? at::kBFloat16 : at::kHalf;
}

void check_dtype(const char* op, const char* name, const at::Tensor& t, at::ScalarType wanted) {
  check_cpu(op, name, t);
  TORCH_CHECK_TYPE(t.scalar_type() == wanted, op, ": ", name, " must be ", wanted, ", got ", t.scalar_type());
}

void check_dim(const char* op, const char* name, const at::Tensor& t, int64_t wanted) {
  TORCH_CHECK_VALUE(t.dim() == wanted, op, ": ", name, " must have ", wanted, " dimensions, got ", t.sizes());
}

void check_size(const char* op, const char* name, const at::Tensor& t, int64_t dim, int64_t wanted, const char* why) {
  TORCH_CHECK_VALUE(t.size(dim) == wanted, op, ": ", name, " must have size ", wanted, " in dimension ", dim, " (", why,
                    "), got ", t.sizes());
}

Rows rows_of(const at::Tensor& t) {
  const int64_t size = t.size(-1), rows = size == 0 ? 0 : t.numel() / size;
  bool usable = size == 1 || t.stride(-1) == 1;
  // The leading dimensions must collapse to one: each stride is the next one's times its size. Size 1 says nothing.
  int64_t stride = size, spacing = -1, count = 1;
  for (int64_t d = t.dim() - 2; d >= 0 && usable; --d) {
    if (t.size(d) == 1) continue;
    if (spacing < 0) {
      spacing = stride = t.stride(d);
      count = t.size(d);
    } else {
      usable = t.stride(d) == spacing * count;
      count *= t.size(d);
    }
  }
  const at::Tensor dense = usable ? t : t.contiguous();
  return {dense, dense.const_data_ptr(), rows, size, usable ? stride : size};
}

at::Tensor vector_of(const char* op, const char* name, const at::Tensor& t, int64_t size, DType dtype) {
  check_dim(op, name, t, 1);
  check_size(op, name, t, 0, size, "the size of a row");
  const DType got = float_dtype(op, name, t);
  TORCH_CHECK_TYPE(got == dtype || got == DType::kF32, op, ": ", name, " must be ", scalar_type(dtype),
                   " or float32, got ", t.scalar_type());
  return t.contiguous();
}

LinearWeight linear_weight(const char* op, const char* name, const at::Tensor& weight, int64_t out_features, int64_t k,
                           const std::optional<at::Tensor>& bias, DType dtype, std::vector<at::Tensor>& keep) {
  check_cpu(op, name, weight);
  LinearWeight w;
  if (weight.scalar_type() == at::kByte) {
    check_dim(op, name, weight, 1);
    const at::Tensor bytes = weight.contiguous();
    if (!bytes.is_same(weight)) keep.push_back(bytes);
    w.packed = true;
    w.header = read_header(bytes.const_data_ptr(), bytes.numel());
    w.layout = layout_of(w.header);
    w.data = bytes.const_data_ptr();
    w.n = w.header.n;
    w.k = w.header.k;
    TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(w.data) % 8 == 0, op, ": ", name, " must be 8-byte aligned");
  } else {
    check_dim(op, name, weight, 2);
    w.dtype = float_dtype(op, name, weight);
    TORCH_CHECK_TYPE(w.dtype == dtype, op, ": ", name, " must have the input's dtype ", scalar_type(dtype), ", got ",
                     weight.scalar_type());
    const Rows rows = rows_of(weight);
    if (!rows.tensor.is_same(weight)) keep.push_back(rows.tensor);
    w.data = rows.data;
    w.row_stride = rows.stride;
    w.n = weight.size(0);
    w.k = weight.size(1);
  }
  TORCH_CHECK_VALUE(w.n == out_features, op, ": ", name, " has ", w.n, " out features, expected ", out_features);
  TORCH_CHECK_VALUE(w.k == k, op, ": ", name, " has ", w.k, " in features, the input has ", k);
  if (bias.has_value() && bias->defined()) {
    const at::Tensor b = vector_of(op, "bias", *bias, out_features, dtype);
    if (!b.is_same(*bias)) keep.push_back(b);
    w.bias = b.const_data_ptr();
    w.bias_dtype = float_dtype(op, "bias", b);
  }
  return w;
}

DType kv_dtype(const char* op, const char* name, const at::Tensor& t, DType dtype) {
  check_cpu(op, name, t);
  TORCH_CHECK_TYPE(t.scalar_type() == scalar_type(dtype) || t.scalar_type() == at::kChar, op, ": ", name, " must be ",
                   scalar_type(dtype), " or int8 codes with their scales, got ", t.scalar_type());
  return t.scalar_type() == at::kChar ? DType::kI8 : dtype;
}

NormKind norm_kind(const char* op, std::string_view kind) {
  if (kind == "fp32") return NormKind::kF32;
  if (kind == "llama") return NormKind::kLlama;
  if (kind == "gemma") return NormKind::kGemma;
  TORCH_CHECK_VALUE(false, op, ": kind must be 'fp32', 'llama' or 'gemma', got '", kind, "'");
}

}  // namespace tle
