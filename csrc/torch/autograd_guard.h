// The operators have no derivatives. Wanting one is an error with advice, never a silent zero.
#pragma once

#include <torch/library.h>

#include <string>

namespace tle {

// Registers, for the operator that the schema names, an Autograd kernel that raises when gradients are on and an input
// requires one.
void guard_autograd(torch::Library& library, const std::string& schema);

}  // namespace tle
