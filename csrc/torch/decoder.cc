// fused_transformer_layer, fused_decode_step, and planned_decode_step: the same with its weights in a DecodePlan.
// planned_logits and planned_greedy_steps: whole tokens, from ids to logits and on to the next ids.
#include "csrc/engine/decoder_layer.h"

#include <string.h>

#include <torch/custom_class.h>

#include <algorithm>
#include <chrono>

#include "csrc/engine/rotary.h"
#include "csrc/kernels/attention/attention.h"
#include "csrc/torch/argmax.h"
#include "csrc/torch/checks.h"
#include "csrc/torch/torch_headers.h"

namespace tle {

namespace {

using OptionalTensors = c10::List<std::optional<at::Tensor>>;

constexpr int64_t kWeightsPerLayer = 18;
constexpr const char* kWeightNames[kWeightsPerLayer] = {
    "input_norm", "q", "q_bias", "k",         "k_bias", "v",         "v_bias", "q_norm",  "k_norm",
    "o",          "o_bias", "post_norm", "gate", "gate_bias", "up",  "up_bias", "down", "down_bias"};

class Call {
 public:
  Call(const char* op, const at::Tensor& hidden, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
       int64_t intermediate_size, double eps, double sm_scale, std::string_view norm)
      : op_(op) {
    m_.dtype = float_dtype(op, "hidden", hidden);
    check_dim(op, "hidden", hidden, 3);
    TORCH_CHECK_VALUE(num_heads > 0 && num_kv_heads > 0 && num_heads % num_kv_heads == 0, op,
                      ": num_heads must be a multiple of num_kv_heads, got ", num_heads, " and ", num_kv_heads);
    TORCH_CHECK_VALUE(head_dim > 0 && head_dim <= 512, op, ": head_dim must be in 1 .. 512, got ", head_dim);
    TORCH_CHECK_VALUE(intermediate_size > 0, op, ": intermediate_size must be positive, got ", intermediate_size);
    m_.heads = num_heads;
    m_.kv_heads = num_kv_heads;
    m_.head_dim = head_dim;
    m_.hidden = hidden.size(2);
    m_.intermediate = intermediate_size;
    m_.eps = float(eps);
    m_.sm_scale = float(sm_scale);
    m_.norm = norm_kind(op, norm);
  }

  void set_input(const at::Tensor& hidden, int64_t cache_len, const std::optional<at::Tensor>& cos,
                 const std::optional<at::Tensor>& sin, const std::optional<at::Tensor>& starts) {
    const char* op = op_;
    TORCH_CHECK_VALUE(cache_len >= 0, op, ": cache_len must not be negative, got ", cache_len);
    const at::Tensor h = hidden.stride(2) == 1 || hidden.size(2) == 1 ? hidden : owned(hidden.contiguous());
    in_.hidden = h.const_data_ptr();
    in_.batch = h.size(0);
    in_.tokens = h.size(1);
    in_.batch_stride = h.stride(0);
    in_.token_stride = h.stride(1);
    in_.cache_len = cache_len;
    in_.cos = in_.sin = nullptr;
    in_.rotary_dim = in_.table_batch_stride = 0;
    in_.starts = nullptr;
    TORCH_CHECK_VALUE(cos.has_value() == sin.has_value(), op, ": cos and sin must come together");
    if (cos.has_value()) {
      in_.cos = table("cos", *cos);
      in_.sin = table("sin", *sin);
      TORCH_CHECK_VALUE(cos->sizes() == sin->sizes(), op, ": cos and sin must have one shape, got ", cos->sizes(),
                        " and ", sin->sizes());
      in_.rotary_dim = cos->size(2);
      in_.table_batch_stride = cos->size(0) == 1 ? 0 : cos->size(1) * cos->size(2);
    }
    if (starts.has_value()) {
      check_dtype(op, "starts", *starts, at::kLong);
      check_dim(op, "starts", *starts, 1);
      check_size(op, "starts", *starts, 0, in_.batch, "one per batch row");
      in_.starts = owned(starts->contiguous()).const_data_ptr<int64_t>();
      const int64_t keys = cache_len + in_.tokens;
      for (int64_t b = 0; b < in_.batch; ++b)
        TORCH_CHECK_VALUE(in_.starts[b] >= 0 && in_.starts[b] <= keys, op, ": starts must be in 0 .. ", keys,
                          " (used slots and new tokens), got ", in_.starts[b], " for row ", b);
    }
  }

