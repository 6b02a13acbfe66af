// empty_cache_slots and advise_huge_pages.
#include "csrc/torch/huge_tensor.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <new>

#include "csrc/torch/checks.h"

namespace tle {

namespace {

// Below this a tensor is read faster than its region is made.
constexpr int64_t kSmall = 16 << 10;

at::Tensor empty_cache_slots(at::IntArrayRef size, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(std::all_of(size.begin(), size.end(), [](int64_t n) { return n >= 0; }),
                    "empty_cache_slots: size must not be negative, got ", size);
  return empty_huge(size, at::TensorOptions().dtype(dtype), Arena::kCache);
}

void advise_huge_pages(const at::Tensor& tensor) {
  check_cpu("advise_huge_pages", "tensor", tensor);
  if (tensor.is_non_overlapping_and_dense())
    advise_huge(const_cast<void*>(tensor.const_data_ptr()), int64_t(tensor.nbytes()));
}

}  // namespace

at::Tensor empty_huge(at::IntArrayRef sizes, const at::TensorOptions& options, Arena arena) {
  const int64_t bytes = int64_t(at::detail::computeStorageNbytesContiguous(sizes, options.dtype().itemsize()));
  if (bytes < kSmall) return at::empty(sizes, options);
  HugeBlock block;
  try {
    block = allocate_huge(bytes, arena);
  } catch (const std::bad_alloc&) {
    TORCH_CHECK(false, "cannot allocate ", bytes, " bytes for a tensor of ", sizes);
  }
  return at::for_blob(block.data, sizes).options(options).deleter([block](void*) { free_huge(block); }).make_tensor();
}

TORCH_LIBRARY_IMPL(tle, CompositeExplicitAutograd, m) { m.impl("empty_cache_slots", empty_cache_slots); }
TORCH_LIBRARY_IMPL(tle, CPU, m) { m.impl("advise_huge_pages", advise_huge_pages); }

}  // namespace tle
