#pragma once

#include <stdint.h>

#include "csrc/kernels/common/dtype.h"

namespace tle {

// The first index of the largest of n >= 1 elements, as torch.argmax has it: a NaN is the largest, both zeros are
// equal.
int64_t first_largest(const void* row, DType dtype, int64_t n);

}  // namespace tle