  // weights[at .. at + 18) and the caches of one layer.
  void add_layer(at::ArrayRef<at::Tensor> weights, int64_t at, const at::Tensor& k_cache, const at::Tensor& v_cache,
                 bool rotary, int64_t window) {
    auto get = [&](int64_t i) -> const at::Tensor& { return weights[size_t(at + i)]; };
    auto norm = [&](int64_t i, int64_t size, bool needed) -> NormWeight {
      const at::Tensor& t = get(i);
      TORCH_CHECK_VALUE(t.defined() || !needed, op_, ": weights[", at + i, "] (", kWeightNames[i], ") is missing");
      return t.defined() ? norm_weight(kWeightNames[i], t, size) : NormWeight{};
    };
    auto linear = [&](int64_t i, int64_t n, int64_t k) {
      const at::Tensor &t = get(i), &bias = get(i + 1);
      TORCH_CHECK_VALUE(t.defined(), op_, ": weights[", at + i, "] (", kWeightNames[i], ") is missing");
      return linear_weight(op_, kWeightNames[i], t, n, k, bias.defined() ? std::optional(bias) : std::nullopt, m_.dtype,
                           keep_);
    };
    const int64_t q_width = m_.heads * m_.head_dim, kv_width = m_.kv_heads * m_.head_dim;
    DecoderLayer layer;
    DecoderWeights& w = layer.weights;
    w.input_norm = norm(0, m_.hidden, true);
    w.q = linear(1, q_width, m_.hidden);
    w.k = linear(3, kv_width, m_.hidden);
    w.v = linear(5, kv_width, m_.hidden);
    w.q_norm = norm(7, m_.head_dim, false);
    w.k_norm = norm(8, m_.head_dim, false);
    w.o = linear(9, m_.hidden, q_width);
    w.post_norm = norm(11, m_.hidden, true);
    w.gate = linear(12, m_.intermediate, m_.hidden);
    w.up = linear(14, m_.intermediate, m_.hidden);
    w.down = linear(16, m_.hidden, m_.intermediate);
    const DType cached = kv_dtype(op_, "k_cache", k_cache, m_.dtype);
    check_dtype(op_, "v_cache", v_cache, k_cache.scalar_type());
    check_cache("k_cache", k_cache, cached);
    check_cache("v_cache", v_cache, cached);
    layer.cache = {k_cache.mutable_data_ptr(), v_cache.mutable_data_ptr(), cached, k_cache.stride(0), k_cache.stride(1),
                   k_cache.stride(2), v_cache.stride(0), v_cache.stride(1), v_cache.stride(2)};
    TORCH_CHECK_VALUE(window >= 0, op_, ": window must not be negative, got ", window);
    layer.rotary = rotary;
    layer.window = window;
    layers_.push_back(layer);
  }

  NormWeight norm_weight(const char* name, const at::Tensor& t, int64_t size) {
    const at::Tensor w = vector_of(op_, name, t, size, m_.dtype);
    if (!w.is_same(t)) keep_.push_back(w);
    return {w.const_data_ptr(), float_dtype(op_, name, w)};
  }

  at::Tensor run(const at::Tensor& hidden, const NormWeight& final_norm) {
    at::Tensor out = at::empty(hidden.sizes(), hidden.options());
    if (out.numel() > 0)
      run_decoder(m_, layers_.data(), int64_t(layers_.size()), in_, final_norm, out.mutable_data_ptr());
    return out;
  }

  // Steps from the input on; logits [batch, head.n] of one token per batch row.
  DecoderSteps steps(const NormWeight& final_norm, const LinearWeight& head, void* logits) const {
    return DecoderSteps(m_, layers_.data(), int64_t(layers_.size()), in_, final_norm, head, logits);
  }

  LinearWeight linear(const char* name, const at::Tensor& weight, const std::optional<at::Tensor>& bias, int64_t n) {
    return linear_weight(op_, name, weight, n, m_.hidden, bias, m_.dtype, keep_);
  }
  DType dtype() const { return m_.dtype; }

  int64_t hidden_size() const { return m_.hidden; }
  void reserve(size_t layers) { layers_.reserve(layers); }

