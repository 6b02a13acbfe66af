// The documented int8 operators: sdot_pack_weights, sdot_gemv, sdot_gemv_fused_bf16, neon_sdot.
#include "csrc/engine/sdot.h"

#include <algorithm>

#include "csrc/runtime/packed_weight.h"
#include "csrc/torch/checks.h"
#include "csrc/torch/torch_headers.h"

namespace tle {

namespace {

at::Tensor sdot_pack_weights(const at::Tensor& weight) {
  const char* op = "sdot_pack_weights";
  check_dtype(op, "weight", weight, at::kChar);
  check_dim(op, "weight", weight, 2);
  const int64_t k = weight.size(0), n = weight.size(1);
  TORCH_CHECK_VALUE(k % 4 == 0 && n % 4 == 0, op, ": weight must have sizes [K, N] that are multiples of 4, got ",
                    weight.sizes());
  return weight.reshape({k / 4, 4, n / 4, 4}).permute({0, 2, 3, 1}).contiguous();
}

// The packed weight, dense, with the sizes that it stands for.
struct PackedWeight {
  at::Tensor tensor;
  int64_t k, n;
};

PackedWeight packed_weight(const char* op, const at::Tensor& packed, int64_t k) {
  check_dtype(op, "packed", packed, at::kChar);
  check_dim(op, "packed", packed, 4);
  for (int64_t d : {2, 3}) check_size(op, "packed", packed, d, 4, "the layout [K/4, N/4, 4, 4]");
  TORCH_CHECK_VALUE(4 * packed.size(0) == k, op, ": packed is for K = ", 4 * packed.size(0), " (its shape is ",
                    packed.sizes(), "), the input has ", k);
  return {packed.contiguous(), k, 4 * packed.size(1)};
}

bool has_minus_128(const at::Tensor& codes) {
  const int8_t* data = codes.const_data_ptr<int8_t>();
  return std::find(data, data + codes.numel(), int8_t(-128)) != data + codes.numel();
}

// Refuses sums that could pass the int32 range. Only lengths near the limit have their codes looked at: -128 makes it
// smaller.
void check_sum(const char* op, int64_t k, const at::Tensor* a, const at::Tensor& packed) {
  constexpr int64_t kLargest = INT32_MAX;
  if (k <= kLargest / (128 * 128)) return;
  const bool within = k <= kMaxK;
  const int64_t largest_a = within && a && has_minus_128(*a) ? 128 : 127;
  const int64_t largest_b = within && has_minus_128(packed) ? 128 : 127;
  TORCH_CHECK_VALUE(within && k <= kLargest / (largest_a * largest_b), op, ": K = ", k, " with codes up to ", largest_a,
                    " and ", largest_b, " could overflow an int32 sum; the limit is ",
                    kLargest / (largest_a * largest_b));
}

SdotGemvArgs arguments(const PackedWeight& w, int64_t rows, at::Tensor& out) {
  SdotGemvArgs s = {};
  s.packed = w.tensor.const_data_ptr<int8_t>();
  s.stride = 4 * w.n;
  s.blocks = w.k / 4;
  s.n = w.n;
  s.rows = rows;
  s.out = out.mutable_data_ptr();
  s.out_stride = w.n;
  return s;
}

at::Tensor sdot_gemv(const at::Tensor& a, const at::Tensor& packed) {
  const char* op = "sdot_gemv";
  check_dtype(op, "a", a, at::kChar);
  check_dim(op, "a", a, 1);
  const PackedWeight w = packed_weight(op, packed, a.size(0));
  const at::Tensor dense = a.contiguous();
  check_sum(op, w.k, &dense, w.tensor);
  at::Tensor out = at::empty({w.n}, a.options().dtype(at::kInt));

  SdotGemvArgs s = arguments(w, 1, out);
  s.a = dense.const_data_ptr<int8_t>();
  s.a_stride = w.k;
  Program program(1);
  add_sdot_gemv(program, s);
  program.run();
  return out;
}

at::Tensor sdot_gemv_fused_bf16(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& w_scale) {
  const char* op = "sdot_gemv_fused_bf16";
  check_dtype(op, "x", x, at::kBFloat16);
  TORCH_CHECK_VALUE(x.dim() >= 1, op, ": x must have at least one dimension, got a scalar");
  const PackedWeight w = packed_weight(op, packed, x.size(-1));
  check_dtype(op, "w_scale", w_scale, at::kFloat);
  check_dim(op, "w_scale", w_scale, 1);
  check_size(op, "w_scale", w_scale, 0, w.n, "the out features of packed");
  check_sum(op, w.k, nullptr, w.tensor);
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = w.n;
  at::Tensor out = at::empty(shape, x.options());
  if (out.numel() == 0) return out;

  const at::Tensor scale = w_scale.contiguous();
  const Rows rows = rows_of(x);
  SdotGemvArgs s = arguments(w, out.numel() / w.n, out);
  s.b_scale = scale.const_data_ptr<float>();
  Program program(2);
  add_sdot_linear(program, rows.data, rows.stride, DType::kBF16, s);
  program.run();
  return out;
}

// The instruction itself, for tests of what it means: wraps modulo 2^32 as SDOT does.
at::Tensor neon_sdot(const at::Tensor& acc, const at::Tensor& a, const at::Tensor& b) {
  const char* op = "neon_sdot";
  check_dtype(op, "acc", acc, at::kInt);
  check_dtype(op, "a", a, at::kChar);
  check_dtype(op, "b", b, at::kChar);
  auto check_vector = [&](const char* name, const at::Tensor& t, int64_t size) {
    check_dim(op, name, t, 1);
    check_size(op, name, t, 0, size, "one 128-bit register");
  };
  check_vector("acc", acc, 4);
  check_vector("a", a, 16);
  check_vector("b", b, 16);
  const at::Tensor dense_acc = acc.contiguous(), dense_a = a.contiguous(), dense_b = b.contiguous();
  const int32_t* from = dense_acc.const_data_ptr<int32_t>();
  const int8_t *x = dense_a.const_data_ptr<int8_t>(), *y = dense_b.const_data_ptr<int8_t>();
  at::Tensor out = at::empty({4}, acc.options());
  int32_t* to = out.mutable_data_ptr<int32_t>();
  for (int i = 0; i < 4; ++i) {
    uint32_t sum = uint32_t(from[i]);
    for (int j = 4 * i; j < 4 * i + 4; ++j) sum += uint32_t(int32_t(x[j]) * y[j]);
    to[i] = int32_t(sum);
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(tle, CPU, m) {
  m.impl("sdot_pack_weights", sdot_pack_weights);
  m.impl("sdot_gemv", sdot_gemv);
  m.impl("sdot_gemv_fused_bf16", sdot_gemv_fused_bf16);
  m.impl("neon_sdot", neon_sdot);
}

}  // namespace tle
