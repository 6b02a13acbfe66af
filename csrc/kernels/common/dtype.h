// The element types of an operand.
#pragma once

#include <stdint.h>

namespace tle {

// kI8: the codes of keys and values (attention.h). No other operand has it.
enum class DType : int { kF32 = 0, kBF16 = 1, kF16 = 2, kI8 = 3 };

static inline int64_t dtype_size(DType t) { return t == DType::kF32 ? 4 : t == DType::kI8 ? 1 : 2; }

}  // namespace tle