 private:
  const at::Tensor& owned(at::Tensor t) {
    keep_.push_back(std::move(t));
    return keep_.back();
  }

  const void* table(const char* name, const at::Tensor& t) {
    check_cpu(op_, name, t);
    TORCH_CHECK_TYPE(t.scalar_type() == scalar_type(m_.dtype), op_, ": ", name, " must have hidden's dtype ",
                     scalar_type(m_.dtype), ", got ", t.scalar_type());
    check_dim(op_, name, t, 3);
    TORCH_CHECK_VALUE(t.size(0) == 1 || t.size(0) == in_.batch, op_, ": ", name, " must have batch size 1 or ",
                      in_.batch, ", got ", t.sizes());
    check_size(op_, name, t, 1, in_.tokens, "the number of tokens");
    TORCH_CHECK_VALUE(t.size(2) % 2 == 0 && t.size(2) <= m_.head_dim, op_, ": ", name,
                      " must have an even last dimension of at most head_dim ", m_.head_dim, ", got ", t.sizes());
    return owned(t.contiguous()).const_data_ptr();
  }

  void check_cache(const char* name, const at::Tensor& t, DType cached) {
    const int64_t width = m_.head_dim + (cached == DType::kI8 ? kScaleBytes : 0);
    check_dim(op_, name, t, 4);
    TORCH_CHECK_VALUE(t.size(0) == in_.batch && t.size(1) == m_.kv_heads && t.size(3) == width, op_, ": ", name,
                      " must be [", in_.batch, ", ", m_.kv_heads, ", slots, ", width, "], got ", t.sizes());
    TORCH_CHECK_VALUE(t.size(2) >= in_.cache_len + in_.tokens, op_, ": ", name, " has ", t.size(2), " slots, and ",
                      in_.cache_len, " used ones and ", in_.tokens, " new tokens need ", in_.cache_len + in_.tokens);
    TORCH_CHECK_VALUE(t.stride(3) == 1 || t.size(3) == 1, op_, ": the last dimension of ", name,
                      " must be dense, got strides ", t.strides());
  }

