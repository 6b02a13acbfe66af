#include <algorithm>

#include "csrc/runtime/packed_weight.h"
#include "tests/cpp/harness.h"

namespace tle::test {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What the weights are made of: groups for the weights too, or 0 for one scale a channel.
struct Kind {
  const char* name;
  GroupCodes codes;
  int32_t group, act_group;
};
constexpr Kind kKinds[] = {
    {"w8 per channel, a32", GroupCodes::kInt8, 0, 32},     {"w8 per channel, a128", GroupCodes::kInt8, 0, 128},
    {"w8 g32", GroupCodes::kInt8, 32, 32},                 {"w8 g64", GroupCodes::kInt8, 64, 64},
    {"w8 g128", GroupCodes::kInt8, 128, 128},              {"w4 g32", GroupCodes::kInt4, 32, 32},
    {"w4 g64", GroupCodes::kInt4, 64, 64},                 {"w4 g128", GroupCodes::kInt4, 128, 128},
    {"w4 g32 with minima", GroupCodes::kInt4Min, 32, 32},  {"w4 g64 with minima", GroupCodes::kInt4Min, 64, 64},
    {"w4 g128 with minima", GroupCodes::kInt4Min, 128, 128},
};

Scheme scheme_of(GroupCodes codes) {
  return codes == GroupCodes::kInt8 ? Scheme::kW8A8 : codes == GroupCodes::kInt4 ? Scheme::kW4A8 : Scheme::kW4A8Asym;
}

PackedHeader header_of(const Kind& kind, DType scale_type, int64_t n, int64_t k) {
  PackedHeader h = make_header({scheme_of(kind.codes), kind.group, kind.act_group}, n, k);
  if (kind.group == 0) return h;
  h.scale_type = scale_type == DType::kF32    ? ScaleType::kF32
                 : scale_type == DType::kBF16 ? ScaleType::kBF16
                                              : ScaleType::kF16;
  if (h.min_type != ScaleType::kNone) h.min_type = h.scale_type;
  return h;
}

// A packed weight with random codes (the extreme ones among them), scales and minima. misaligned: 8-byte aligned only,
// as in a mapped file.
struct Weight {
  Weight(Random& random, const Kind& kind, DType scale_type, int64_t n, int64_t k, bool misaligned = false)
      : kind(kind),
        scale_type(scale_type),
        n(n),
        k(k),
        header(header_of(kind, scale_type, n, k)),
        layout(layout_of(header)),
        codes(size_t(n * k)),
        scales(size_t(n * layout.groups)),
        mins(scales.size()),
        bytes(size_t(layout.total_bytes - 64 + (misaligned ? 8 : 0))) {
    const int low = kind.codes == GroupCodes::kInt8 ? -128 : 0, high = kind.codes == GroupCodes::kInt8 ? 127 : 15;
    std::uniform_int_distribution<int> uniform(low, high);
    for (int8_t& code : codes) code = int8_t(uniform(random));
    for (size_t i = 0; i < codes.size(); i += 7) codes[i] = int8_t(i % 2 == 0 ? low : high);
    const DType t = kind.group == 0 ? DType::kF32 : scale_type;
    fill_rounded(random, t, scales);
    fill_rounded(random, t, mins);
    pack();
  }

  static void fill_rounded(Random& random, DType t, std::vector<float>& values) {
    fill_normal(random, DType::kF32, values.data(), int64_t(values.size()), 0.01f);
    for (float& v : values) v = scalar::round_to(t, v);
  }

  void pack() {
    std::vector<uint8_t> all(size_t(layout.total_bytes));
    for (int64_t p = 0; p < layout.panels; ++p) {
      const int64_t first = p * 16 * layout.groups;
      pack_panel(header, all.data(), p, codes.data() + p * 16 * k, k, scales.data() + first,
                 kind.codes == GroupCodes::kInt4Min ? mins.data() + first : nullptr);
    }
    memcpy(bytes.as(), all.data() + 64, size_t(layout.panels * layout.panel_stride));
  }

