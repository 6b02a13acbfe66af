// argmax: the index of the largest element of each row.
#include "csrc/torch/argmax.h"

#include <string.h>

#include <algorithm>
#include <limits>

#include "csrc/torch/checks.h"
#include "csrc/torch/torch_headers.h"

namespace tle {

namespace {

// Sixteen bytes of integers, which compilers for x86-64 and aarch64 keep in one register.
template <class Int>
using Lanes [[gnu::vector_size(16)]] = Int;

// Floats' bits as integers of the same order: both zeros are 0, every NaN is the largest, as torch.argmax has it. Whole
// registers, or one element.
template <class Int, Int kInfinity, class T>
T ordered(T bits) {
  constexpr Int kMax = std::numeric_limits<Int>::max();
  const T magnitude = bits & kMax, sign = bits >> (8 * sizeof(Int) - 1);
  const T key = (magnitude ^ sign) - sign;
  return magnitude > kInfinity ? T{} + kMax : key;
}

// Two passes: the maximum, then where it is first. 50,000 bf16 logits take some microseconds, in which ATen's argmax is
// still converting them.
template <class Int, Int kInfinity>
int64_t first_largest(const Int* x, int64_t n) {
  constexpr int64_t kWidth = 16 / sizeof(Int), kBlock = 4 * kWidth;
  auto key = [&](int64_t i) { return Int(ordered<Int, kInfinity>(int32_t(x[i]))); };
  auto keys = [&](int64_t i) {
    Lanes<Int> v;
    memcpy(&v, x + i, sizeof v);
    return ordered<Int, kInfinity>(v);
  };
  Int best = std::numeric_limits<Int>::min();
  int64_t i = 0;
  if (n >= kBlock) {
    Lanes<Int> most[4];
    for (int64_t j = 0; j < 4; ++j) most[j] = keys(j * kWidth);
    for (i = kBlock; i + kBlock <= n; i += kBlock)
      for (int64_t j = 0; j < 4; ++j) {
        const Lanes<Int> more = keys(i + j * kWidth);
        most[j] = more > most[j] ? more : most[j];
      }
    for (const Lanes<Int>& m : most)
      for (int64_t lane = 0; lane < kWidth; ++lane) best = std::max(best, Int(m[lane]));
  }
  for (; i < n; ++i) best = std::max(best, key(i));
  int64_t first = 0;
  for (; first + kBlock <= n; first += kBlock) {
    Lanes<Int> found = {};
    for (int64_t j = 0; j < 4; ++j) found |= Lanes<Int>(keys(first + j * kWidth) == best);
    Int any = 0;
    for (int64_t lane = 0; lane < kWidth; ++lane) any |= found[lane];
    if (any != 0) break;
  }
  while (key(first) != best) ++first;
  return first;
}

at::Tensor argmax(const at::Tensor& x) {
  const char* op = "argmax";
  const DType dtype = float_dtype(op, "x", x);
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.size(-1) > 0, op, ": x must have a last dimension with elements, got ",
                    x.sizes());
  const Rows rows = rows_of(x);
  at::Tensor out = at::empty(x.sizes().slice(0, size_t(x.dim() - 1)), x.options().dtype(at::kLong));
  int64_t* to = out.mutable_data_ptr<int64_t>();
  for (int64_t r = 0; r < rows.rows; ++r)
    to[r] = first_largest(static_cast<const char*>(rows.data) + r * rows.stride * dtype_size(dtype), dtype, rows.size);
  return out;
}

}  // namespace

int64_t first_largest(const void* row, DType dtype, int64_t n) {
  if (dtype == DType::kF32) return first_largest<int32_t, 0x7F800000>(static_cast<const int32_t*>(row), n);
  if (dtype == DType::kBF16) return first_largest<int16_t, 0x7F80>(static_cast<const int16_t*>(row), n);
  return first_largest<int16_t, 0x7C00>(static_cast<const int16_t*>(row), n);
}

TORCH_LIBRARY_IMPL(tle, CPU, m) { m.impl("argmax", argmax); }

}  // namespace tle
