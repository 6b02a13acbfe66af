#include "csrc/engine/decoder_layer.h"

#include <string.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <utility>

#include "csrc/engine/attention.h"
#include "csrc/engine/norm.h"
#include "csrc/kernels/common/prefetch.h"
#include "csrc/kernels/tables.h"

namespace tle {

namespace {

constexpr int64_t kMaxRows = 512;        // tokens (over the batch) that go through the layers at once
constexpr int64_t kStagesPerLayer = 24;  // 8 to 13, and more where a layer's weights want differently quantised rows
constexpr int64_t kLastStages = 3;       // the final norm, and the head with its rows quantised

const void* advance(const void* p, int64_t elements, DType t) {
  return static_cast<const char*>(p) + elements * dtype_size(t);
}
void* advance(void* p, int64_t elements, DType t) { return static_cast<char*>(p) + elements * dtype_size(t); }

// The tokens of one pass: rows = batch * tokens, row = b * tokens + t. Stages look at it when they run, and a program
// that runs again finds the next token's.
struct Pass {
  int64_t batch, tokens, rows;
  int64_t cache_len, keys;  // keys: with those of the tokens
  const void *cos, *sin;
  int64_t rotary_dim, table_batch_stride;
  const int64_t* starts;

  Pass(const DecoderInput& in, int64_t first, int64_t count, DType dtype)
      : batch(in.batch), tokens(count), rows(in.batch * count), cos(nullptr), sin(nullptr), rotary_dim(in.rotary_dim),
        table_batch_stride(in.table_batch_stride), starts(in.starts) {
    set_cache_len(in.cache_len + first);
    if (in.cos == nullptr) return;
    cos = advance(in.cos, first * in.rotary_dim, dtype);
    sin = advance(in.sin, first * in.rotary_dim, dtype);
  }
  void set_cache_len(int64_t slots) {
    cache_len = slots;
    keys = slots + tokens;
  }
};

// What follows the projections of q, k and v: head norms, rotary, and the new keys and values into the cache. A unit is
// one token's group: a key head and the query heads that share it.
struct HeadsStage {
  RmsNormFn* norm;
  RotaryFn* rotary;
  QuantizeRowsFn* quantize;
  DecoderShape shape;
  NormWeight q_norm, k_norm;
  DecoderCache cache;
  const Pass* pass;
  bool rotate;
  void *q, *k, *v;  // [rows, heads * head_dim]
  int64_t window;   // of the attention that follows
};

// A key or value into its slot of int8 codes and a scale.
void store_quantised(const HeadsStage& s, const void* x, void* slot) {
  const int64_t d = s.shape.head_dim;
  int8_t* codes = static_cast<int8_t*>(slot);
  float scale;
  int32_t sum;
  s.quantize({x, codes, &scale, &sum, 1, d, 0, d, d, s.shape.dtype});
  memcpy(codes + d, &scale, kScaleBytes);
}

void run_heads(const HeadsStage& s, int64_t unit, int) {
  const DecoderShape& m = s.shape;
  const int64_t row = unit / m.kv_heads, head = unit % m.kv_heads, group = m.heads / m.kv_heads;
  const int64_t b = row / s.pass->tokens, t = row % s.pass->tokens, slot = s.pass->cache_len + t, d = m.head_dim;
  void* q = advance(s.q, (row * m.heads + head * group) * d, m.dtype);
  void* k = advance(s.k, (row * m.kv_heads + head) * d, m.dtype);
  const void* v = advance(s.v, (row * m.kv_heads + head) * d, m.dtype);
  void* k_slot = advance(s.cache.k, b * s.cache.k_batch + head * s.cache.k_head + slot * s.cache.k_slot, s.cache.dtype);
  void* v_slot = advance(s.cache.v, b * s.cache.v_batch + head * s.cache.v_head + slot * s.cache.v_slot, s.cache.dtype);

  // The norm may not run in place, so it goes through a buffer of one head (head_dim <= 512, checked by the operator).
  alignas(64) char buffer[512 * 4];
  const size_t bytes = size_t(d * dtype_size(m.dtype));
  auto normalise = [&](void* x, int64_t heads, const NormWeight& w) {
    for (int64_t h = 0; h < heads && w.data; ++h) {
      void* one = advance(x, h * d, m.dtype);
      RmsNormArgs a = {};
      a.x = one;
      a.weight = w.data;
      a.out = buffer;
      a.rows = 1;
      a.d = d;
      a.eps = m.eps;
      a.kind = m.norm;
      a.dtype = m.dtype;
      a.weight_dtype = w.dtype;
      s.norm(a);
      memcpy(one, buffer, bytes);
    }
  };
  normalise(q, group, s.q_norm);
  normalise(k, 1, s.k_norm);
  const bool quantised = s.cache.dtype == DType::kI8;
  void* rotated = quantised ? k : k_slot;
  if (s.rotate) {
    const int64_t at = b * s.pass->table_batch_stride + t * s.pass->rotary_dim;
    const void *cos = advance(s.pass->cos, at, m.dtype), *sin = advance(s.pass->sin, at, m.dtype);
    s.rotary({q, cos, sin, q, group, d, s.pass->rotary_dim, d, d, m.dtype});
    s.rotary({k, cos, sin, rotated, 1, d, s.pass->rotary_dim, d, d, m.dtype});
  } else if (!quantised) {
    memcpy(k_slot, k, bytes);
  }
  if (quantised) {
    store_quantised(s, k, k_slot);
    store_quantised(s, v, v_slot);
  } else {
    memcpy(v_slot, v, bytes);
  }
}

// The first of the keys and values that attention reads next, and the slots that it writes; once it reads in a stream,
// the hardware goes ahead. A short context is read as so many short pieces that it never does.
constexpr int64_t kWarmBytes = 16 * 1024;

void warm_heads(const HeadsStage& s, int64_t first, int64_t last) {
  if (s.pass->tokens > 1) return;
  for (int64_t unit = first; unit < last; ++unit) {
    const int64_t b = unit / s.shape.kv_heads, head = unit % s.shape.kv_heads;
    int64_t slot = s.pass->starts ? s.pass->starts[b] : 0;
    if (s.window > 0) slot = std::max(slot, s.pass->cache_len + 1 - s.window);
    const auto warm = [&](const void* slots, int64_t batch, int64_t head_stride, int64_t slot_stride) {
      const int64_t slots_used = s.pass->cache_len + 1 - slot;
      const int64_t bytes = std::min(slots_used * slot_stride * dtype_size(s.cache.dtype), kWarmBytes);
      const void* from = advance(slots, b * batch + head * head_stride + slot * slot_stride, s.cache.dtype);
      prefetch_lines(static_cast<const char*>(from), (bytes + 63) / 64);
    };
    warm(s.cache.k, s.cache.k_batch, s.cache.k_head, s.cache.k_slot);
    warm(s.cache.v, s.cache.v_batch, s.cache.v_head, s.cache.v_slot);
  }
}

class Builder {
 public:
  Builder(Program& program, const DecoderShape& shape, const Pass& pass)
      : program_(program), m_(shape), pass_(pass), rows_(pass.rows), residual_(rows(shape.hidden)),
        other_residual_(rows(shape.hidden)) {}

