// attention and flash_attn_decode.
#include "csrc/engine/attention.h"

#include <cmath>

#include "csrc/torch/checks.h"
#include "csrc/torch/torch_headers.h"

namespace tle {

namespace {

// t itself if the elements of a token are adjacent, otherwise a contiguous copy.
at::Tensor dense_tokens(const at::Tensor& t) {
  return t.size(-1) == 1 || t.stride(-1) == 1 ? t : t.contiguous();
}

void check_head_size(const char* op, const char* name, int64_t size, const at::Tensor& t) {
  TORCH_CHECK_VALUE(size >= 1 && size <= kMaxHeadSize, op, ": the head size of ", name, " must be in 1 .. ",
                    kMaxHeadSize, ", got ", t.sizes());
}

// k and v [.., Hkv, S, D] against q's dtype, heads and head size. Sets kv_dtype, d and dv.
void check_keys(const char* op, AttentionCall& call, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                int64_t q_heads) {
  const int64_t head = k.dim() - 3;
  call.kv_dtype = kv_dtype(op, "k", k, call.dtype);
  check_dtype(op, "v", v, k.scalar_type());
  check_dim(op, "v", v, k.dim());
  for (int64_t dim = 0; dim < k.dim() - 1; ++dim) check_size(op, "v", v, dim, k.size(dim), "that of k");
  const bool codes = call.kv_dtype == DType::kI8;
  call.d = q.size(-1);
  call.dv = v.size(-1) - (codes ? kScaleBytes : 0);
  check_size(op, "k", k, -1, call.d + (codes ? kScaleBytes : 0),
             codes ? "the head size of q and the bytes of a scale" : "the head size of q");
  check_head_size(op, "q", call.d, q);
  check_head_size(op, "v", call.dv, v);
  TORCH_CHECK_VALUE(k.size(head) >= 1 && q_heads % k.size(head) == 0, op,
                    ": the query heads must be a multiple of the key/value heads, got ", q_heads, " and ",
                    k.size(head));
}

MaskKind mask_kind(const char* op, const at::Tensor& mask) {
  check_cpu(op, "mask", mask);
  switch (mask.scalar_type()) {
    case at::kBool: return MaskKind::kBool;
    case at::kFloat: return MaskKind::kF32;
    case at::kBFloat16: return MaskKind::kBF16;
    case at::kHalf: return MaskKind::kF16;
    default:
      TORCH_CHECK_TYPE(false, op, ": mask must be bool, bfloat16, float16 or float32, got ", mask.scalar_type());
  }
}

// A size-1 or broadcast dimension has stride 0, so that the engine can tell a mask that all heads share.
void set_mask(AttentionCall& call, const at::Tensor& mask, MaskKind kind) {
  auto stride = [&](int64_t from_end) {
    const int64_t dim = mask.dim() - from_end;
    return dim < 0 || mask.size(dim) == 1 ? 0 : mask.stride(dim);
  };
  call.mask = {mask.const_data_ptr(), stride(3), stride(2), stride(1), kind};
  call.mask_batch_stride = stride(4);
}

TokenStrides strides_of(const at::Tensor& t) { return {t.stride(-4), t.stride(-3), t.stride(-2)}; }

void run(const AttentionCall& call) {
  Program program(kAttentionStages);
  add_attention(program, call);
  program.run();
}

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double sm_scale,
                     const std::optional<at::Tensor>& mask, bool causal, int64_t window, double softcap,
                     const std::optional<at::Tensor>& sinks, const std::optional<at::Tensor>& starts) {
  const char* op = "attention";
  AttentionCall call;
  call.dtype = float_dtype(op, "q", q);
  check_dim(op, "q", q, 4);
  check_dim(op, "k", k, 4);
  check_keys(op, call, q, k, v, q.size(1));
  check_size(op, "k", k, 0, q.size(0), "the batch of q");
  call.batch = q.size(0);
  call.heads = q.size(1);
  call.kv_heads = k.size(1);
  call.queries = q.size(2);
  call.keys = k.size(2);
  call.scale = float(sm_scale);
  TORCH_CHECK_VALUE(window >= 0, op, ": window must be 0 (none) or positive, got ", window);
  TORCH_CHECK_VALUE(window == 0 || causal, op, ": a window is counted back from a causal query: causal must be True");
  call.causal = causal;
  call.window = window;
  TORCH_CHECK_VALUE(softcap >= 0.0 && std::isfinite(softcap), op, ": softcap must be 0 (none) or positive, got ",
                    softcap);
  call.softcap = float(softcap);

  at::Tensor mask_kept, sinks_kept, starts_kept;
  if (mask.has_value()) {
    const MaskKind kind = mask_kind(op, *mask);
    const int64_t wanted[4] = {call.batch, call.heads, call.queries, call.keys};
    bool fits = mask->dim() <= 4;
    for (int64_t dim = mask->dim() - 1, i = 3; fits && dim >= 0; --dim, --i)
      fits = mask->size(dim) == 1 || mask->size(dim) == wanted[i];
    TORCH_CHECK_VALUE(fits, op, ": mask must be broadcastable to [batch, heads, queries, keys] = ",
                      c10::IntArrayRef(wanted, 4), ", got ", mask->sizes());
    set_mask(call, *mask, kind);
  }
  if (sinks.has_value()) {
    sinks_kept = vector_of(op, "sinks", *sinks, call.heads, call.dtype);
    call.sinks = sinks_kept.const_data_ptr();
    call.sinks_dtype = float_dtype(op, "sinks", sinks_kept);
  }
  if (starts.has_value()) {
    check_dtype(op, "starts", *starts, at::kLong);
    check_dim(op, "starts", *starts, 1);
    check_size(op, "starts", *starts, 0, call.batch, "the batch of q");
    starts_kept = starts->contiguous();
    call.starts = starts_kept.const_data_ptr<int64_t>();
    for (int64_t b = 0; b < call.batch; ++b)
      TORCH_CHECK_VALUE(call.starts[b] >= 0 && call.starts[b] <= call.keys, op, ": starts must be in 0 .. ", call.keys,
                        " (the keys), got ", call.starts[b], " for row ", b);
  }

  const at::Tensor dense_q = dense_tokens(q), dense_k = dense_tokens(k), dense_v = dense_tokens(v);
  at::Tensor out = at::empty({call.batch, call.queries, call.heads, call.dv}, q.options()).transpose(1, 2);
  call.q = dense_q.const_data_ptr();
  call.k = dense_k.const_data_ptr();
  call.v = dense_v.const_data_ptr();
  call.out = out.mutable_data_ptr();
  call.q_strides = strides_of(dense_q);
  call.k_strides = strides_of(dense_k);
  call.v_strides = strides_of(dense_v);
  call.out_strides = strides_of(out);
  run(call);
  return out;
}

at::Tensor flash_attn_decode(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double sm_scale,
                             std::optional<int64_t> seq_len) {
  const char* op = "flash_attn_decode";
  AttentionCall call;
  call.dtype = float_dtype(op, "q", q);
  TORCH_CHECK_VALUE(q.dim() == 2 || q.dim() == 3, op, ": q must be [Hq, D] or [batch, Hq, D], got ", q.sizes());
  const bool batched = q.dim() == 3;
  check_dim(op, "k", k, batched ? 4 : 3);
  check_keys(op, call, q, k, v, q.size(-2));
  if (batched) check_size(op, "k", k, 0, q.size(0), "the batch of q");
  const int64_t slots = k.size(-2);
  call.keys = seq_len.value_or(slots);
  TORCH_CHECK_VALUE(call.keys >= 0 && call.keys <= slots, op, ": seq_len must be in 0 .. ", slots,
                    " (the keys of k), got ", call.keys);
  call.batch = batched ? q.size(0) : 1;
  call.heads = q.size(-2);
  call.kv_heads = k.size(-3);
  call.queries = 1;
  call.scale = float(sm_scale);

  const at::Tensor dense_q = dense_tokens(q), dense_k = dense_tokens(k), dense_v = dense_tokens(v);
  std::vector<int64_t> sizes = q.sizes().vec();
  sizes.back() = call.dv;
  at::Tensor out = at::empty(sizes, q.options());
  auto strides = [&](const at::Tensor& t, bool has_tokens) {
    const int64_t head = t.dim() - (has_tokens ? 3 : 2);
    return TokenStrides{batched ? t.stride(0) : 0, t.stride(head), has_tokens ? t.stride(-2) : 0};
  };
  call.q = dense_q.const_data_ptr();
  call.k = dense_k.const_data_ptr();
  call.v = dense_v.const_data_ptr();
  call.out = out.mutable_data_ptr();
  call.q_strides = strides(dense_q, false);
  call.k_strides = strides(dense_k, true);
  call.v_strides = strides(dense_v, true);
  call.out_strides = strides(out, false);
  run(call);
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(tle, CPU, m) {
  m.impl("attention", attention);
  m.impl("flash_attn_decode", flash_attn_decode);
}

}  // namespace tle
