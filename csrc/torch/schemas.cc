// Every operator of the dispatcher namespace `tle`, in one place.
// Shapes: B batch, Q query tokens, S key slots, H hidden, D head size, N out features, K in features.
// A "linear weight" is either packed (a uint8 tensor made by quantize_linear_weight, see runtime/packed_weight.h) or a
// dense row-major [N, K] tensor of bf16/fp16/fp32. Output sizes that only a packed header knows are also passed as
// ints, because a fake (meta) kernel cannot read a header; the CPU kernel checks that both agree.
#include <torch/library.h>

#include "csrc/torch/autograd_guard.h"

// A macro and not a table of strings, because TORCH_LIBRARY and the guard walk the same list.
#define TLE_SCHEMAS(X)                                                                                                \
  /* ---- the documented operators ---- */                                                                            \
  X("sdot_pack_weights(Tensor weight) -> Tensor")                                                                     \
  X("sdot_gemv(Tensor a, Tensor packed) -> Tensor")                                                                   \
  X("sdot_gemv_fused_bf16(Tensor x, Tensor packed, Tensor w_scale) -> Tensor")                                        \
  X("rms_norm(Tensor x, Tensor weight, float eps, str kind='fp32') -> Tensor")                                        \
  X("swiglu(Tensor gate, Tensor up) -> Tensor")                                                                       \
  X("flash_attn_decode(Tensor q, Tensor k, Tensor v, float sm_scale, int? seq_len=None) -> Tensor")                   \
  X("neon_sdot(Tensor acc, Tensor a, Tensor b) -> Tensor")                                                            \
  X("fused_mlp(Tensor x, Tensor gate, Tensor up, Tensor down, int intermediate_size, Tensor? gate_bias=None, "        \
    "Tensor? up_bias=None, Tensor? down_bias=None) -> Tensor")                                                        \
  /* One decoder layer. hidden [B, Q, H]; k_cache, v_cache [B, Hkv, S, D], any strides with a dense last dimension;   \
     the Q new tokens go to slots cache_len .. cache_len + Q. Caches may also be int8 [B, Hkv, S, D + 4], as        \
     `attention` reads them: quantize_rows makes the codes and scales of the new ones. cos, sin [B or 1, Q, R] (None:  \
     no rotary; R < D: partial rotary). starts int64 [B]: each row's first real key (its left padding), None: 0.      \
     weights: 18 entries in the order of engine/decoder_layer.h, None where the model has none:                       \
       0 input_norm   1 q  2 q_bias  3 k  4 k_bias  5 v  6 v_bias  7 q_norm  8 k_norm  9 o  10 o_bias                 \
       11 post_norm  12 gate  13 gate_bias  14 up  15 up_bias  16 down  17 down_bias */                               \
  X("fused_transformer_layer(Tensor hidden, Tensor?[] weights, Tensor(a!) k_cache, Tensor(b!) v_cache, "              \
    "int cache_len, Tensor? cos, Tensor? sin, int num_heads, int num_kv_heads, int head_dim, int intermediate_size, " \
    "float eps, float sm_scale, str norm_kind='llama', int window=0, Tensor? starts=None) -> Tensor")                 \
  /* All layers and the final norm. weights: 18 per layer, one after another, then the final norm. rope, windows: one \
     entry a layer (1 / 0, and the window or 0), or empty: every layer rotates, none has a window. */                 \
  X("fused_decode_step(Tensor hidden, Tensor?[] weights, Tensor(a!)[] k_cache, Tensor(b!)[] v_cache, int cache_len, " \
    "Tensor? cos, Tensor? sin, int num_heads, int num_kv_heads, int head_dim, int intermediate_size, float eps, "     \
    "float sm_scale, str norm_kind='llama', int[] rope=[], int[] windows=[], Tensor? starts=None) -> Tensor")         \
  /* ---- the engine's operators ---- */                                                                              \
  X("quantize_linear_weight(Tensor weight, str scheme, int group_size=0) -> Tensor")                                  \
  /* codes int8 [N, K] (0 .. 15 for 4 bits), scales [N] or [N, groups], minima as scales */                           \
  X("pack_linear_weight(Tensor codes, Tensor scales, str scheme, Tensor? minima=None) -> Tensor")                     \
  /* blocks uint8 [N, bytes of a row] of a GGUF file, taken over (type Q4_0, Q4_1, Q4_K, Q5_0, Q8_0, IQ4_NL, IQ4_XS)  \
     or quantised again (Q5_1, Q5_K, Q6_K); rows int64 [N]: output channel i is row rows[i] of the file;              \
     groups int64 [K / 32]: the k of group i are those of the file's group groups[i] */                               \
  X("pack_gguf_weight(Tensor blocks, str type, int in_features, Tensor? rows=None, Tensor? groups=None) -> Tensor")   \
  /* rows of a packed weight, de-quantised: ids int64 [...] -> [..., in_features] */                                  \
  X("packed_embedding(Tensor ids, Tensor packed, int out_features, int in_features, ScalarType dtype) -> Tensor")     \
  X("dequantize_linear_weight(Tensor packed, int out_features, int in_features, ScalarType dtype=float32) -> Tensor") \
  X("linear(Tensor x, Tensor weight, int out_features, Tensor? bias=None) -> Tensor")                                 \
  X("quantize_rows(Tensor x, int group_size=0) -> (Tensor codes, Tensor scales)")                                     \
  X("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, str kind='fp32') -> "                          \
    "(Tensor normed, Tensor sum)")                                                                                    \
  X("rotary_tables(Tensor position_ids, Tensor inv_freq, float attention_scaling, ScalarType dtype) -> "              \
    "(Tensor cos, Tensor sin)")                                                                                       \
  X("rotary_embedding(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor q_out, Tensor k_out)")                   \
  /* int64 [...]: the first index of the last dimension's largest element, as torch.argmax (a NaN is the largest) */   \
  X("argmax(Tensor x) -> Tensor")                                                                                     \
  /* fp32 scores [B, V] as transformers' TopKLogitsWarper and TopPLogitsWarper leave them. Which of several equal     \
     scores at the edge of a nucleus are in is up to torch.sort: here, as in torch, to std::sort. */                  \
  X("top_k_logits(Tensor scores, int k, float filter_value) -> Tensor")                                               \
  X("top_p_logits(Tensor scores, float top_p, float filter_value, int min_tokens_to_keep=1) -> Tensor")               \
  /* as torch.empty, for slots of a cache: in huge pages where the system has them */                                 \
  X("empty_cache_slots(int[] size, ScalarType dtype) -> Tensor")                                                      \
  /* asks the system to move a dense tensor's memory into huge pages; the tensor does not change */                   \
  X("advise_huge_pages(Tensor tensor) -> ()")                                                                         \
  /* q [B, Hq, Q, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv] -> [B, Hq, Q, Dv] (stored as [B, Q, Hq, Dv]). mask:          \
     bool (True: may be attended) or floating (added to the scores), broadcastable to [B, Hq, Q, S]. causal: query i   \
     sees keys up to S - Q + i. window > 0: only the last `window` of those. starts int64 [B]: first real key.         \
     Here and in flash_attn_decode, k and v may be int8, [.., S, D + 4] and [.., S, Dv + 4]: the codes of a slot and,  \
     behind them, the four bytes of its fp32 scale, which is not negative. */                                          \
  X("attention(Tensor q, Tensor k, Tensor v, float sm_scale, Tensor? mask=None, bool causal=False, int window=0, "     \
    "float softcap=0., Tensor? sinks=None, Tensor? starts=None) -> Tensor")

#define TLE_RANDOM_SCHEMAS(X)                                                                                         \
  /* int64 [B, 1]: torch.multinomial(probabilities, 1) of fp32 probabilities [B, V], and the state after it */        \
  X("multinomial(Tensor probabilities, *, Generator? generator=None) -> Tensor")

TORCH_LIBRARY(tle, m) {
#define TLE_DEFINE(schema) m.def(schema, {at::Tag::pt2_compliant_tag});
  TLE_SCHEMAS(TLE_DEFINE)
#undef TLE_DEFINE
#define TLE_DEFINE(schema) m.def(schema, {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});
  TLE_RANDOM_SCHEMAS(TLE_DEFINE)
#undef TLE_DEFINE
}

// No operator has a derivative: wanting one is an error, never a silent zero.
TORCH_LIBRARY_IMPL(tle, Autograd, m) {
#define TLE_GUARD(schema) tle::guard_autograd(m, schema);
  TLE_SCHEMAS(TLE_GUARD)
  TLE_RANDOM_SCHEMAS(TLE_GUARD)
#undef TLE_GUARD
}