  Kind kind;
  DType scale_type;
  int64_t n, k;
  PackedHeader header;
  PackedLayout layout;
  std::vector<int8_t> codes;        // [n, k]
  std::vector<float> scales, mins;  // [n, layout.groups]
  Guarded bytes;                    // the panels
};

// Rows of codes that end where a line of the weight ends, as the contract promises.
struct Input {
  Input(Random& random, int64_t rows, const Weight& w, int64_t pad = 0)
      : rows(rows),
        k(w.k),
        group(w.kind.act_group),
        groups(ceil_div(w.k, group)),
        padded(w.layout.lines * (w.kind.codes == GroupCodes::kInt8 ? 4 : 8)),
        stride(padded + pad),
        codes(size_t(rows == 0 ? 0 : (rows - 1) * stride + padded)),
        scales(size_t(rows * groups) * 4),
        sums(size_t(rows * groups) * 4) {
    fill_normal(random, DType::kF32, scales.as(), rows * groups, 0.02f);
    for (int64_t m = 0; m < rows; ++m) {
      fill_codes(random, row(m), k);
      finish(m);
    }
  }

  int8_t* row(int64_t m) { return codes.as<int8_t>() + m * stride; }
  void finish(int64_t m) {
    memset(row(m) + k, 0, size_t(padded - k));
    for (int64_t g = 0; g < groups; ++g) {
      int32_t sum = 0;
      for (int64_t i = g * group; i < std::min(k, (g + 1) * group); ++i) sum += row(m)[i];
      sums.as<int32_t>()[m * groups + g] = sum;
    }
  }

