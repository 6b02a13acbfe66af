// Attention as stages: query rows in tiles that share the keys and values which they read, and, where there are fewer
// tiles than threads could take, the keys in blocks as well.
#pragma once

#include <stdint.h>

#include "csrc/engine/program.h"
#include "csrc/kernels/attention/attention.h"
#include "csrc/kernels/common/dtype.h"

namespace tle {

// Strides in elements; the elements of a token are adjacent.
struct TokenStrides {
  int64_t batch, head, token;
};

// out[b, h, i] = sum over the keys j that query i may attend to of softmax(score)[j] v[b, h / (heads / kv_heads), j].
// The scores, the softmax and the order of every sum are those of kernels/attention/attention.h: the bits depend
// neither on the number of threads nor on what else is in the batch, nor on how many queries one call has.
struct AttentionCall {
  const void* q = nullptr;  // [batch, heads, queries, d]
  const void* k = nullptr;  // [batch, kv_heads, keys, d], int8: [.., d + kScaleBytes]
  const void* v = nullptr;  // [batch, kv_heads, keys, dv], int8: [.., dv + kScaleBytes]
  void* out = nullptr;      // [batch, heads, queries, dv]
  TokenStrides q_strides = {}, k_strides = {}, v_strides = {}, out_strides = {};
  DType dtype = DType::kF32;     // of q and out
  DType kv_dtype = DType::kF32;  // of k and v: dtype or kI8 (kernels/attention/attention.h)
  int64_t batch = 0, heads = 0, kv_heads = 0, queries = 0, keys = 0, d = 0, dv = 0;
  // Or null: where the number of keys stands when the program runs. It may run again with more of them, up to the next
  // multiple of kAttentionBlock.
  const int64_t* keys_now = nullptr;
  float scale = 1.0f;
  bool causal = false;    // query i sees the keys up to keys - queries + i
  int64_t window = 0;     // > 0, causal only: the last `window` of them
  float softcap = 0.0f;   // > 0: softcap * tanh(score / softcap)
  const int64_t* starts = nullptr;  // [batch] each row's first key, 0 .. keys; null: 0
  const void* sinks = nullptr;      // [heads] or null
  DType sinks_dtype = DType::kF32;
  AttentionMask mask = {};          // of batch 0; in addition to causal, window and starts
  int64_t mask_batch_stride = 0;
};

// Stages that add_attention adds at most.
inline constexpr int64_t kAttentionStages = 3;

// The operands are read when the program runs, so that earlier stages may write them. following: the last stage has a
// unit for each batch row's key head, in this order, which makes all that attention reads of them; attention goes on in
// these units, if it needs nothing else and a query is one token. Returns what the last stage's units write of `out` as
// [batch * queries, heads * dv], if they have whole rows of heads.
UnitShape add_attention(Program& program, const AttentionCall& call, bool following = false);

}  // namespace tle
