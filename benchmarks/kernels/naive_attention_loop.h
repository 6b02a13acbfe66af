// The loop of naive_attention.h, for the files that compile it.
#pragma once

#include <math.h>
#include <string.h>

#include "benchmarks/kernels/naive_attention.h"

namespace tle::bench {
namespace {

inline float of_bf16(uint16_t a) {
  const uint32_t bits = uint32_t(a) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

inline uint16_t to_bf16(float a) {
  uint32_t bits;
  memcpy(&bits, &a, 4);
  return uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline void naive_attention_loop(const NaiveAttention& a) {
  for (int64_t h = 0; h < a.heads; ++h) {
    const uint16_t *q = a.q + h * a.d, *k = a.k + h / a.share * a.keys * a.d, *v = a.v + h / a.share * a.keys * a.d;
    float largest = -INFINITY, sum = 0.0f, acc[256] = {};
    for (int64_t i = 0; i < a.keys; ++i) {
      float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
      for (int64_t j = 0; j < a.d; ++j) dot += of_bf16(q[j]) * of_bf16(k[i * a.d + j]);
      a.scores[i] = dot * a.scale;
      largest = a.scores[i] > largest ? a.scores[i] : largest;
    }
    for (int64_t i = 0; i < a.keys; ++i) {
      const float p = expf(a.scores[i] - largest);
      sum += p;
#pragma omp simd
      for (int64_t j = 0; j < a.d; ++j) acc[j] += p * of_bf16(v[i * a.d + j]);
    }
    for (int64_t j = 0; j < a.d; ++j) a.out[h * a.d + j] = to_bf16(acc[j] / sum);
  }
}

}  // namespace
}  // namespace tle::bench
