#include "tests/cpp/harness.h"

namespace tle::test {
namespace {

// Rows of `length` elements, `stride` apart, the last of which ends the buffer.
size_t bytes_of(int64_t rows, int64_t length, int64_t stride, DType t) {
  return rows == 0 ? 0 : size_t(((rows - 1) * stride + length) * dtype_size(t));
}

void expect_all_equal(Random& random, int64_t rows, int64_t n, int64_t k, DType t, DType out_t, const DType* bias_t,
                      int64_t pad, float scale = 1.0f) {
  SCOPED_TRACE("rows=" + std::to_string(rows) + " n=" + std::to_string(n) + " k=" + std::to_string(k) + " " +
               name_of(t));
  Guarded x(bytes_of(rows, k, k + pad, t)), w(bytes_of(n, k, k + 2 * pad, t));
  fill_normal(random, t, x.as(), int64_t(x.size()) / dtype_size(t), scale);
  fill_normal(random, t, w.as(), int64_t(w.size()) / dtype_size(t), scale);
  Guarded bias(bias_t ? size_t(n * dtype_size(*bias_t)) : 0);
  if (bias_t) fill_normal(random, *bias_t, bias.as(), n);
  LinearDenseArgs a = {};
  a.x = x.as();
  a.w = w.as();
  a.bias = bias_t ? bias.as() : nullptr;
  a.rows = rows;
  a.n = n;
  a.k = k;
  a.x_stride = k + pad;
  a.w_stride = k + 2 * pad;
  a.out_stride = n + pad;
  a.dtype = t;
  a.bias_dtype = bias_t ? *bias_t : DType::kF32;
  a.out_dtype = out_t;
  Guarded want(bytes_of(rows, n, n + pad, out_t));
  a.out = want.as();
  linear_dense_ref(a);
  for_each_variant(linear_dense_table, [&](LinearDenseFn* fn) {
    Guarded got(want.size());
    a.out = got.as();
    fn(a);
    EXPECT_TRUE(got == want);
  });
}

TEST(LinearDense, EveryVariantEqualsTheReference) {
  Random random(1);
  int count = 0;
  for (int64_t k : {1, 3, 4, 15, 16, 17, 31, 33, 48, 63, 65, 100, 1040})
    for (int64_t n : {1, 2, 3, 5, 7, 8, 9, 15, 17, 31, 33, 63, 65, 96}) {
      for (int64_t rows : {0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 64}) {
        if (rows * n * k > 100000 && ++count % 4 != 0)
          continue;  // the large ones take turns: they are slow under emulation
        const DType bias = kDTypes[++count / 3 % 3];
        expect_all_equal(random, rows, n, k, kDTypes[count % 3], kDTypes[count / 9 % 3], count % 5 ? &bias : nullptr,
                         count % 4);
      }
    }
}

// K beyond one chunk, with a tail; N beyond one block of channels.
TEST(LinearDense, LongRows) {
  Random random(2);
  for (DType t : kDTypes)
    for (int64_t rows : {1, 2, 7})
      for (int64_t n : {5, 100}) expect_all_equal(random, rows, n, 1571, t, t, nullptr, 1);
}

// Sums that overflow fp16, vanish in it, or are subnormal in fp32.
TEST(LinearDense, TheEndsOfTheRange) {
  Random random(3);
  for (float scale : {1e-22f, 1e-19f, 1e-4f, 300.0f, 2e4f, 1e19f})
    for (DType t : kDTypes) expect_all_equal(random, 3, 20, 70, t, t, nullptr, 0, scale);
}

// NaN and infinity reach the outputs of their row or channel and no others; the NaN that is stored is the canonical
// one.
TEST(LinearDense, NonFiniteValuesStayInTheirRowAndChannel) {
  const int64_t rows = 7, n = 19, k = 37;
  for (DType t : kDTypes) {
    SCOPED_TRACE(name_of(t));
    Random random(4);
    Guarded x(size_t(rows * k * dtype_size(t))), w(size_t(n * k * dtype_size(t)));
    fill_normal(random, t, x.as(), rows * k);
    fill_normal(random, t, w.as(), n * k);
    scalar::store(t, x.as(), 2 * k + 36, NAN);
    scalar::store(t, x.as(), 4 * k + 5, INFINITY);
    scalar::store(t, w.as(), 17 * k + 11, -INFINITY);
    LinearDenseArgs a = {x.as(), w.as(), nullptr, nullptr, rows, n, k, k, k, n, t, t, t};
    Guarded want(size_t(rows * n * dtype_size(t)));
    a.out = want.as();
    linear_dense_ref(a);
    const uint32_t nan_bits = t == DType::kF32 ? 0x7FC00000u : t == DType::kBF16 ? 0x7FC0u : 0x7E00u;
    for (int64_t i = 0; i < rows * n; ++i) {
      const float y = scalar::load(t, want.as(), i);
      const bool touched = i / n == 2 || i / n == 4 || i % n == 17;
      EXPECT_EQ(std::isfinite(y), !touched) << i;
      uint32_t bits = 0;
      memcpy(&bits, want.as<char>() + i * dtype_size(t), size_t(dtype_size(t)));
      EXPECT_TRUE(y == y || bits == nan_bits) << i;
    }
    for_each_variant(linear_dense_table, [&](LinearDenseFn* fn) {
      Guarded got(want.size());
      a.out = got.as();
      fn(a);
      EXPECT_TRUE(got == want);
    });
  }
}

}  // namespace
}  // namespace tle::test
