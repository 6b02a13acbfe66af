#include <algorithm>

#include "csrc/runtime/packed_weight.h"
#include "tests/cpp/harness.h"

namespace tle::test {
namespace {

// A packed weight with random codes (-128 among them) and scales. misaligned: 8-byte aligned only, as in a mapped file.
struct Weight {
  Weight(Random& random, int64_t n, int64_t k, bool misaligned = false)
      : n(n), k(k), header(make_header({Scheme::kW8A8, 0, 0}, n, k)), layout(layout_of(header)), codes(size_t(n * k)),
        scales(size_t(n)), bytes(size_t(layout.total_bytes - 64 + (misaligned ? 8 : 0))) {
    fill_codes(random, codes.data(), n * k);
    for (int64_t i = 0; i < n * k; i += 7) codes[size_t(i)] = -128;
    fill_normal(random, DType::kF32, scales.data(), n, 0.01f);
    pack();
  }

  void pack() {
    std::vector<uint8_t> whole(size_t(layout.total_bytes));
    for (int64_t p = 0; p < layout.panels; ++p)
      pack_panel(header, whole.data(), p, codes.data() + p * 16 * k, k, scales.data() + p * 16, nullptr);
    memcpy(bytes.as(), whole.data() + 64, size_t(layout.panels * layout.panel_stride));
  }

  int64_t n, k;
  PackedHeader header;
  PackedLayout layout;
  std::vector<int8_t> codes;
  std::vector<float> scales;
  Guarded bytes;  // the panels
};

struct Input {
  Input(Random& random, int64_t rows, int64_t k, int64_t pad = 0)
      : rows(rows), k(k), padded((k + 3) / 4 * 4), stride(padded + pad),
        codes(size_t(rows == 0 ? 0 : (rows - 1) * stride + padded)), scales(size_t(rows) * 4), sums(size_t(rows) * 4) {
    fill_normal(random, DType::kF32, scales.as(), rows, 0.02f);
    for (int64_t m = 0; m < rows; ++m) {
      fill_codes(random, row(m), k);
      finish(m);
    }
  }

  int8_t* row(int64_t m) { return codes.as<int8_t>() + m * stride; }
  void finish(int64_t m) {
    memset(row(m) + k, 0, size_t(padded - k));
    int32_t sum = 0;
    for (int64_t i = 0; i < k; ++i) sum += row(m)[i];
    sums.as<int32_t>()[m] = sum;
  }