  const char* op_;
  DecoderShape m_;
  DecoderInput in_;
  std::vector<DecoderLayer> layers_;
  std::vector<at::Tensor> keep_;  // copies of what was given
};

// A list of optional tensors with undefined ones for the missing.
std::vector<at::Tensor> plain(const OptionalTensors& weights) {
  std::vector<at::Tensor> list;
  list.reserve(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    const std::optional<at::Tensor> t = weights[i];
    list.push_back(t.has_value() ? *t : at::Tensor());
  }
  return list;
}

// What fused_decode_step is told of the model besides its weights.
struct DecodeSettings {
  int64_t num_heads, num_kv_heads, head_dim, intermediate_size;
  double eps, sm_scale;
  std::string norm_kind;
  std::vector<int64_t> rope, windows;
};

// The layers and the final norm of a model, with the first step's tokens.
NormWeight set_up(Call& call, const char* op, at::ArrayRef<at::Tensor> weights, at::TensorList k_cache,
                  at::TensorList v_cache, const DecodeSettings& set, bool rotates) {
  const size_t layers = k_cache.size();
  TORCH_CHECK_VALUE(weights.size() == layers * kWeightsPerLayer + 1, op, ": weights must have ", kWeightsPerLayer,
                    " entries for each of the ", layers, " layers and the final norm, got ", weights.size());
  TORCH_CHECK_VALUE(v_cache.size() == layers, op, ": v_cache must have one entry per layer (", layers, "), got ",
                    v_cache.size());
  TORCH_CHECK_VALUE(set.rope.empty() || set.rope.size() == layers, op,
                    ": rope must be empty or have one entry per layer (", layers, "), got ", set.rope.size());
  TORCH_CHECK_VALUE(set.windows.empty() || set.windows.size() == layers, op,
                    ": windows must be empty or have one entry per layer (", layers, "), got ", set.windows.size());
  call.reserve(layers);
  for (size_t i = 0; i < layers; ++i)
    call.add_layer(weights, int64_t(i) * kWeightsPerLayer, k_cache[i], v_cache[i],
                   rotates && (set.rope.empty() || set.rope[i] != 0), set.windows.empty() ? 0 : set.windows[i]);
  const at::Tensor& final_norm = weights[layers * kWeightsPerLayer];
  TORCH_CHECK_VALUE(final_norm.defined(), op, ": the final norm, the last entry of weights, is missing");
  return call.norm_weight("final_norm", final_norm, call.hidden_size());
}

Call call_of(const char* op, const at::Tensor& hidden, const DecodeSettings& set) {
  return Call(op, hidden, set.num_heads, set.num_kv_heads, set.head_dim, set.intermediate_size, set.eps, set.sm_scale,
              set.norm_kind);
}

at::Tensor decode_step(const char* op, const at::Tensor& hidden, at::ArrayRef<at::Tensor> weights,
                       at::TensorList k_cache, at::TensorList v_cache, int64_t cache_len,
                       const std::optional<at::Tensor>& cos, const std::optional<at::Tensor>& sin,
                       const DecodeSettings& set, const std::optional<at::Tensor>& starts) {
  Call call = call_of(op, hidden, set);
  call.set_input(hidden, cache_len, cos, sin, starts);
  const NormWeight final_norm = set_up(call, op, weights, k_cache, v_cache, set, cos.has_value());
  return call.run(hidden, final_norm);
}

at::Tensor fused_transformer_layer(const at::Tensor& hidden, const OptionalTensors& weights, const at::Tensor& k_cache,
                                   const at::Tensor& v_cache, int64_t cache_len, const std::optional<at::Tensor>& cos,
                                   const std::optional<at::Tensor>& sin, int64_t num_heads, int64_t num_kv_heads,
                                   int64_t head_dim, int64_t intermediate_size, double eps, double sm_scale,
                                   c10::string_view norm_kind, int64_t window,
                                   const std::optional<at::Tensor>& starts) {
  const char* op = "fused_transformer_layer";
  TORCH_CHECK_VALUE(int64_t(weights.size()) == kWeightsPerLayer, op, ": weights must have ", kWeightsPerLayer,
                    " entries, got ", weights.size());
  Call call(op, hidden, num_heads, num_kv_heads, head_dim, intermediate_size, eps, sm_scale, norm_kind);
  call.set_input(hidden, cache_len, cos, sin, starts);
  call.add_layer(plain(weights), 0, k_cache, v_cache, cos.has_value(), window);
  return call.run(hidden, {});
}

at::Tensor fused_decode_step(const at::Tensor& hidden, const OptionalTensors& weights, at::TensorList k_cache,
                             at::TensorList v_cache, int64_t cache_len, const std::optional<at::Tensor>& cos,
                             const std::optional<at::Tensor>& sin, int64_t num_heads, int64_t num_kv_heads,
                             int64_t head_dim, int64_t intermediate_size, double eps, double sm_scale,
                             c10::string_view norm_kind, at::IntArrayRef rope, at::IntArrayRef windows,
                             const std::optional<at::Tensor>& starts) {
  return decode_step("fused_decode_step", hidden, plain(weights), k_cache, v_cache, cache_len, cos, sin,
                     {num_heads, num_kv_heads, head_dim, intermediate_size, eps, sm_scale, std::string(norm_kind),
                      rope.vec(), windows.vec()},
                     starts);
}

// The weights and settings of fused_decode_step, kept between calls: handing over some hundred tensors costs a small
// model more than its attention.
struct DecodePlan : torch::CustomClassHolder {
  DecodePlan(const OptionalTensors& list, DecodeSettings settings)
      : weights(plain(list)), settings(std::move(settings)) {}

