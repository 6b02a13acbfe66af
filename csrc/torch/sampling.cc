// Choosing tokens: top-k, nucleus and multinomial, with torch's and transformers' results.
#include "csrc/engine/sampling.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/topk.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <optional>

#include "csrc/torch/checks.h"
#include "csrc/torch/torch_headers.h"

namespace tle {

namespace {

// [B, V] of fp32, 0 < V < 2^31.
void check_matrix(const char* op, const char* name, const at::Tensor& t) {
  check_cpu(op, name, t);
  check_dtype(op, name, t, at::kFloat);
  check_dim(op, name, t, 2);
  TORCH_CHECK_VALUE(t.size(1) > 0 && t.size(1) <= std::numeric_limits<int32_t>::max(), op, ": ", name,
                    " must have 1 .. 2^31 - 1 columns, got ", t.sizes());
}

// from[n] to to[n], where it is below the bar the filter's value.
void keep_from(float bar, const float* from, int64_t n, float filter, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = from[i] < bar ? filter : from[i];
}

at::Tensor top_k_logits(const at::Tensor& given, int64_t k, double filter_value) {
  const char* op = "top_k_logits";
  check_matrix(op, "scores", given);
  TORCH_CHECK_VALUE(k >= 1, op, ": k must be positive, got ", k);
  const at::Tensor scores = given.contiguous();
  const float filter = at::Scalar(filter_value).to<float>();
  const int64_t size = scores.size(1), most = std::min(k, size);
  at::Tensor out = at::empty_like(scores);
  for (int64_t row = 0; row < scores.size(0); ++row) {
    const float* from = scores.const_data_ptr<float>() + row * size;
    const std::optional<float> found = kth_largest(from, size, most);
    // Among NaNs, topk knows an order.
    const float bar = found ? *found : std::get<0>(at::topk(scores[row], most))[most - 1].item<float>();
    keep_from(bar, from, size, filter, out.mutable_data_ptr<float>() + row * size);
  }
  return out;
}

// How many of the cumulative probabilities of sorted scores, of which the first `impossible` are 0, are no more than
// `removed`. The sums are torch's, of its softmax: their roundings decide.
int64_t count_removed(const at::Tensor& probabilities, int64_t impossible, float removed) {
  const int64_t size = probabilities.size(0);
  const at::Tensor sums = at::cumsum(probabilities.slice(0, impossible), 0);
  const float* s = sums.const_data_ptr<float>();
  return impossible + (std::upper_bound(s, s + (size - impossible), removed) - s);
}

at::Tensor top_p_logits(const at::Tensor& given, double top_p, double filter_value, int64_t at_least) {
  const char* op = "top_p_logits";
  check_matrix(op, "scores", given);
  TORCH_CHECK_VALUE(top_p >= 0 && top_p <= 1, op, ": top_p must be in 0 .. 1, got ", top_p);
  TORCH_CHECK_VALUE(at_least >= 1, op, ": min_tokens_to_keep must be positive, got ", at_least);
  const at::Tensor scores = given.contiguous();
  const float filter = at::Scalar(filter_value).to<float>();
  const int64_t size = scores.size(1);
  at::Tensor out = at::empty_like(scores), sorted = at::empty({size}, scores.options());
  float* s = sorted.mutable_data_ptr<float>();
  for (int64_t row = 0; row < scores.size(0); ++row) {
    const float* from = scores.const_data_ptr<float>() + row * size;
    float* to = out.mutable_data_ptr<float>() + row * size;
    const std::optional<int64_t> impossible = sort_scores(from, size, s);
    int64_t edge = 0;
    // Otherwise every probability is NaN, and none is removed.
    if (impossible && *impossible < size) {
      edge = count_removed(at::softmax(sorted, 0), *impossible, float(1 - top_p));
      edge = std::min(edge, std::max<int64_t>(0, size - at_least));
    }
    if (edge == 0) {
      std::copy(from, from + size, to);
    } else if (s[edge - 1] < s[edge]) {
      keep_from(s[edge], from, size, filter, to);
    } else {
      std::fill(to, to + size, filter);
      for (const int32_t i : end_of_sort(from, size, edge)) to[i] = from[i];
    }
  }
  return out;
}

at::Tensor multinomial(const at::Tensor& probabilities, std::optional<at::Generator> wanted) {
  check_matrix("multinomial", "probabilities", probabilities);
  auto* generator = at::get_generator_or_default<at::CPUGeneratorImpl>(wanted, at::detail::getDefaultCPUGenerator());
  const int64_t rows = probabilities.size(0), size = probabilities.size(1);
  const float* p = probabilities.const_data_ptr<float>();
  // torch draws in the order of the memory, and refuses more than 2^24 columns.
  bool usual = probabilities.is_contiguous() && size <= 1 << 24;
  for (int64_t row = 0; usual && row < rows; ++row) usual = are_probabilities(p + row * size, size);
  if (usual && rows > 0) {
    const std::lock_guard<std::mutex> lock(generator->mutex_);
    at::mt19937 engine = generator->engine();
    at::mt19937_data_pod data = engine.data();
    // left_ is 1 when the next word is that of a new state, whatever next_, and otherwise what is left, and 1 more.
    const int64_t next = TwisterWords::kSize + 1 - data.left_;
    if (data.left_ == 1 || next == int64_t(data.next_)) {
      TwisterWords words(data.state_, next);
      at::Tensor out = at::empty({rows, 1}, probabilities.options().dtype(at::kLong));
      for (int64_t row = 0; row < rows; ++row)
        out.mutable_data_ptr<int64_t>()[row] = exponential_race(p + row * size, size, words);
      data.state_ = words.state();
      data.next_ = uint32_t(words.next());
      data.left_ = int(TwisterWords::kSize + 1 - words.next());
      engine.set_data(data);
      generator->set_engine(engine);
      return out;
    }
  }
  return at::multinomial(probabilities, 1, false, wanted);
}

}  // namespace

TORCH_LIBRARY_IMPL(tle, CPU, m) {
  m.impl("top_k_logits", top_k_logits);
  m.impl("top_p_logits", top_p_logits);
  m.impl("multinomial", multinomial);
}

}  // namespace tle
