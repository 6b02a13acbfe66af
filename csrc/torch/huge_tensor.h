// Tensors in huge pages (runtime/huge_pages.h).
#pragma once

#include "csrc/runtime/huge_pages.h"
#include "csrc/torch/torch_headers.h"

namespace tle {

// As at::empty. Small ones come from torch's allocator.
at::Tensor empty_huge(at::IntArrayRef sizes, const at::TensorOptions& options, Arena arena);

}  // namespace tle