  // The weights of the last token went through the caches since the tensors were looked at, so each would be waited
  // for, one after the other. Their addresses are known: asking for all of them first takes a tenth of that.
  void prefetch(at::TensorList k_cache, at::TensorList v_cache) const {
    auto each = [&](auto&& visit) {
      for (const auto& list : {at::TensorList(weights), k_cache, v_cache})
        for (const at::Tensor& t : list)
          if (t.defined()) visit(t);
    };
    each([](const at::Tensor& t) {
      const char* object = reinterpret_cast<const char*>(t.unsafeGetTensorImpl());
      for (size_t i = 0; i < sizeof(c10::TensorImpl); i += 64) __builtin_prefetch(object + i);
    });
    each([](const at::Tensor& t) {
      __builtin_prefetch(t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    });
    each([](const at::Tensor& t) { __builtin_prefetch(t.const_data_ptr()); });
  }

  // The autograd guard does not look into a class's object.
  void check_no_gradient(const char* op, const at::Tensor& hidden) const {
    if (!c10::GradMode::is_enabled()) return;
    bool wanted = hidden.requires_grad();
    for (const at::Tensor& w : weights) wanted = wanted || (w.defined() && w.requires_grad());
    TORCH_CHECK(!wanted, op, ": hidden or a weight requires a gradient, and this operator has none; call it under "
                "torch.no_grad() or torch.inference_mode(), or detach the tensor");
  }

  std::vector<at::Tensor> weights;
  DecodeSettings settings;
};

at::Tensor planned_decode_step(const at::Tensor& hidden, const c10::intrusive_ptr<DecodePlan>& plan,
                               at::TensorList k_cache, at::TensorList v_cache, int64_t cache_len,
                               const std::optional<at::Tensor>& cos, const std::optional<at::Tensor>& sin,
                               const std::optional<at::Tensor>& starts) {
  const char* op = "planned_decode_step";
  plan->prefetch(k_cache, v_cache);
  plan->check_no_gradient(op, hidden);
  return decode_step(op, hidden, plan->weights, k_cache, v_cache, cache_len, cos, sin, plan->settings, starts);
}

// A DecodePlan and what stands around the layers: between two tokens nothing is left for Python to do.
struct TokenPlan : torch::CustomClassHolder {
  c10::intrusive_ptr<DecodePlan> decoder;
  at::Tensor embedding;  // [embeddings, H] of the layers' dtype, or packed
  at::Tensor head;       // a linear weight with V out features
  std::optional<at::Tensor> head_bias;
  int64_t embeddings, vocabulary, hidden;  // rows of the embedding, of the head, and the size of a row
  at::Tensor inv_freq;  // fp32 [R / 2]
  double attention_scaling;
};

// Steps of one token per batch row while nobody changes the model or replaces the caches: everything is looked at once,
// when the stretch begins. What changes between steps lies in place: ids become rows of hidden_, positions rows of cos_
// and sin_.
class TokenStretch : public torch::CustomClassHolder {
 public:
  TokenStretch(c10::intrusive_ptr<TokenPlan> plan, std::vector<at::Tensor> k_cache, std::vector<at::Tensor> v_cache,
               int64_t cache_len, const at::Tensor& position_ids, const std::optional<at::Tensor>& starts)
      : plan_(std::move(plan)), k_cache_(std::move(k_cache)), v_cache_(std::move(v_cache)), used_(cache_len) {
    const char* op = "TokenStretch";
    const TokenPlan& p = *plan_;
    TORCH_CHECK_VALUE(!k_cache_.empty() && k_cache_[0].dim() == 4, op,
                      ": k_cache must have [B, heads, slots, head_dim] for each layer");
    const int64_t batch = k_cache_[0].size(0);
    check_dtype(op, "position_ids", position_ids, at::kLong);
    TORCH_CHECK_VALUE(position_ids.dim() == 2 && position_ids.size(1) == 1 &&
                          (position_ids.size(0) == 1 || position_ids.size(0) == batch),
                      op, ": position_ids must be [1 or ", batch, ", 1], got ", position_ids.sizes());
    check_dtype(op, "inv_freq", p.inv_freq, at::kFloat);
    check_dim(op, "inv_freq", p.inv_freq, 1);
    p.decoder->prefetch(k_cache_, v_cache_);
    const at::Tensor& norm = p.decoder->weights.back();
    TORCH_CHECK_VALUE(norm.defined(), op, ": the final norm, the last entry of weights, is missing");
    const auto options = position_ids.options().dtype(norm.scalar_type());
    positions_ = position_ids.clone(at::MemoryFormat::Contiguous);
    inv_freq_ = p.inv_freq.contiguous();
    cos_ = at::empty({positions_.size(0), 1, 2 * inv_freq_.size(0)}, options);
    sin_ = at::empty_like(cos_);
    hidden_ = at::empty({batch, 1, p.hidden}, options);
    values_.resize(size_t(p.hidden));
    Call& call = call_.emplace(call_of(op, hidden_, p.decoder->settings));
    embedding_ = call.linear("embedding", p.embedding, std::nullopt, p.embeddings);
    call.set_input(hidden_, used_, cos_, sin_, starts);
    const NormWeight final_norm = set_up(call, op, p.decoder->weights, k_cache_, v_cache_, p.decoder->settings, true);
    slots_ = INT64_MAX;
    for (const auto& list : {k_cache_, v_cache_})
      for (const at::Tensor& t : list) slots_ = std::min(slots_, t.size(2));
    logits_ = at::empty({batch, p.vocabulary}, options);
    const LinearWeight head = call.linear("head", p.head, p.head_bias, p.vocabulary);
    steps_.emplace(call.steps(final_norm, head, logits_.mutable_data_ptr()));
  }

