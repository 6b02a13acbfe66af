// Softmax attention of a tile of query rows over blocks of keys: the partial result that attention_merge finishes.
//
// A row is one query of one head. Its keys are the slots begin .. end - 1, cut into blocks of kAttentionBlock from its
// own begin, so that left padding, a window or the place in a cache does not change its bits. For each block, in order:
//   s_i = dot(q, k_i) * scale        dot: 16 canonical lanes (scalar.h), D padded with zeros
//   s_i = cap * tanh(s_i / cap)      when softcap > 0; tanh(x) = sign(x) (1 - t) / (1 + t), t = exp(-2 |x|)
//   s_i = s_i + mask_i               when there is a mask; where it is false or -inf, s_i = -inf whatever k_i holds
//   keys with s_i = -inf are skipped from here on (their v is never touched)
//   m = the largest s_i (by s > m, from -inf);  p_i = exp(s_i - m)
//   l = sum of p_i                   16 canonical lanes: lane j takes i = j mod 16, i counted within the block
//   acc[d] = fma(p_i, v_i[d], acc[d])   from +0, i increasing
// and the block (m, l, acc) joins the row's state (M, L, A), which starts empty (-inf, 0, 0): a block without keys
// (l = 0) changes nothing, the first other one becomes the state, and then
//   M' = m > M ? m : M;  x = exp(M - M');  y = exp(m - M');  L = fma(l, y, L x);  A = fma(acc, y, A x)
//
// Keys and values may be int8 (kv_dtype kI8): a slot is then its codes and, right behind them, their fp32 scale, not
// aligned and not negative. The codes are converted to fp32 and take the place of k and v; the scale of a key
// multiplies the dot product and that of a value the weight, each rounded by itself:
//   s_i = (dot(q, k_i) * k_scale_i) * scale
//   acc[d] = fma(p_i * v_scale_i, v_i[d], acc[d])
//
// Sources: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention",
// 2022.
#pragma once

#include <stdint.h>

#include "csrc/kernels/common/dtype.h"

namespace tle {

inline constexpr int64_t kAttentionBlock = 256;
inline constexpr int64_t kMaxHeadSize = 512;
inline constexpr int64_t kScaleBytes = 4;  // of a slot of int8 keys or values
// Limits of one call: rows, and how far apart the first keys of its rows with keys may lie.
inline constexpr int64_t kAttentionRows = 64;
inline constexpr int64_t kAttentionSpread = 64;

enum class MaskKind : int { kNone = 0, kBool, kF32, kBF16, kF16 };

// bool: one byte, 0 or 1, 1 for a key that may be attended to. Otherwise added to the score. Strides in elements, any.
struct AttentionMask {
  const void* data;
  int64_t head_stride, query_stride, key_stride;
  MaskKind kind;
};

struct AttentionArgs {
  const void* q;         // [heads, queries, d]; row r is head r % heads of query r / heads
  const void* k;         // [slots, d], int8: [slots, d + kScaleBytes]
  const void* v;         // [slots, dv], int8: [slots, dv + kScaleBytes]
  const int64_t* begin;  // [rows]
  const int64_t* end;    // [rows]; end <= begin: a row without keys
  float* max;            // [rows] M
  float* sum;            // [rows] L, 0 for a row without keys in these blocks
  float* acc;            // [rows, dv] A; each row has room for dv rounded up to 16; behind dv it is undefined
  void* workspace;       // attention_workspace(rows, d, dv) bytes on a 64-byte boundary
  AttentionMask mask;    // of the first head, first query and slot 0
  int64_t heads, queries, d, dv;
  int64_t q_head_stride, q_query_stride, k_stride, v_stride, acc_stride;  // elements; elements of a row are adjacent
  int64_t first_block, last_block;  // blocks first .. last - 1 of every row
  float scale, softcap;             // softcap 0: none
  DType dtype;                      // of q
  DType kv_dtype;                   // of k and v: dtype or kI8
};

// Enough for every variant: the rows in fp32, their scores, one block's result, some keys and values in fp32, and three
// numbers for each column of the scores (mask, scale of the key, scale of the value).
static inline int64_t attention_workspace(int64_t rows, int64_t d, int64_t dv) {
  const int64_t padded_d = (d + 15) / 16 * 16, padded_dv = (dv + 15) / 16 * 16;
  const int64_t scores = kAttentionBlock + kAttentionSpread + 64;
  return int64_t(sizeof(float)) * (rows * (padded_d + scores + padded_dv) + 64 * (padded_d + padded_dv) + 3 * scores);
}

typedef void AttentionFn(const AttentionArgs&);
AttentionFn attention_ref, attention_neon, attention_avx2, attention_avx512;

}  // namespace tle
