// rotary_tables and rotary_embedding.
#include "csrc/engine/rotary.h"

#include "csrc/kernels/tables.h"
#include "csrc/engine/program.h"
#include "csrc/torch/checks.h"
#include "csrc/torch/torch_headers.h"

namespace tle {

namespace {

std::tuple<at::Tensor, at::Tensor> rotary_tables_op(const at::Tensor& position_ids, const at::Tensor& inv_freq,
                                                    double attention_scaling, at::ScalarType dtype) {
  const char* op = "rotary_tables";
  check_dtype(op, "position_ids", position_ids, at::kLong);
  check_dtype(op, "inv_freq", inv_freq, at::kFloat);
  check_dim(op, "inv_freq", inv_freq, 1);
  auto shape = position_ids.sizes().vec();
  shape.push_back(2 * inv_freq.size(0));
  at::Tensor cos = at::empty(shape, position_ids.options().dtype(dtype)), sin = at::empty_like(cos);
  const DType type = float_dtype(op, "dtype", cos);
  const at::Tensor positions = position_ids.contiguous(), frequencies = inv_freq.contiguous();
  rotary_tables(positions.const_data_ptr<int64_t>(), positions.numel(), frequencies.const_data_ptr<float>(),
                frequencies.numel(), float(attention_scaling), type, cos.mutable_data_ptr(), sin.mutable_data_ptr());
  return {cos, sin};
}

// cos and sin as [B or 1, Q, R] for a tensor of [B, heads, Q, D].
at::Tensor table_of(const char* op, const char* name, const at::Tensor& table, const at::Tensor& x) {
  check_dtype(op, name, table, x.scalar_type());
  check_dim(op, name, table, 3);
  TORCH_CHECK_VALUE(table.size(0) == 1 || table.size(0) == x.size(0), op, ": ", name, " must have batch size 1 or ",
                    x.size(0), ", got ", table.sizes());
  check_size(op, name, table, 1, x.size(2), "the number of tokens");
  TORCH_CHECK_VALUE(table.size(2) % 2 == 0 && table.size(2) <= x.size(3), op, ": ", name,
                    " must have an even last dimension of at most the head size ", x.size(3), ", got ", table.sizes());
  return table.contiguous();
}

at::Tensor rotated(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, DType dtype) {
  at::Tensor out = at::empty(x.sizes(), x.options());
  if (out.numel() == 0) return out;
  const at::Tensor in = x.stride(3) == 1 || x.size(3) == 1 ? x : x.contiguous();

  struct Stage {
    RotaryArgs args;
    RotaryFn* fn;
    int64_t tokens, batch_stride, token_stride, out_batch_stride, out_token_stride, table_batch_stride;
  };
  Stage stage;
  stage.args = {in.const_data_ptr(), cos.const_data_ptr(), sin.const_data_ptr(), out.mutable_data_ptr(), x.size(1),
                x.size(3), cos.size(2), in.stride(1), out.stride(1), dtype};
  stage.fn = rotary_table.get();
  stage.tokens = x.size(2);
  stage.batch_stride = in.stride(0);
  stage.token_stride = in.stride(2);
  stage.out_batch_stride = out.stride(0);
  stage.out_token_stride = out.stride(2);
  stage.table_batch_stride = cos.size(0) == 1 ? 0 : cos.stride(0);
  Program program(1);
  program.add(
      stage, x.size(0) * x.size(2), out.numel() * dtype_size(dtype) * 2, +[](const Stage& s, int64_t unit, int) {
        const int64_t b = unit / s.tokens, t = unit % s.tokens, size = dtype_size(s.args.dtype);
        RotaryArgs a = s.args;
        a.x = static_cast<const char*>(a.x) + (b * s.batch_stride + t * s.token_stride) * size;
        a.out = static_cast<char*>(a.out) + (b * s.out_batch_stride + t * s.out_token_stride) * size;
        a.cos = static_cast<const char*>(a.cos) + (b * s.table_batch_stride + t * a.r) * size;
        a.sin = static_cast<const char*>(a.sin) + (b * s.table_batch_stride + t * a.r) * size;
        s.fn(a);
      });
  program.run();
  return out;
}

std::tuple<at::Tensor, at::Tensor> rotary_embedding(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos,
                                                    const at::Tensor& sin) {
  const char* op = "rotary_embedding";
  const DType dtype = float_dtype(op, "q", q);
  check_dtype(op, "k", k, q.scalar_type());
  check_dim(op, "q", q, 4);
  check_dim(op, "k", k, 4);
  TORCH_CHECK_VALUE(q.size(0) == k.size(0) && q.size(2) == k.size(2) && q.size(3) == k.size(3), op,
                    ": q and k must agree in batch, tokens and head size, got ", q.sizes(), " and ", k.sizes());
  const at::Tensor c = table_of(op, "cos", cos, q), s = table_of(op, "sin", sin, q);
  TORCH_CHECK_VALUE(c.sizes() == s.sizes(), op, ": cos and sin must have one shape, got ", c.sizes(), " and ",
                    s.sizes());
  return {rotated(q, c, s, dtype), rotated(k, c, s, dtype)};
}

}  // namespace

TORCH_LIBRARY_IMPL(tle, CPU, m) {
  m.impl("rotary_tables", rotary_tables_op);
  m.impl("rotary_embedding", rotary_embedding);
}

}  // namespace tle
