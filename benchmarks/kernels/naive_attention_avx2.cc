#include "benchmarks/kernels/naive_attention_loop.h"

namespace tle::bench {

void naive_attention_avx2(const NaiveAttention& a) { naive_attention_loop(a); }

}  // namespace tle::bench
