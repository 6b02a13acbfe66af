#include "csrc/kernels/attention/attention.h"

#include "csrc/kernels/common/scalar.h"

namespace tle {

namespace {

const float kMinusInfinity = -INFINITY;

// What the mask adds to the score of `key`.
float mask_value(const AttentionMask& mask, int64_t head, int64_t query, int64_t key) {
  const int64_t i = head * mask.head_stride + query * mask.query_stride + key * mask.key_stride;
  switch (mask.kind) {
    case MaskKind::kNone: return 0.0f;
    case MaskKind::kBool: return static_cast<const uint8_t*>(mask.data)[i] ? 0.0f : kMinusInfinity;
    case MaskKind::kF32: return scalar::load(DType::kF32, mask.data, i);
    case MaskKind::kBF16: return scalar::load(DType::kBF16, mask.data, i);
    case MaskKind::kF16: return scalar::load(DType::kF16, mask.data, i);
  }
  return 0.0f;
}

// The scale of a slot of int8 codes, whose codes end at element `end`.
float slot_scale(const void* slots, int64_t end) {
  float scale;
  memcpy(&scale, static_cast<const int8_t*>(slots) + end, sizeof scale);
  return scale;
}

float score(const AttentionArgs& a, int64_t head, int64_t query, int64_t key) {
  const float added = mask_value(a.mask, head, query, key);
  if (added == kMinusInfinity) return kMinusInfinity;
  float lane[16] = {};
  for (int64_t d = 0; d < a.d; ++d) {
    const float q = scalar::load(a.dtype, a.q, head * a.q_head_stride + query * a.q_query_stride + d);
    const float k = scalar::load(a.kv_dtype, a.k, key * a.k_stride + d);
    lane[d % 16] = fmaf(q, k, lane[d % 16]);
  }
  float s = scalar::reduce_lanes(lane);
  if (a.kv_dtype == DType::kI8) s *= slot_scale(a.k, key * a.k_stride + a.d);
  s *= a.scale;
  if (a.softcap > 0.0f) {
    const float x = s / a.softcap, t = scalar::exp(-2.0f * fabsf(x));
    s = a.softcap * copysignf((1.0f - t) / (1.0f + t), x);
  }
  return s + added;
}

// A row's state, or one block's result.
struct Partial {
  float max = kMinusInfinity, sum = 0.0f;
  float acc[kMaxHeadSize] = {};
};

Partial block_of(const AttentionArgs& a, int64_t head, int64_t query, int64_t first, int64_t count) {
  Partial block;
  float s[kAttentionBlock], lane[16] = {};
  for (int64_t i = 0; i < count; ++i) {
    s[i] = score(a, head, query, first + i);
    block.max = s[i] > block.max ? s[i] : block.max;
  }
  for (int64_t i = 0; i < count; ++i) {
    if (s[i] == kMinusInfinity) continue;
    const float p = scalar::exp(s[i] - block.max);
    lane[i % 16] += p;
    const int64_t slot = (first + i) * a.v_stride;
    const float weight = a.kv_dtype == DType::kI8 ? p * slot_scale(a.v, slot + a.dv) : p;
    for (int64_t d = 0; d < a.dv; ++d)
      block.acc[d] = fmaf(weight, scalar::load(a.kv_dtype, a.v, slot + d), block.acc[d]);
  }
  block.sum = scalar::reduce_lanes(lane);
  return block;
}

void merge(Partial& state, const Partial& block, int64_t dv) {
  if (block.sum == 0.0f) return;
  if (state.sum == 0.0f) {
    state = block;
    return;
  }
  const float max = block.max > state.max ? block.max : state.max;
  const float x = scalar::exp(state.max - max), y = scalar::exp(block.max - max);
  state.max = max;
  state.sum = fmaf(block.sum, y, state.sum * x);
  for (int64_t d = 0; d < dv; ++d) state.acc[d] = fmaf(block.acc[d], y, state.acc[d] * x);
}

}  // namespace

void attention_ref(const AttentionArgs& a) {
  for (int64_t row = 0; row < a.heads * a.queries; ++row) {
    Partial state;
    for (int64_t b = a.first_block; b < a.last_block; ++b) {
      const int64_t first = a.begin[row] + b * kAttentionBlock, left = a.end[row] - first;
      if (left <= 0) break;
      merge(state, block_of(a, row % a.heads, row / a.heads, first, left < kAttentionBlock ? left : kAttentionBlock),
            a.dv);
    }
    a.max[row] = state.max;
    a.sum[row] = state.sum;
    for (int64_t d = 0; d < a.dv; ++d) a.acc[row * a.acc_stride + d] = state.acc[d];
  }
}

}  // namespace tle
