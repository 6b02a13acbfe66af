// Row-wise normalisation as a stage. Returns what its units write of `out`.
#pragma once

#include "csrc/engine/program.h"
#include "csrc/kernels/rms_norm/rms_norm.h"

namespace tle {

UnitShape add_rms_norm(Program& program, const RmsNormArgs& args);

}  // namespace tle
