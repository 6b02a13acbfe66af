// Row-wise normalisation as a stage. Returns what its units write of `out`.
#pragma once

#include "csrc/engine/program.h"
#include "csrc/kernels/rms_norm/rms_norm.h"

namespace tle {

UnitShape add_rms_norm(Program& program, const RmsNormArgs& args);

// The same by every member for itself, before the next stage (Program::prepare). args.out: member 0's copy, the next
// one's lies own_stride bytes further. sum, which is everybody's, may not be the residual: others still read that one.
void prepare_rms_norm(Program& program, const RmsNormArgs& args, int64_t own_stride);

}  // namespace tle