  void* rows(int64_t width) { return program_.scratch<char>(rows_ * width * dtype_size(m_.dtype)); }

  Activation activation(const void* x, int64_t width) const {
    Activation a;
    a.x = x;
    a.dtype = m_.dtype;
    a.rows = rows_;
    a.k = a.stride = width;
    return a;
  }

  // norm(residual (+ delta)), which becomes the residual. for_linears: they are the next stage, and the only one that
  // needs the result.
  Activation norm(const void* delta, const NormWeight& w, bool for_linears, UnitShape& written) {
    Activation normed = activation(nullptr, m_.hidden);
    Program::Own memory = {};
    if (for_linears && normed.small()) {
      memory = program_.own(rows_ * m_.hidden * dtype_size(m_.dtype));
      normed.own_stride = memory.stride;
    } else {
      memory.memory = static_cast<char*>(rows(m_.hidden));
    }
    normed.x = memory.memory;

    RmsNormArgs a = {};
    a.x = delta ? delta : residual_;
    a.residual = delta ? residual_ : nullptr;
    if (delta) std::swap(residual_, other_residual_);
    a.sum = delta ? residual_ : nullptr;
    a.weight = w.data;
    a.out = memory.memory;
    a.rows = rows_;
    a.d = a.x_stride = a.residual_stride = a.sum_stride = a.out_stride = m_.hidden;
    a.eps = m_.eps;
    a.kind = m_.norm;
    a.dtype = m_.dtype;
    a.weight_dtype = w.dtype;
    written = {};
    if (normed.own_stride != 0)
      prepare_rms_norm(program_, a, normed.own_stride);
    else
      written = add_rms_norm(program_, a);
    return normed;
  }

