// The documented int8 product on the [K/4, N/4, 4, 4] layout as stages.
#pragma once

#include "csrc/engine/program.h"
#include "csrc/kernels/common/dtype.h"
#include "csrc/kernels/sdot_gemv/sdot_gemv.h"

namespace tle {

// One stage: args.out = args.a times the packed weight, over all of args.rows and args.n.
void add_sdot_gemv(Program& program, const SdotGemvArgs& args);

// Two stages: args.a and args.a_scale are made from x [args.rows, 4 * args.blocks] (rows x_stride elements apart), then
// as above.
void add_sdot_linear(Program& program, const void* x, int64_t x_stride, DType x_dtype, SdotGemvArgs args);

}  // namespace tle
