// What attention costs when it is written down without further thought: one query head after another, each reading its
// keys and values by itself. The compiler vectorises the loops over d with the flags of the file's level.
#pragma once

#include <stdint.h>

#include "csrc/kernels/common/isa.h"

namespace tle::bench {

// out[h] = softmax(scale q[h] k[h / share]^T) v[h / share], everything in bf16 with fp32 sums.
struct NaiveAttention {
  const uint16_t *q, *k, *v;  // [heads, d], [heads / share, keys, d] twice
  uint16_t* out;              // [heads, d]
  float* scores;              // [keys] scratch
  int64_t heads, share, keys, d;  // d at most 256
  float scale;
};

typedef void NaiveAttentionFn(const NaiveAttention&);
NaiveAttentionFn naive_attention_neon, naive_attention_avx2;

// The loop compiled for a level of this architecture, or null.
NaiveAttentionFn* naive_attention(Isa isa);

}  // namespace tle::bench