  int64_t rows, k, padded, stride;
  Guarded codes, scales, sums;
};

LinearW8Args arguments(Input& x, Weight& w, Guarded& out, int64_t out_stride, DType out_dtype) {
  LinearW8Args a = {};
  a.panels = w.bytes.as<uint8_t>();
  a.panel_stride = w.layout.panel_stride;
  a.scale_offset = w.layout.scale_offset;
  a.lines = w.layout.lines;
  a.n = w.n;
  a.x = x.codes.as<int8_t>();
  a.x_stride = x.stride;
  a.x_scale = x.scales.as<float>();
  a.x_sum = x.sums.as<int32_t>();
  a.rows = x.rows;
  a.out = out.as();
  a.out_stride = out_stride;
  a.out_dtype = out_dtype;
  return a;
}

// Bytes of a [rows, n] output whose last row ends the buffer.
size_t out_bytes(int64_t rows, int64_t n, int64_t stride, DType t) {
  return rows == 0 ? 0 : size_t(((rows - 1) * stride + n) * dtype_size(t));
}

std::vector<float> scaled_to_one(Input& x, Weight& w, LinearW8Fn* fn) {
  std::fill(w.scales.begin(), w.scales.end(), 1.0f);
  w.pack();
  for (int64_t m = 0; m < x.rows; ++m) x.scales.as<float>()[m] = 1.0f;
  Guarded out(out_bytes(x.rows, w.n, w.n, DType::kF32));
  fn(arguments(x, w, out, w.n, DType::kF32));
  return std::vector<float>(out.as<float>(), out.as<float>() + x.rows * w.n);
}

// The product in 64 bits, as fp32.
std::vector<float> exact(Input& x, const Weight& w) {
  std::vector<float> y;
  for (int64_t m = 0; m < x.rows; ++m)
    for (int64_t n = 0; n < w.n; ++n) {
      int64_t sum = 0;
      for (int64_t k = 0; k < w.k; ++k) sum += int64_t(x.row(m)[k]) * w.codes[size_t(n * w.k + k)];
      y.push_back(float(sum));
    }
  return y;
}

// The reference is checked against 64-bit integers, and everything else against the reference.
TEST(LinearW8, TheReferenceIsExact) {
  Random random(1);
  for (int64_t k : {1, 3, 4, 17, 100})
    for (int64_t n : {1, 15, 16, 33}) {
      Weight w(random, n, k);
      Input x(random, 3, k);
      EXPECT_EQ(scaled_to_one(x, w, linear_w8_ref), exact(x, w));
    }
}

TEST(LinearW8, EveryVariantEqualsTheReference) {
  Random random(2);
  int count = 0;
  for (int64_t k : {1, 3, 4, 15, 16, 17, 31, 33, 48, 63, 65, 100, 1040})
    for (int64_t n : {1, 2, 3, 5, 7, 8, 9, 15, 17, 31, 33, 63, 65, 96}) {
      Weight w(random, n, k, count % 2 == 1);
      for (int64_t rows : {0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 64}) {
        ++count;
        SCOPED_TRACE("rows=" + std::to_string(rows) + " k=" + std::to_string(k) + " n=" + std::to_string(n));
        Input x(random, rows, k, count % 3 * 20);
        if (rows > 2) x.scales.as<float>()[rows / 2] = NAN;
        const DType out_dtype = kDTypes[count % 3], bias_dtype = kDTypes[count / 3 % 3];
        const bool has_bias = count % 5 != 0;
        Guarded bias(size_t(n * dtype_size(bias_dtype)));
        fill_normal(random, bias_dtype, bias.as(), n);
        const int64_t stride = n + count % 4;
        const size_t size = out_bytes(rows, n, stride, out_dtype);
        auto run = [&](LinearW8Fn* fn, Guarded& out) {
          LinearW8Args a = arguments(x, w, out, stride, out_dtype);
          a.bias = has_bias ? bias.as() : nullptr;
          a.bias_dtype = bias_dtype;
          fn(a);
        };
        Guarded want(size);
        run(linear_w8_ref, want);
        for_each_variant(linear_w8_table, [&](LinearW8Fn* fn) {
          Guarded got(size);
          run(fn, got);
          EXPECT_TRUE(got == want);
        });
      }
    }
}

// Sums of pairs and of four products at their limits: what saturates in 16 bits, or wraps where -128 is negated, shows
// here.
TEST(LinearW8, ExtremeCodes) {
  Random random(3);
  const int64_t n = 17, k = 68;
  for (int w_code : {127, -127, -128})
    for (int x_code : {127, -127}) {
      SCOPED_TRACE("w=" + std::to_string(w_code) + " x=" + std::to_string(x_code));
      for (int64_t rows : {1, 2, 8, 13}) {
        Weight w(random, n, k);
        std::fill(w.codes.begin(), w.codes.end(), int8_t(w_code));
        Input x(random, rows, k);
        for (int64_t m = 0; m < rows; ++m) {
          memset(x.row(m), x_code, size_t(k));
          x.finish(m);
        }
        const std::vector<float> want(size_t(rows * n), float(w_code * x_code * k));
        for_each_variant(linear_w8_table, [&](LinearW8Fn* fn) { EXPECT_EQ(scaled_to_one(x, w, fn), want); });
      }
    }
}

// The largest K that packs: the sum is just below 2^31.
TEST(LinearW8, TheLargestK) {
  Random random(4);
  for (auto [k, w_code] : {std::pair<int64_t, int>{kMaxK, 127}, {kMaxK, -127}, {kMaxKFullRange, -128}})
    for (int x_code : {127, -127})
      for (int64_t rows : {1, 3}) {
        SCOPED_TRACE("w=" + std::to_string(w_code) + " x=" + std::to_string(x_code) + " rows=" + std::to_string(rows));
        Weight w(random, 2, k);
        std::fill(w.codes.begin(), w.codes.end(), int8_t(w_code));
        Input x(random, rows, k);
        for (int64_t m = 0; m < rows; ++m) {
          memset(x.row(m), x_code, size_t(k));
          x.finish(m);
        }
        const std::vector<float> want(size_t(rows * 2), float(int64_t(w_code) * x_code * k));
        for_each_variant(linear_w8_table, [&](LinearW8Fn* fn) { EXPECT_EQ(scaled_to_one(x, w, fn), want); });
      }
}

// A row of a block equals the same row alone: for every variant, not only through the reference.
TEST(LinearW8, RowsDoNotDependOnTheirNeighbours) {
  Random random(5);
  const int64_t n = 83, k = 100, rows = 23;
  Weight w(random, n, k);
  Input x(random, rows, k, 4);
  for_each_variant(linear_w8_table, [&](LinearW8Fn* fn) {
    Guarded all(out_bytes(rows, n, n, DType::kBF16));
    fn(arguments(x, w, all, n, DType::kBF16));
    for (int64_t m = 0; m < rows; ++m) {
      Guarded one(out_bytes(1, n, n, DType::kBF16));
      LinearW8Args a = arguments(x, w, one, n, DType::kBF16);
      a.rows = 1;
      a.x += m * x.stride;
      a.x_scale += m;
      a.x_sum += m;
      fn(a);
      EXPECT_EQ(memcmp(one.as(), all.as<uint16_t>() + m * n, one.size()), 0) << "row " << m;
    }
  });
}

// Results beyond the output type's range and below its smallest normal number.
TEST(LinearW8, ScalesAtTheEndsOfTheRange) {
  Random random(6);
  const int64_t n = 20, k = 64, rows = 9;
  for (float scale : {1e-38f, 1e-30f, 3e-9f, 40.0f, 1e30f, 1e36f})
    for (DType t : kDTypes) {
      SCOPED_TRACE(std::string(name_of(t)) + " scale=" + std::to_string(scale));
      Weight w(random, n, k);
      for (float& s : w.scales) s *= scale;
      w.pack();
      Input x(random, rows, k);
      Guarded want(out_bytes(rows, n, n, t));
      linear_w8_ref(arguments(x, w, want, n, t));
      for_each_variant(linear_w8_table, [&](LinearW8Fn* fn) {
        Guarded got(out_bytes(rows, n, n, t));
        fn(arguments(x, w, got, n, t));
        EXPECT_TRUE(got == want);
      });
    }
}

}  // namespace
}  // namespace tle::test