  int64_t rows, k, group, groups, padded, stride;
  Guarded codes, scales, sums;
};

LinearGroupArgs arguments(Input& x, Weight& w, Guarded& out, int64_t out_stride, DType out_dtype) {
  LinearGroupArgs a = {};
  a.panels = w.bytes.as<uint8_t>();
  a.panel_stride = w.layout.panel_stride;
  a.scale_offset = w.layout.scale_offset;
  a.k = w.k;
  a.group = w.kind.act_group;
  a.n = w.n;
  a.codes = w.kind.codes;
  a.channel_scale = w.kind.group == 0;
  a.scale_type = w.scale_type;
  a.hints = w.n % 2 == 1;  // both ways compute the same
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

// The product in double from the values that packed_weight.h says the codes stand for.
TEST(LinearGroup, TheReferenceComputesTheProduct) {
  Random random(1);
  for (const Kind& kind : kKinds)
    for (int64_t k : {1, 31, 33, 64, 130, 300})
      for (int64_t n : {1, 15, 33}) {
        SCOPED_TRACE(std::string(kind.name) + " k=" + std::to_string(k) + " n=" + std::to_string(n));
        Weight w(random, kind, kDTypes[k % 3], n, k);
        std::vector<uint8_t> packed(size_t(w.layout.total_bytes));
        memcpy(packed.data() + 64, w.bytes.as(), packed.size() - 64);
        Input x(random, 3, w);
        Guarded out(out_bytes(3, n, n, DType::kF32));
        linear_group_ref(arguments(x, w, out, n, DType::kF32));
        std::vector<float> values(static_cast<size_t>(k));
        for (int64_t c = 0; c < n; ++c) {
          unpack_channel(w.header, packed.data(), c, values.data());
          for (int64_t m = 0; m < 3; ++m) {
            double want = 0.0, magnitude = 0.0;
            for (int64_t i = 0; i < k; ++i) {
              const double term =
                  double(values[size_t(i)]) * x.row(m)[i] * x.scales.as<float>()[m * x.groups + i / x.group];
              want += term;
              magnitude += std::abs(term);
            }
            EXPECT_NEAR(out.as<float>()[m * n + c], want, 1e-5 * magnitude + 1e-12);
          }
        }
      }
}

TEST(LinearGroup, EveryVariantEqualsTheReference) {
  Random random(2);
  int count = 0;
  constexpr int64_t kChannels[] = {1, 15, 16, 17, 33, 64, 96};
  constexpr int64_t kRows[] = {0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33};
  for (const Kind& kind : kKinds)
    for (int64_t k : {1, 4, 7, 8, 31, 32, 33, 40, 64, 96, 127, 128, 130, 576, 1040})
      for (int turn = 0; turn < 4; ++turn) {
        // Every kind meets every k four times, with channels and scale types that move on from one to the next.
        const int64_t n = k > 200 ? kChannels[count % 5] : kChannels[count % 7];
        const DType scale_type = kDTypes[count % 3];
        Weight w(random, kind, scale_type, n, k, count % 2 == 1);
        ++count;
        for (int of_three = 0; of_three < 3; ++of_three) {
          const int64_t rows = kRows[(turn + 4 * of_three + count / 4) % 12];
          SCOPED_TRACE(std::string(kind.name) + " rows=" + std::to_string(rows) + " k=" + std::to_string(k) +
                       " n=" + std::to_string(n) + " scales " + name_of(scale_type));
          Input x(random, rows, w, (count + of_three) % 3 * 20);
          if (rows > 2) x.scales.as<float>()[rows / 2 * x.groups + (k > 32 ? 1 % x.groups : 0)] = NAN;
          const DType out_dtype = kDTypes[(count + of_three) % 3], bias_dtype = kDTypes[count / 3 % 3];
          const bool has_bias = (count + of_three) % 4 != 0;
          Guarded bias(size_t(n * dtype_size(bias_dtype)));
          fill_normal(random, bias_dtype, bias.as(), n);
          const int64_t stride = n + count % 4;
          const size_t size = out_bytes(rows, n, stride, out_dtype);
          auto run = [&](LinearGroupFn* fn, Guarded& out) {
            LinearGroupArgs a = arguments(x, w, out, stride, out_dtype);
            a.bias = has_bias ? bias.as() : nullptr;
            a.bias_dtype = bias_dtype;
            fn(a);
          };
          Guarded want(size);
          run(linear_group_ref, want);
          for_each_variant(linear_group_table, [&](LinearGroupFn* fn) {
            Guarded got(size);
            run(fn, got);
            EXPECT_TRUE(got == want);
          });
        }
      }
}

// More rows and panels than a block of the variants for many rows holds, more k than a piece, more groups than fit a
// buffer, and a last group that is short by whole lines and by part of one.
TEST(LinearGroup, ManyRowsAndPanels) {
  struct Shape {
    int64_t k, rows, n;
  };
  Random random(7);
  for (const Kind& kind : kKinds)
    for (const auto [k, rows, n] : {Shape{258, 71, 39}, {320, 68, 150}, {491, 134, 39}, {1130, 14, 213}, {16421, 11, 7}}) {
      SCOPED_TRACE(std::string(kind.name) + " k=" + std::to_string(k));
      Weight w(random, kind, kDTypes[k % 3], n, k);
      Input x(random, rows, w, 12);
      Guarded want(out_bytes(rows, n, n, DType::kF32));
      linear_group_ref(arguments(x, w, want, n, DType::kF32));
      for_each_variant(linear_group_table, [&](LinearGroupFn* fn) {
        Guarded got(out_bytes(rows, n, n, DType::kF32));
        fn(arguments(x, w, got, n, DType::kF32));
        EXPECT_TRUE(got == want);
      });
    }
}

// Sums at their limits: what saturates in 16 bits, or wraps where -128 is negated, shows here. With scales of 1 every
// result is an exact integer.
TEST(LinearGroup, ExtremeCodes) {
  Random random(3);
  const int64_t n = 17, k = 300;
  for (const Kind& kind : kKinds)
    for (int w_code : kind.codes == GroupCodes::kInt8 ? std::vector<int>{127, -127, -128} : std::vector<int>{0, 8, 15})
      for (int x_code : {127, -127})
        for (bool alternate : {false, true}) {
          SCOPED_TRACE(std::string(kind.name) + " w=" + std::to_string(w_code) + " x=" + std::to_string(x_code));
          Weight w(random, kind, DType::kF32, n, k);
          std::fill(w.codes.begin(), w.codes.end(), int8_t(w_code));
          std::fill(w.scales.begin(), w.scales.end(), 1.0f);
          std::fill(w.mins.begin(), w.mins.end(), -3.0f);
          w.pack();
          for (int64_t rows : {1, 2, 3, 8, 13}) {
            Input x(random, rows, w);
            // Alternate: pairs of k cancel, so that a group's sum says nothing about the sizes of its parts.
            int64_t sum = 0;
            for (int64_t i = 0; i < k; ++i) sum += alternate && i / 2 % 2 == 1 ? -x_code : x_code;
            for (int64_t m = 0; m < rows; ++m) {
              for (int64_t i = 0; i < k; ++i) x.row(m)[i] = int8_t(alternate && i / 2 % 2 == 1 ? -x_code : x_code);
              x.finish(m);
              std::fill_n(x.scales.as<float>() + m * x.groups, x.groups, 1.0f);
            }
            const int value = kind.codes == GroupCodes::kInt4      ? w_code - 8
                              : kind.codes == GroupCodes::kInt4Min ? w_code - 3
                                                                   : w_code;
            const std::vector<float> want(size_t(rows * n), float(sum * value));
            for_each_variant(linear_group_table, [&](LinearGroupFn* fn) {
              Guarded out(out_bytes(rows, n, n, DType::kF32));
              fn(arguments(x, w, out, n, DType::kF32));
              EXPECT_EQ(std::vector<float>(out.as<float>(), out.as<float>() + rows * n), want);
            });
          }
        }
}

// A row of a block equals the same row alone: for every variant, not only through the reference.
TEST(LinearGroup, RowsDoNotDependOnTheirNeighbours) {
  Random random(4);
  const int64_t n = 35, k = 168, rows = 23;
  for (const Kind& kind : kKinds) {
    SCOPED_TRACE(kind.name);
    Weight w(random, kind, DType::kF16, n, k);
    Input x(random, rows, w, 4);
    for_each_variant(linear_group_table, [&](LinearGroupFn* fn) {
      Guarded all(out_bytes(rows, n, n, DType::kBF16));
      fn(arguments(x, w, all, n, DType::kBF16));
      for (int64_t m = 0; m < rows; ++m) {
        Guarded one(out_bytes(1, n, n, DType::kBF16));
        LinearGroupArgs a = arguments(x, w, one, n, DType::kBF16);
        a.rows = 1;
        a.x += m * x.stride;
        a.x_scale += m * x.groups;
        a.x_sum += m * x.groups;
        fn(a);
        EXPECT_EQ(memcmp(one.as(), all.as<uint16_t>() + m * n, one.size()), 0) << "row " << m;
      }
    });
  }
}

// Scales that are infinite, NaN, subnormal or zero in every type, and results beyond the output type's range.
TEST(LinearGroup, ScalesAtTheEndsOfTheRange) {
  Random random(5);
  const int64_t n = 20, k = 96, rows = 9;
  for (const Kind& kind : {kKinds[0], kKinds[2], kKinds[5], kKinds[8]})
    for (DType scale_type : kDTypes)
      for (float scale : {0.0f, 1e-38f, 3e-6f, 40.0f, 1e30f, INFINITY, NAN})
        for (DType out_dtype : kDTypes) {
          SCOPED_TRACE(std::string(kind.name) + " " + name_of(scale_type) + " scale=" + std::to_string(scale) +
                       " out " + name_of(out_dtype));
          Weight w(random, kind, scale_type, n, k);
          for (size_t i = 0; i < w.scales.size(); i += 2) w.scales[i] = w.mins[(i * 3) % w.mins.size()] = scale;
          w.pack();
          Input x(random, rows, w);
          Guarded want(out_bytes(rows, n, n, out_dtype));
          linear_group_ref(arguments(x, w, want, n, out_dtype));
          for_each_variant(linear_group_table, [&](LinearGroupFn* fn) {
            Guarded got(out_bytes(rows, n, n, out_dtype));
            fn(arguments(x, w, got, n, out_dtype));
            EXPECT_TRUE(got == want);
          });
        }
}

// No k at all: the bias alone.
TEST(LinearGroup, NoFeatures) {
  Random random(6);
  const int64_t n = 19, rows = 9;
  for (const Kind& kind : kKinds) {
    SCOPED_TRACE(kind.name);
    Weight w(random, kind, DType::kF16, n, 0);
    Input x(random, rows, w);
    Guarded bias(size_t(n) * 4);
    fill_normal(random, DType::kF32, bias.as(), n);
    for_each_variant(linear_group_table, [&](LinearGroupFn* fn) {
      Guarded out(out_bytes(rows, n, n, DType::kF32));
      LinearGroupArgs a = arguments(x, w, out, n, DType::kF32);
      a.bias = bias.as();
      a.bias_dtype = DType::kF32;
      fn(a);
      for (int64_t m = 0; m < rows; ++m) EXPECT_EQ(memcmp(out.as<float>() + m * n, bias.as(), bias.size()), 0);
    });
  }
}

}  // namespace
}  // namespace tle::test