  void* residual() const { return residual_; }

  void head(const void* delta, const NormWeight& final_norm, const LinearWeight& weight, void* logits) {
    UnitShape written;
    Activation x = norm(delta, final_norm, true, written);
    const LinearWeight* weights[] = {&weight};
    const LinearOut out[] = {{logits, weight.n, m_.dtype}};
    add_quantize(program_, x, weights, 1, written);
    add_linears(program_, x, weights, out, 1);
  }

  void layer(const DecoderLayer& layer, const void* delta_in, void* delta_out) {
    const DecoderWeights& w = layer.weights;
    const int64_t q_width = m_.heads * m_.head_dim, kv_width = m_.kv_heads * m_.head_dim;

    UnitShape written;
    Activation x = norm(delta_in, w.input_norm, true, written);
    const LinearWeight* qkv[] = {&w.q, &w.k, &w.v};
    void *q = rows(q_width), *k = rows(kv_width), *v = rows(kv_width);
    const LinearOut qkv_out[] = {{q, q_width, m_.dtype}, {k, kv_width, m_.dtype}, {v, kv_width, m_.dtype}};
    add_quantize(program_, x, qkv, 3, written);
    add_linears(program_, x, qkv, qkv_out, 3);

    HeadsStage heads = {rms_norm_table.get(), rotary_table.get(), quantize_rows_table.get(), m_, w.q_norm, w.k_norm,
                        layer.cache, &pass_, layer.rotary && pass_.cos != nullptr, q, k, v, layer.window};
    program_.add(heads, rows_ * m_.kv_heads, rows_ * (q_width + 2 * kv_width) * dtype_size(m_.dtype), run_heads,
                 warm_heads);

    void* attended = rows(q_width);
    written = attention(layer, q, attended);
    const LinearWeight* o[] = {&w.o};
    const LinearOut o_out[] = {{delta_out, m_.hidden, m_.dtype}};
    Activation a = activation(attended, q_width);
    add_quantize(program_, a, o, 1, written);
    add_linears(program_, a, o, o_out, 1);

    Activation y = norm(delta_out, w.post_norm, true, written);
    const LinearWeight* gate_up[] = {&w.gate, &w.up};
    add_quantize(program_, y, gate_up, 2, written);
    Activation z = add_gate_up(program_, y, w.gate, w.up, written);
    const LinearWeight* down[] = {&w.down};
    add_quantize(program_, z, down, 1, written);
    add_linears(program_, z, down, o_out, 1);
  }

 private:
  UnitShape attention(const DecoderLayer& layer, const void* q, void* out) {
    const int64_t d = m_.head_dim, width = m_.heads * d;
    AttentionCall call = {};
    call.q = q;
    call.q_strides = {pass_.tokens * width, d, width};
    call.k = layer.cache.k;
    call.k_strides = {layer.cache.k_batch, layer.cache.k_head, layer.cache.k_slot};
    call.v = layer.cache.v;
    call.v_strides = {layer.cache.v_batch, layer.cache.v_head, layer.cache.v_slot};
    call.out = out;
    call.out_strides = {pass_.tokens * width, d, width};
    call.dtype = m_.dtype;
    call.kv_dtype = layer.cache.dtype;
    call.batch = pass_.batch;
    call.heads = m_.heads;
    call.kv_heads = m_.kv_heads;
    call.queries = pass_.tokens;
    call.keys = pass_.keys;
    call.keys_now = &pass_.keys;
    call.d = call.dv = d;
    call.scale = m_.sm_scale;
    call.causal = true;
    call.window = layer.window;
    call.starts = pass_.starts;
    return add_attention(program_, call, pass_.tokens == 1);
  }

  Program& program_;
  DecoderShape m_;
  const Pass& pass_;
  int64_t rows_;
  void *residual_, *other_residual_;  // a sum goes to the other one: members may still read this one
};

// The program of one pass through the layers.
class PassProgram {
 public:
  // pass must live as long. With a head, logits are its results; without, hidden states: results().
  PassProgram(const DecoderShape& m, const DecoderLayer* layers, int64_t count, const Pass& pass,
              const NormWeight& final_norm, const LinearWeight* head, void* logits,
              ScratchMemory& memory = ScratchMemory::of_this_thread())
      : m_(m), pass_(pass), program_(count * kStagesPerLayer + kLastStages, memory) {
    Builder builder(program_, m, pass);
    hidden_ = builder.residual();
    void* delta = builder.rows(m.hidden);
    program_.record();
    for (int64_t i = 0; i < count; ++i) {
      program_.rewind();
      builder.layer(layers[i], i == 0 ? nullptr : delta, delta);
    }
    program_.rewind();
    const void* last = count > 0 ? delta : nullptr;
    if (head != nullptr) {
      builder.head(last, final_norm, *head, logits);
      return;
    }
    // Without a final norm only the sum is wanted: the norm stage adds, and what it normalises is dropped.
    const NormWeight& last_norm = final_norm.data ? final_norm : layers[count - 1].weights.post_norm;
    UnitShape written;
    const Activation normed = builder.norm(last, last_norm, false, written);
    results_ = final_norm.data ? normed.x : builder.residual();
  }

