// y = a B for int8 vectors a and int8 weights B [K, N] in the documented layout [K/4, N/4, 4, 4] (sdot_pack_weights):
//
//   packed[kb, nb, n, k] = B[4 kb + k, 4 nb + n]
//   acc[m, n] = sum_k a[m, k] B[k, n]                                    exact in int32
//   out[m, n] = acc[m, n], or with scales round_bf16((float(acc[m, n]) * a_scale[m]) * b_scale[n])
//
// Every code of int8 may occur, -128 on both sides too. The four k of a channel are adjacent and the channels of one kb
// follow each other, so a step of kb is `stride` = 4 N bytes wide: compare runtime/packed_weight.h, where a panel's
// lines do.
#pragma once

#include <stdint.h>

namespace tle {

struct SdotGemvArgs {
  const int8_t* packed;  // the first channel of kb = 0
  int64_t stride;        // bytes from kb to kb + 1
  int64_t blocks;        // K / 4
  int64_t n;             // channels wanted, a multiple of 4

  const int8_t* a;  // [rows, 4 * blocks]
  int64_t a_stride;
  int64_t rows;

  const float* a_scale;  // [rows], or null: the result is int32
  const float* b_scale;  // [n]
  void* out;             // [rows, n] int32, or bf16 with scales
  int64_t out_stride;    // elements
};

typedef void SdotGemvFn(const SdotGemvArgs&);
SdotGemvFn sdot_gemv_ref, sdot_gemv_neon, sdot_gemv_dotprod, sdot_gemv_avx2, sdot_gemv_avx512, sdot_gemv_vnni;

}  // namespace tle
