#include <cmath>

#include "tests/cpp/harness.h"

namespace tle::test {
namespace {

size_t bytes_of(int64_t rows, int64_t n, int64_t stride, DType t) {
  return rows == 0 ? 0 : size_t(((rows - 1) * stride + n) * dtype_size(t));
}

void run(SwigluFn* fn, Guarded& gate, Guarded& up, void* out, int64_t rows, int64_t n, int64_t gate_stride,
         int64_t up_stride, int64_t out_stride, DType t) {
  fn({gate.as(), up.as(), out, rows, n, gate_stride, up_stride, out_stride, t});
}

TEST(Swiglu, EveryVariantEqualsTheReference) {
  Random random(1);
  for (DType t : kDTypes)
    for (int64_t n : {1, 2, 15, 16, 17, 31, 33, 64, 100, 1040})
      for (int64_t rows : {0, 1, 3}) {
        SCOPED_TRACE(std::string(name_of(t)) + " n=" + std::to_string(n) + " rows=" + std::to_string(rows));
        const int64_t gate_stride = n + 1, up_stride = n + 5, out_stride = n + 2;
        Guarded gate(bytes_of(rows, n, gate_stride, t)), up(bytes_of(rows, n, up_stride, t));
        fill_normal(random, t, gate.as(), int64_t(gate.size()) / dtype_size(t), 4.0f);
        fill_normal(random, t, up.as(), int64_t(up.size()) / dtype_size(t));
        Guarded want(bytes_of(rows, n, out_stride, t));
        run(swiglu_ref, gate, up, want.as(), rows, n, gate_stride, up_stride, out_stride, t);
        for_each_variant(swiglu_table, [&](SwigluFn* fn) {
          Guarded got(want.size());
          run(fn, gate, up, got.as(), rows, n, gate_stride, up_stride, out_stride, t);
          EXPECT_TRUE(got == want);
        });
      }
}

// The output may be either input.
TEST(Swiglu, InPlace) {
  Random random(2);
  const int64_t rows = 3, n = 41;
  for (DType t : kDTypes)
    for_each_variant(swiglu_table, [&](SwigluFn* fn) {
      const size_t size = bytes_of(rows, n, n, t);
      Guarded gate(size), up(size), want(size), copy(size);
      fill_normal(random, t, gate.as(), rows * n);
      fill_normal(random, t, up.as(), rows * n);
      run(swiglu_ref, gate, up, want.as(), rows, n, n, n, n, t);
      for (Guarded* target : {&gate, &up}) {
        memcpy(copy.as(), target->as(), size);
        run(fn, gate, up, target->as(), rows, n, n, n, n, t);
        EXPECT_TRUE(*target == want);
        memcpy(target->as(), copy.as(), size);
      }
    });
}

// Every number of a 16-bit type as the gate: NaN, infinities, subnormals, both ends of exp.
TEST(Swiglu, EverySixteenBitGate) {
  const int64_t n = 65536;
  for (DType t : {DType::kBF16, DType::kF16}) {
    SCOPED_TRACE(name_of(t));
    Guarded gate(size_t(n) * 2), up(size_t(n) * 2), want(size_t(n) * 2);
    for (int64_t i = 0; i < n; ++i) gate.as<uint16_t>()[i] = uint16_t(i);
    for (int64_t i = 0; i < n; ++i) scalar::store(t, up.as(), i, i % 2 ? 1.0f : -3.0f);
    run(swiglu_ref, gate, up, want.as(), 1, n, n, n, n, t);
    for_each_variant(swiglu_table, [&](SwigluFn* fn) {
      Guarded got(want.size());
      run(fn, gate, up, got.as(), 1, n, n, n, n, t);
      EXPECT_TRUE(got == want);
    });
    // And the values themselves, against double. An exact result between two representable ones may fall to either
    // where fp32 erred.
    const double half_unit = t == DType::kBF16 ? 0x1p-8 : 0x1p-11, smallest = t == DType::kBF16 ? 0x1p-134 : 0x1p-25;
    for (int64_t i = 0; i < n; ++i) {
      const double g = scalar::load(t, gate.as(), i), y = scalar::load(t, want.as(), i);
      if (!std::isfinite(g)) continue;
      // Below -88.73 exp(-g) is beyond fp32, and the formula gives 0, as it does in ATen.
      const double exact = g < -88.73 ? 0.0 : g / (1.0 + std::exp(-g)) * (i % 2 ? 1.0 : -3.0);
      if (std::isfinite(y)) {
        EXPECT_LE(std::fabs(y - exact), std::fabs(exact) * half_unit * 1.001 + smallest * 1.001) << g;
      } else {
        EXPECT_GT(std::fabs(exact), t == DType::kBF16 ? 0x1.FEp127 : 65504.0) << g;
      }
    }
  }
}

TEST(Swiglu, NonFiniteGates) {
  // silu(-inf) = -inf / (1 + inf) is NaN, as in ATen.
  const float gates[] = {NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 200.0f, -200.0f, 1e-40f};
  for (DType t : kDTypes) {
    Guarded gate(8 * size_t(dtype_size(t))), up(8 * size_t(dtype_size(t))), want(8 * size_t(dtype_size(t)));
    for (int64_t i = 0; i < 8; ++i) scalar::store(t, gate.as(), i, gates[i]);
    for (int64_t i = 0; i < 8; ++i) scalar::store(t, up.as(), i, 2.0f);
    run(swiglu_ref, gate, up, want.as(), 1, 8, 8, 8, 8, t);
    auto y = [&](int64_t i) { return scalar::load(t, want.as(), i); };
    EXPECT_TRUE(std::isnan(y(0)) && std::isnan(y(2)));
    EXPECT_EQ(y(1), INFINITY);
    EXPECT_EQ(y(3), 0.0f);
    EXPECT_EQ(y(5), 400.0f);
    EXPECT_EQ(y(6), 0.0f);
    for_each_variant(swiglu_table, [&](SwigluFn* fn) {
      Guarded got(want.size());
      run(fn, gate, up, got.as(), 1, 8, 8, 8, 8, t);
      EXPECT_TRUE(got == want);
    });
  }
}

}  // namespace
}  // namespace tle::test