  // Before the first of `count` steps with these tokens.
  void check(const char* op, const at::Tensor& tokens, int64_t count) const {
    check_dtype(op, "tokens", tokens, at::kLong);
    TORCH_CHECK_VALUE(tokens.dim() == 1 && tokens.size(0) == logits_.size(0), op, ": tokens must be [",
                      logits_.size(0), "], got ", tokens.sizes());
    TORCH_CHECK_VALUE(count >= 1, op, ": count must be positive, got ", count);
    TORCH_CHECK_VALUE(used_ + count <= slots_, op, ": every cache must have at least ", used_ + count, " slots for ",
                      used_, " used ones and ", count, " steps, got ", slots_);
    plan_->decoder->check_no_gradient(op, hidden_);
  }

  // The logits [B, V] of the next tokens, whose keys and values are stored; valid until the next step.
  const at::Tensor& step(const char* op, const int64_t* tokens) {
    char* rows = static_cast<char*>(hidden_.mutable_data_ptr());
    for (int64_t i = 0; i < logits_.size(0); ++i) {
      TORCH_CHECK_INDEX(tokens[i] >= 0 && tokens[i] < embedding_.n, op, ": token ", tokens[i], " is not in 0 .. ",
                        embedding_.n - 1);
      embedding_.row(tokens[i], dtype(), rows + i * embedding_.k * dtype_size(dtype()), values_.data());
    }
    int64_t* positions = positions_.mutable_data_ptr<int64_t>();
    rotary_tables(positions, positions_.numel(), inv_freq_.const_data_ptr<float>(), inv_freq_.numel(),
                  float(plan_->attention_scaling), dtype(), cos_.mutable_data_ptr(), sin_.mutable_data_ptr());
    if (logits_.numel() > 0) steps_->run(used_);
    ++used_;
    for (int64_t i = 0; i < positions_.numel(); ++i) ++positions[i];
    return logits_;
  }

  DType dtype() const { return call_->dtype(); }

