#include <algorithm>
#include <cmath>

#include "tests/cpp/harness.h"

namespace tle::test {
namespace {

// Rows of x that are x_stride apart and whose last one ends its buffer.
struct Input {
  Input(DType t, int64_t rows, int64_t k, int64_t pad = 0)
      : dtype(t),
        rows(rows),
        k(k),
        stride(k + pad),
        x(rows == 0 ? 0 : size_t(((rows - 1) * stride + k) * dtype_size(t))) {}
  void set(int64_t row, int64_t i, float v) { scalar::store(dtype, x.as(), row * stride + i, v); }
  float get(int64_t row, int64_t i) { return scalar::load(dtype, x.as(), row * stride + i); }

  int64_t groups(int64_t group) const { return group ? (k + group - 1) / group : 1; }

  DType dtype;
  int64_t rows, k, stride;
  Guarded x;
};

struct Result {
  Result(Input& in, QuantizeRowsFn* fn, int64_t group, int64_t code_stride)
      : codes(size_t(in.rows * code_stride)), scales(size_t(in.rows * in.groups(group)) * 4),
        sums(size_t(in.rows * in.groups(group)) * 4) {
    fn({in.x.as(), codes.as<int8_t>(), scales.as<float>(), sums.as<int32_t>(), in.rows, in.k, group, in.stride,
        code_stride, in.dtype});
  }
  bool operator==(const Result& other) const {
    return codes == other.codes && scales == other.scales && sums == other.sums;
  }
  Guarded codes, scales, sums;
};

void expect_all_equal(Input& x, int64_t group, int64_t code_stride) {
  Result want(x, quantize_rows_ref, group, code_stride);
  for_each_variant(quantize_rows_table,
                   [&](QuantizeRowsFn* fn) { EXPECT_TRUE(Result(x, fn, group, code_stride) == want); });
}

TEST(QuantizeRows, EveryVariantEqualsTheReference) {
  Random random(1);
  int count = 0;
  for (int64_t k : {0, 1, 3, 4, 15, 16, 17, 31, 32, 33, 48, 63, 65, 100, 128, 200, 1040})
    for (int64_t rows : {0, 1, 2, 5})
      for (DType t : kDTypes)
        for (int64_t group : {0, 16, 32, 64, 128}) {
          SCOPED_TRACE(std::string(name_of(t)) + " k=" + std::to_string(k) + " group=" + std::to_string(group));
          Input x(t, rows, k, ++count % 3);
          for (int64_t m = 0; m < rows; ++m)
            for (int64_t i = 0; i < k; ++i) x.set(m, i, 3.0f * float(int32_t(random())) * 0x1p-31f);
          expect_all_equal(x, group, (k + 63) / 64 * 64);
          expect_all_equal(x, group, k);
        }
}

// The specification itself, in double and by hand.
TEST(QuantizeRows, TheReferenceFollowsTheFormula) {
  Random random(2);
  Input x(DType::kF32, 3, 50);
  fill_normal(random, DType::kF32, x.x.as(), 150);
  Result r(x, quantize_rows_ref, 0, 64);
  const int8_t* codes = r.codes.as<int8_t>();
  for (int64_t m = 0; m < 3; ++m) {
    float amax = 0.0f;
    for (int64_t i = 0; i < 50; ++i) amax = std::max(amax, std::fabs(x.get(m, i)));
    int32_t sum = 0;
    for (int64_t i = 0; i < 50; ++i) {
      // Away from a tie the rounding of fp32 makes no difference.
      const double q = double(x.get(m, i)) * 127.0 / double(amax);
      if (std::fabs(q - std::floor(q) - 0.5) > 1e-4) {
        EXPECT_EQ(codes[m * 64 + i], int8_t(std::nearbyint(q)));
      }
      sum += codes[m * 64 + i];
    }
    EXPECT_EQ(r.scales.as<float>()[m], amax / 127.0f);
    EXPECT_EQ(r.sums.as<int32_t>()[m], sum);
    for (int64_t i = 50; i < 64; ++i) EXPECT_EQ(codes[m * 64 + i], 0);
  }
}

// amax = 127, so the factor is exactly 1 and ties are ties.
TEST(QuantizeRows, TiesGoToEven) {
  for (DType t : kDTypes) {
    SCOPED_TRACE(name_of(t));
    Input x(t, 1, 20);
    const float values[20] = {127,  0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -2.5f, 63.5f, -64.5f, 100,
                              -127, 3.5f, 4.5f, 0,    -0.0f, 5.5f,  6.5f,  7.5f,  -8.5f,  9.5f};
    const int8_t want[20] = {127, 0, 2, 2, 0, -2, -2, 64, -64, 100, -127, 4, 4, 0, 0, 6, 6, 8, -8, 10};
    for (int64_t i = 0; i < 20; ++i) x.set(0, i, values[i]);
    Result r(x, quantize_rows_ref, 0, 20);
    EXPECT_EQ(memcmp(r.codes.as(), want, 20), 0);
    EXPECT_EQ(r.scales.as<float>()[0], 1.0f);
    expect_all_equal(x, 0, 20);
  }
}

// The largest value's factor may round up: its code stays 127.
TEST(QuantizeRows, TheLargestCodeIs127) {
  Random random(3);
  for (int repeat = 0; repeat < 2000; ++repeat) {
    Input x(DType::kF32, 1, 17);
    for (int64_t i = 0; i < 17; ++i) x.set(0, i, 0.0f);
    const float v = scalar::float_of(0x04000000u + random() % 0x7B000000u);  // 1.5e-36 and above
    x.set(0, repeat % 17, repeat % 2 ? v : -v);
    Result r(x, quantize_rows_ref, 0, 17);
    EXPECT_EQ(r.codes.as<int8_t>()[repeat % 17], repeat % 2 ? 127 : -127) << v;
    expect_all_equal(x, 0, 17);
  }
}

// Rows (and groups) of zeros, and of numbers so small that 127 / amax is infinite, become zeros: never 0 times
// infinity.
TEST(QuantizeRows, ZeroAndTinyRows) {
  for (DType t : kDTypes)
    for (int64_t group : {0, 16}) {
      Input x(t, 4, 37);
      for (int64_t m = 0; m < 4; ++m)
        for (int64_t i = 0; i < 37; ++i)
          x.set(m, i, m == 0 ? 0.0f : m == 1 ? -0.0f : i % 2 ? 0.0f : m == 2 ? 1e-39f : 6e-8f);
      Result r(x, quantize_rows_ref, group, 64);
      for (int64_t i = 0; i < x.rows * x.groups(group); ++i) EXPECT_TRUE(std::isfinite(r.scales.as<float>()[i]));
      for (int64_t i = 0; i < 3 * 64; ++i) EXPECT_EQ(r.codes.as<int8_t>()[i], 0);
      EXPECT_EQ(r.codes.as<int8_t>()[3 * 64], 127);  // 127 / 6e-8 is finite
      expect_all_equal(x, group, 64);
    }
}

// A NaN or an infinity anywhere: codes 0 and the canonical NaN as scale, for that row (or group) only.
TEST(QuantizeRows, NonFiniteRows) {
  Random random(4);
  const float payload = scalar::float_of(0xFFC12345u);
  for (DType t : kDTypes)
    for (float bad : {NAN, payload, INFINITY, -INFINITY})
      for (int64_t at : {0, 15, 16, 36, 37, 63, 64}) {
        SCOPED_TRACE(std::string(name_of(t)) + " " + std::to_string(bad) + " at " + std::to_string(at));
        Input x(t, 3, 65);
        fill_normal(random, t, x.x.as(), 3 * 65);
        Result clean(x, quantize_rows_ref, 0, 96);
        x.set(1, at, bad);
        for (int64_t group : {0, 16, 32}) expect_all_equal(x, group, 96);
        Result r(x, quantize_rows_ref, 0, 96);
        for (int64_t m : {0, 2})
          EXPECT_EQ(memcmp(r.codes.as<int8_t>() + m * 96, clean.codes.as<int8_t>() + m * 96, 96), 0);
        for (int64_t i = 0; i < 96; ++i) EXPECT_EQ(r.codes.as<int8_t>()[96 + i], 0);
        EXPECT_EQ(scalar::bits_of(r.scales.as<float>()[1]), 0x7FC00000u);
        EXPECT_EQ(r.sums.as<int32_t>()[1], 0);

        Result grouped(x, quantize_rows_ref, 16, 96);
        for (int64_t g = 0; g < 5; ++g) EXPECT_EQ(std::isnan(grouped.scales.as<float>()[5 + g]), g == at / 16);
      }
}

// Groups are rows of their own.
TEST(QuantizeRows, AGroupEqualsTheGroupAlone) {
  Random random(5);
  const int64_t k = 100, group = 32;
  for_each_variant(quantize_rows_table, [&](QuantizeRowsFn* fn) {
    for (DType t : kDTypes) {
      Input x(t, 2, k);
      fill_normal(random, t, x.x.as(), 2 * k);
      Result all(x, fn, group, k);
      for (int64_t m = 0; m < 2; ++m)
        for (int64_t g = 0; g < 4; ++g) {
          const int64_t first = g * group, size = std::min(group, k - first);
          Input part(t, 1, size);
          for (int64_t i = 0; i < size; ++i) part.set(0, i, x.get(m, first + i));
          Result one(part, fn, 0, size);
          EXPECT_EQ(memcmp(one.codes.as(), all.codes.as<int8_t>() + m * k + first, size_t(size)), 0);
          EXPECT_EQ(one.scales.as<float>()[0], all.scales.as<float>()[m * 4 + g]);
          EXPECT_EQ(one.sums.as<int32_t>()[0], all.sums.as<int32_t>()[m * 4 + g]);
        }
    }
  });
}

}  // namespace
}  // namespace tle::test
