// Whole pre-norm decoder layers (Llama's shape) as one program: one parallel region for any number of layers.
#pragma once

#include <stdint.h>

#include <memory>

#include "csrc/engine/linear.h"
#include "csrc/engine/program.h"
#include "csrc/kernels/common/dtype.h"
#include "csrc/kernels/rms_norm/rms_norm.h"

namespace tle {

struct NormWeight {
  const void* data = nullptr;  // null: the model has no such norm
  DType dtype = DType::kF32;
};

// The weights of one layer, in the order in which the operators take them.
struct DecoderWeights {
  NormWeight input_norm, q_norm, k_norm, post_norm;
  LinearWeight q, k, v, o, gate, up, down;
};

// This layer's cache: K and V [batch, kv_heads, slots, head_dim], elements of a slot adjacent. Strides in elements.
// dtype is the model's or kI8: slots of codes and a scale (kernels/attention/attention.h), which quantize_rows makes of
// what the other kind of cache would hold.
struct DecoderCache {
  void *k, *v;
  DType dtype;
  int64_t k_batch, k_head, k_slot, v_batch, v_head, v_slot;
};

struct DecoderLayer {
  DecoderWeights weights;
  DecoderCache cache;
  bool rotary = true;
  int64_t window = 0;  // 0: all keys
};

struct DecoderShape {
  int64_t heads, kv_heads, head_dim, hidden, intermediate;
  float eps, sm_scale;
  NormKind norm;
  DType dtype;
};

struct DecoderInput {
  const void* hidden;  // [batch, tokens, hidden]
  int64_t batch, tokens, batch_stride, token_stride;
  int64_t cache_len;  // slots in use; the new tokens go behind them
  const void *cos, *sin;  // [batch or 1, tokens, rotary_dim] or null
  int64_t rotary_dim, table_batch_stride;
  const int64_t* starts;  // [batch]: first real key, or null
};

// Runs the layers and, with final_norm, the last norm of the model. out [batch, tokens, hidden], contiguous. Long
// inputs are cut into blocks of tokens, so that working memory does not grow with the prompt; results do not depend on
// the cut.
void run_decoder(const DecoderShape& shape, const DecoderLayer* layers, int64_t count, const DecoderInput& input,
                 const NormWeight& final_norm, void* out);

// The same for one token per batch row and the head after it, token after token: between tokens only the cache's length
// changes, so that the program, which takes a small model 1 % of a token to build, is kept as long as it can be.
class DecoderSteps {
 public:
  // input: of the first token. What it points to is read at each run, as are the layers and weights, which must live as
  // long. logits [batch, head.n] of the model's dtype, contiguous.
  DecoderSteps(const DecoderShape& shape, const DecoderLayer* layers, int64_t count, const DecoderInput& input,
               const NormWeight& final_norm, const LinearWeight& head, void* logits);
  DecoderSteps(DecoderSteps&&) noexcept;
  ~DecoderSteps();

  // One token, whose keys and values go behind cache_len slots.
  void run(int64_t cache_len);

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace tle
