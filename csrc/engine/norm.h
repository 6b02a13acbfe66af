// Row-wise normalisation as a stage.
#pragma once

#include "csrc/engine/program.h"
#include "csrc/kernels/rms_norm/rms_norm.h"

namespace tle {

void add_rms_norm(Program& program, const RmsNormArgs& args);

}  // namespace tle
