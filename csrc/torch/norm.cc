// rms_norm and add_rms_norm.
#include "csrc/engine/norm.h"

#include "csrc/torch/checks.h"
#include "csrc/torch/torch_headers.h"

namespace tle {

namespace {

struct Checked {
  Rows x;
  at::Tensor weight;
  RmsNormArgs args;
};

Checked check(const char* op, const at::Tensor& x, const at::Tensor& weight, double eps, std::string_view kind) {
  const DType dtype = float_dtype(op, "x", x);
  TORCH_CHECK_VALUE(x.dim() >= 1, op, ": x must have at least one dimension, got a scalar");
  const at::Tensor w = vector_of(op, "weight", weight, x.size(-1), dtype);
  Checked c{rows_of(x), w, {}};
  c.args = {};
  c.args.x = c.x.data;
  c.args.weight = w.const_data_ptr();
  c.args.rows = c.x.rows;
  c.args.d = c.x.size;
  c.args.x_stride = c.x.stride;
  c.args.out_stride = c.args.sum_stride = c.x.size;
  c.args.eps = float(eps);
  c.args.kind = norm_kind(op, kind);
  c.args.dtype = dtype;
  c.args.weight_dtype = float_dtype(op, "weight", w);
  return c;
}

at::Tensor empty_contiguous(const at::Tensor& like) { return at::empty(like.sizes(), like.options()); }

void run(const RmsNormArgs& args) {
  Program program(1);
  add_rms_norm(program, args);
  program.run();
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, c10::string_view kind) {
  Checked c = check("rms_norm", x, weight, eps, kind);
  at::Tensor out = empty_contiguous(x);
  c.args.out = out.mutable_data_ptr();
  run(c.args);
  return out;
}

std::tuple<at::Tensor, at::Tensor> add_rms_norm_op(const at::Tensor& x, const at::Tensor& residual,
                                                   const at::Tensor& weight, double eps, c10::string_view kind) {
  Checked c = check("add_rms_norm", x, weight, eps, kind);
  check_dtype("add_rms_norm", "residual", residual, x.scalar_type());
  TORCH_CHECK_VALUE(residual.sizes() == x.sizes(), "add_rms_norm: residual must have x's shape ", x.sizes(), ", got ",
                    residual.sizes());
  const Rows r = rows_of(residual);
  at::Tensor out = empty_contiguous(x), sum = empty_contiguous(x);
  c.args.residual = r.data;
  c.args.residual_stride = r.stride;
  c.args.sum = sum.mutable_data_ptr();
  c.args.out = out.mutable_data_ptr();
  run(c.args);
  return {out, sum};
}

}  // namespace

TORCH_LIBRARY_IMPL(tle, CPU, m) {
  m.impl("rms_norm", rms_norm);
  m.impl("add_rms_norm", add_rms_norm_op);
}

}  // namespace tle
