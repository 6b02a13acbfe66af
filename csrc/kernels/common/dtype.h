// The element types of a floating-point operand.
#pragma once

#include <stdint.h>

namespace tle {

enum class DType : int { kF32 = 0, kBF16 = 1, kF16 = 2 };

static inline int64_t dtype_size(DType t) { return t == DType::kF32 ? 4 : 2; }

}  // namespace tle