 private:
  c10::intrusive_ptr<TokenPlan> plan_;
  std::vector<at::Tensor> k_cache_, v_cache_;
  int64_t used_, slots_;
  at::Tensor positions_, inv_freq_, cos_, sin_, hidden_, logits_;
  std::vector<float> values_;
  std::optional<Call> call_;
  LinearWeight embedding_;
  std::optional<DecoderSteps> steps_;
};

at::Tensor planned_logits(const at::Tensor& tokens, const c10::intrusive_ptr<TokenStretch>& stretch) {
  const char* op = "planned_logits";
  stretch->check(op, tokens, 1);
  const at::Tensor ids = tokens.contiguous();
  const at::Tensor& logits = stretch->step(op, ids.const_data_ptr<int64_t>());
  at::Tensor out = at::empty(logits.sizes(), logits.options());  // the next step writes over `logits`
  memcpy(out.mutable_data_ptr(), logits.const_data_ptr(), logits.nbytes());  // clone() costs ten times as much code
  return out;
}

at::Tensor planned_greedy_steps(const at::Tensor& tokens, const c10::intrusive_ptr<TokenStretch>& stretch,
                                int64_t count, const std::optional<at::Tensor>& ends) {
  const char* op = "planned_greedy_steps";
  // Python answers an interrupt between two calls, so none takes much longer than this.
  constexpr auto kTime = std::chrono::milliseconds(100);
  const auto start = std::chrono::steady_clock::now();
  stretch->check(op, tokens, count);
  TORCH_CHECK_VALUE(tokens.size(0) == 1, op, ": tokens must be [1], got ", tokens.sizes());
  at::Tensor last_tokens;
  if (ends.has_value()) {
    check_dtype(op, "ends", *ends, at::kLong);
    last_tokens = ends->contiguous();
  }
  const int64_t* end = ends.has_value() ? last_tokens.const_data_ptr<int64_t>() : nullptr;
  const int64_t end_count = ends.has_value() ? last_tokens.numel() : 0;

  at::Tensor out = at::empty({count}, tokens.options());
  int64_t* found = out.mutable_data_ptr<int64_t>();
  int64_t token = *tokens.const_data_ptr<int64_t>(), done = 0;
  do {
    const at::Tensor& logits = stretch->step(op, &token);
    found[done++] = token = first_largest(logits.const_data_ptr(), stretch->dtype(), logits.size(1));
  } while (done < count && std::find(end, end + end_count, token) == end + end_count &&
           std::chrono::steady_clock::now() - start <= kTime);
  return out.narrow(0, 0, done);
}

}  // namespace

// In the library of schemas.cc, whose static initialiser may run before or after this one.
TORCH_LIBRARY_FRAGMENT(tle, m) {
  m.class_<DecodePlan>("DecodePlan")
      .def(torch::init([](const OptionalTensors& weights, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                          int64_t intermediate_size, double eps, double sm_scale, const std::string& norm_kind,
                          const std::vector<int64_t>& rope, const std::vector<int64_t>& windows) {
        return c10::make_intrusive<DecodePlan>(
            weights, DecodeSettings{num_heads, num_kv_heads, head_dim, intermediate_size, eps, sm_scale, norm_kind,
                                    rope, windows});
      }));
  m.class_<TokenPlan>("TokenPlan")
      .def(torch::init([](c10::intrusive_ptr<DecodePlan> decoder, at::Tensor embedding, at::Tensor head,
                          std::optional<at::Tensor> head_bias, int64_t embeddings, int64_t vocabulary, int64_t hidden,
                          at::Tensor inv_freq, double attention_scaling) {
        auto plan = c10::make_intrusive<TokenPlan>();
        plan->decoder = std::move(decoder);
        plan->embedding = std::move(embedding);
        plan->head = std::move(head);
        plan->head_bias = std::move(head_bias);
        plan->embeddings = embeddings;
        plan->vocabulary = vocabulary;
        plan->hidden = hidden;
        plan->inv_freq = std::move(inv_freq);
        plan->attention_scaling = attention_scaling;
        return plan;
      }));
  // k_cache and v_cache as in fused_decode_step, with cache_len slots in use; position_ids int64 [1 or B, 1] of the
  // first step; starts int64 [B].
  m.class_<TokenStretch>("TokenStretch")
      .def(torch::init([](c10::intrusive_ptr<TokenPlan> plan, std::vector<at::Tensor> k_cache,
                          std::vector<at::Tensor> v_cache, int64_t cache_len, const at::Tensor& position_ids,
                          const std::optional<at::Tensor>& starts) {
        return c10::make_intrusive<TokenStretch>(std::move(plan), std::move(k_cache), std::move(v_cache), cache_len,
                                                 position_ids, starts);
      }));
  m.def("planned_decode_step(Tensor hidden, __torch__.torch.classes.tle.DecodePlan plan, Tensor(a!)[] k_cache, "
        "Tensor(b!)[] v_cache, int cache_len, Tensor? cos, Tensor? sin, Tensor? starts=None) -> Tensor");
  // The logits [B, V] after one more token per batch row. tokens int64 [B].
  m.def("planned_logits(Tensor tokens, __torch__.torch.classes.tle.TokenStretch stretch) -> Tensor");
  // Greedy decoding from tokens [1]: the next n <= count tokens, int64 [n]. Ends after a token of `ends` (int64 [E]),
  // and, with at least one token, when about 0.1 s have passed. n slots of the caches are filled: the last token's are
  // not.
  m.def("planned_greedy_steps(Tensor tokens, __torch__.torch.classes.tle.TokenStretch stretch, int count, "
        "Tensor? ends=None) -> Tensor");
}

TORCH_LIBRARY_IMPL(tle, CPU, m) {
  m.impl("fused_transformer_layer", fused_transformer_layer);
  m.impl("fused_decode_step", fused_decode_step);
  m.impl("planned_decode_step", planned_decode_step);
  m.impl("planned_logits", planned_logits);
  m.impl("planned_greedy_steps", planned_greedy_steps);
}

}  // namespace tle
