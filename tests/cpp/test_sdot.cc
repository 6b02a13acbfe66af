#include <algorithm>

#include "tests/cpp/harness.h"

namespace tle::test {
namespace {

struct Case {
  // -128 among the codes of both sides.
  Case(Random& random, int64_t rows, int64_t k, int64_t n)
      : rows(rows),
        k(k),
        n(n),
        a(size_t(rows * k)),
        packed(size_t(k * n)),
        a_scale(size_t(rows) * 4),
        b_scale(size_t(n) * 4) {
    fill_codes(random, a.as<int8_t>(), rows * k);
    fill_codes(random, packed.as<int8_t>(), k * n);
    for (int64_t i = 0; i < rows * k; i += 5) a.as<int8_t>()[i] = -128;
    for (int64_t i = 0; i < k * n; i += 7) packed.as<int8_t>()[i] = -128;
    fill_normal(random, DType::kF32, a_scale.as(), rows, 0.02f);
    fill_normal(random, DType::kF32, b_scale.as(), n, 0.01f);
  }

  SdotGemvArgs arguments(Guarded& out, int64_t out_stride, bool scaled) {
    SdotGemvArgs s = {};
    s.packed = packed.as<int8_t>();
    s.stride = 4 * n;
    s.blocks = k / 4;
    s.n = n;
    s.a = a.as<int8_t>();
    s.a_stride = k;
    s.rows = rows;
    s.a_scale = scaled ? a_scale.as<float>() : nullptr;
    s.b_scale = scaled ? b_scale.as<float>() : nullptr;
    s.out = out.as();
    s.out_stride = out_stride;
    return s;
  }

  int64_t rows, k, n;
  Guarded a, packed, a_scale, b_scale;
};

size_t out_bytes(int64_t rows, int64_t n, int64_t stride, bool scaled) {
  return rows == 0 ? 0 : size_t(((rows - 1) * stride + n) * (scaled ? 2 : 4));
}

TEST(SdotGemv, TheReferenceIsExact) {
  Random random(1);
  Case c(random, 2, 20, 12);
  Guarded out(out_bytes(2, 12, 12, false));
  sdot_gemv_ref(c.arguments(out, 12, false));
  for (int64_t m = 0; m < 2; ++m)
    for (int64_t n = 0; n < 12; ++n) {
      int64_t sum = 0;
      for (int64_t k = 0; k < 20; ++k)
        sum += int64_t(c.a.as<int8_t>()[m * 20 + k]) * c.packed.as<int8_t>()[(k / 4 * 12 + n) * 4 + k % 4];
      EXPECT_EQ(out.as<int32_t>()[m * 12 + n], sum) << m << " " << n;
    }
}

TEST(SdotGemv, EveryVariantEqualsTheReference) {
  Random random(2);
  for (int64_t k : {0, 4, 8, 12, 16, 20, 36, 100, 1040})
    for (int64_t n : {4, 8, 12, 16, 20, 28, 64, 100, 516, 1028})
      for (int64_t rows : {0, 1, 2, 4, 5, 9}) {
        if (rows > 2 && n * k > 100'000) continue;  // slow under emulation, and nothing new
        SCOPED_TRACE("rows=" + std::to_string(rows) + " k=" + std::to_string(k) + " n=" + std::to_string(n));
        Case c(random, rows, k, n);
        if (rows > 1) c.a_scale.as<float>()[1] = NAN;
        for (bool scaled : {false, true}) {
          const int64_t stride = n + 3;
          Guarded want(out_bytes(rows, n, stride, scaled));
          sdot_gemv_ref(c.arguments(want, stride, scaled));
          for_each_variant(sdot_gemv_table, [&](SdotGemvFn* fn) {
            Guarded got(want.size());
            fn(c.arguments(got, stride, scaled));
            EXPECT_TRUE(got == want);
          });
        }
      }
}

TEST(SdotGemv, ExtremeCodes) {
  Random random(3);
  const int64_t k = 68, n = 20;
  for (int a_code : {127, -127, -128})
    for (int b_code : {127, -127, -128})
      for (int64_t rows : {1, 4}) {
        SCOPED_TRACE("a=" + std::to_string(a_code) + " b=" + std::to_string(b_code));
        Case c(random, rows, k, n);
        memset(c.a.as(), a_code, c.a.size());
        memset(c.packed.as(), b_code, c.packed.size());
        for_each_variant(sdot_gemv_table, [&](SdotGemvFn* fn) {
          Guarded out(out_bytes(rows, n, n, false));
          fn(c.arguments(out, n, false));
          for (int64_t i = 0; i < rows * n; ++i) EXPECT_EQ(out.as<int32_t>()[i], a_code * b_code * k);
        });
      }
}

// The largest sums that the operators let through.
TEST(SdotGemv, TheLargestK) {
  Random random(4);
  for (auto [k, code] : {std::pair<int64_t, int>{133144, 127}, {131068, -128}}) {
    Case c(random, 1, k, 4);
    memset(c.a.as(), code, c.a.size());
    memset(c.packed.as(), code, c.packed.size());
    for_each_variant(sdot_gemv_table, [&](SdotGemvFn* fn) {
      Guarded out(out_bytes(1, 4, 4, false));
      fn(c.arguments(out, 4, false));
      for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(out.as<int32_t>()[i], int64_t(code) * code * k);
    });
  }
}

}  // namespace
}  // namespace tle::test
