// The end of attention: joins the partial results of a row's key blocks (attention.h) and divides.
//
//   (M, L, A) = the partials joined in order, by attention.h's rule
//   with a sink (a logit of its own for each head, that takes part in the denominator only):
//     M' = sink > M ? sink : M;  x = exp(M - M');  y = exp(sink - M');  L = L x + y;  A = A x
//   out[d] = round(A[d] / L), exactly 0 where no partial has keys
//
// Source of the sinks: Xiao et al., "Efficient streaming language models with attention sinks", 2023, as in GPT-OSS.
#pragma once

#include <stdint.h>

#include "csrc/kernels/common/dtype.h"

namespace tle {

struct AttentionMergeArgs {
  const float* max;   // [partials, rows]
  const float* sum;   // [partials, rows]
  float* acc;         // [partials, rows, dv]; partials are joined in place
  const void* sinks;  // [heads] or null
  void* out;          // [heads, queries, dv]; row r is head r % heads of query r / heads
  int64_t partials, heads, queries, dv;
  int64_t partial_stride;               // rows between partials
  int64_t acc_stride;                   // elements between the rows of acc
  int64_t out_head_stride, out_query_stride;
  DType sinks_dtype, dtype;             // of sinks, of out
};

typedef void AttentionMergeFn(const AttentionMergeArgs&);
AttentionMergeFn attention_merge_ref, attention_merge_neon, attention_merge_avx2, attention_merge_avx512;

}  // namespace tle