  // Of tokens first .. first + pass.tokens of every batch row.
  void run(const DecoderInput& in, int64_t first) {
    const size_t bytes = size_t(m_.hidden * dtype_size(m_.dtype));
    for (int64_t b = 0; b < pass_.batch; ++b)
      for (int64_t t = 0; t < pass_.tokens; ++t)
        memcpy(advance(hidden_, (b * pass_.tokens + t) * m_.hidden, m_.dtype),
               advance(in.hidden, b * in.batch_stride + (first + t) * in.token_stride, m_.dtype), bytes);
    program_.run();
  }

  const void* results() const { return results_; }  // [batch, tokens, hidden]; null with a head
  int members() const { return program_.members(); }

 private:
  DecoderShape m_;
  const Pass& pass_;
  Program program_;
  void* hidden_;  // where the layers begin
  const void* results_ = nullptr;
};

}  // namespace

void run_decoder(const DecoderShape& shape, const DecoderLayer* layers, int64_t count, const DecoderInput& input,
                 const NormWeight& final_norm, void* out) {
  const int64_t step = std::max<int64_t>(1, kMaxRows / std::max<int64_t>(1, input.batch));
  for (int64_t first = 0; first < input.tokens; first += step) {
    const int64_t tokens = std::min(step, input.tokens - first), width = shape.hidden;
    const Pass pass(input, first, tokens, shape.dtype);
    PassProgram program(shape, layers, count, pass, final_norm, nullptr, nullptr);
    program.run(input, first);
    for (int64_t b = 0; b < input.batch; ++b)
      memcpy(advance(out, (b * input.tokens + first) * width, shape.dtype),
             advance(program.results(), b * tokens * width, shape.dtype),
             size_t(tokens * width * dtype_size(shape.dtype)));
  }
}

class DecoderSteps::State {
 public:
  State(const DecoderShape& shape, const DecoderLayer* layers, int64_t count, const DecoderInput& input,
        const NormWeight& final_norm, const LinearWeight& head, void* logits)
      : shape_(shape), layers_(layers), count_(count), input_(input), final_norm_(final_norm), head_(head),
        logits_(logits), pass_(input, 0, 1, shape.dtype) {
    if (input.tokens != 1 || final_norm.data == nullptr)
      throw std::logic_error("the head follows one token and the final norm");
  }

  void run(int64_t cache_len) {
    pass_.set_cache_len(cache_len);
    const int64_t blocks = (pass_.keys + kAttentionBlock - 1) / kAttentionBlock;
    if (!program_ || blocks != blocks_ || program_->members() != num_threads()) {
      program_.reset();  // before its successor takes the memory
      program_.emplace(shape_, layers_, count_, pass_, final_norm_, &head_, logits_, memory_);
      blocks_ = blocks;
    }
    program_->run(input_, 0);
  }

 private:
  DecoderShape shape_;
  const DecoderLayer* layers_;
  int64_t count_;
  DecoderInput input_;
  NormWeight final_norm_;
  LinearWeight head_;
  void* logits_;
  Pass pass_;
  ScratchMemory memory_;
  std::optional<PassProgram> program_;
  int64_t blocks_ = 0;
};

DecoderSteps::DecoderSteps(const DecoderShape& shape, const DecoderLayer* layers, int64_t count,
                           const DecoderInput& input, const NormWeight& final_norm, const LinearWeight& head,
                           void* logits)
    : state_(std::make_unique<State>(shape, layers, count, input, final_norm, head, logits)) {}

DecoderSteps::DecoderSteps(DecoderSteps&&) noexcept = default;
DecoderSteps::~DecoderSteps() = default;

void DecoderSteps::run(int64_t cache_len) { state_->run(cache_len); }

}  // namespace tle
