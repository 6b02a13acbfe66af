// exp of scalar.h against double precision, and the exp inside every vector variant against exp of scalar.h.
#include <cmath>

#include "tests/cpp/harness.h"

namespace tle::test {
namespace {

// |got - exp(x)| in units in the last place of the exact value; below 2^-126 such a unit is 2^-149.
double error_in_ulp(float got, float x) {
  const double exact = std::exp(double(x));
  const int exponent = std::max(std::ilogb(exact), -126);
  return std::fabs(double(got) - exact) / std::ldexp(1.0, exponent - 23);
}

// exp(x) = 2^n p(r), |r| <= ln(2) / 2 = 0.347. In ulp of a result in [0.707, 1), where one is 2^-24:
//   0.50  rounding of the last fma
//   0.17  rounding of the step before, half an ulp of a value in [0.84, 1), times |r|
//   0.06  of the one before that, half an ulp of a value in [0.5, 1), times r^2; 0.02 for all earlier ones
//   0.25  rounding of r to a multiple of 2^-25 (n ln 2 itself is good to 2^-37)
//   0.03  rounding of the coefficients, 0.05 the polynomial's own error (3.1e-9)
// together 1.08. A subnormal result is p 2^n rounded once more: there the relative error of p is worth at most 0.54 of
// its units, and the rounding 0.5. These do not all meet in one x: over every seventh float the worst is 0.894, at 5.2,
// and 0.831 among the subnormal results, and that is what is held.
constexpr double kBound = 0.9;

void expect_within_bound(float x) {
  const float got = scalar::exp(x);
  if (x > 88.7228394f) {  // the largest float whose exp is finite
    ASSERT_EQ(got, INFINITY) << x;
  } else if (x < -103.972084f) {  // the smallest one whose exp is nearer to 2^-149 than to 0
    ASSERT_EQ(got, 0.0f) << x;
  } else {
    ASSERT_LE(error_in_ulp(got, x), kBound) << x;
  }
}

TEST(Exp, ErrorBoundOverAllBf16) {
  for (uint32_t h = 0; h < 0x10000; ++h) {
    const float x = scalar::from_bf16(uint16_t(h));
    if (x == x) expect_within_bound(x);
    else ASSERT_NE(scalar::exp(x), scalar::exp(x));
  }
}

TEST(Exp, ErrorBoundOverADenseGrid) {
  for (float end : {89.0f, -105.0f}) {
    const uint32_t last = scalar::bits_of(end), sign = last & 0x80000000u;
    // Below 2^-30 exp is 1 in every float.
    for (uint32_t bits = sign | scalar::bits_of(0x1p-30f); bits <= last; bits += 257)
      expect_within_bound(scalar::float_of(bits));
  }
}

// With q = 1, scale 1, a first key 0 and one-hot values, the kernel's sums are the weights exp(k_i - 0) themselves.
void expect_attention_weights(AttentionFn* fn, const std::vector<float>& x) {
  constexpr int64_t kPerCall = kAttentionBlock - 1;
  std::vector<float> values(size_t(kAttentionBlock * kPerCall), 0.0f), acc(size_t(kAttentionBlock), 0.0f);
  for (int64_t i = 0; i < kPerCall; ++i) values[size_t((i + 1) * kPerCall + i)] = 1.0f;
  alignas(64) static char workspace[1 << 20];
  ASSERT_LE(attention_workspace(1, 1, kPerCall), int64_t(sizeof(workspace)));
  for (size_t at = 0; at < x.size(); at += kPerCall) {
    const size_t count = std::min(size_t(kPerCall), x.size() - at);
    std::vector<float> keys(1, 0.0f);
    keys.insert(keys.end(), x.begin() + std::ptrdiff_t(at), x.begin() + std::ptrdiff_t(at + count));
    const float q = 1.0f;
    const int64_t begin = 0, end = int64_t(count) + 1;
    float max, sum;
    AttentionArgs a = {};
    a.q = &q;
    a.k = keys.data();
    a.v = values.data();
    a.begin = &begin;
    a.end = &end;
    a.max = &max;
    a.sum = &sum;
    a.acc = acc.data();
    a.workspace = workspace;
    a.heads = a.queries = a.d = a.k_stride = 1;
    a.dv = a.v_stride = kPerCall;
    a.acc_stride = int64_t(acc.size());
    a.last_block = 1;
    a.scale = 1.0f;
    a.dtype = DType::kF32;
    fn(a);
    for (size_t i = 0; i < count; ++i)
      ASSERT_EQ(scalar::bits_of(acc[i]), scalar::bits_of(scalar::exp(x[at + i]))) << x[at + i];
  }
}

TEST(Exp, EveryVariantOfAttentionHasTheScalarOneForNegativeArguments) {
  std::vector<float> x;
  for (uint32_t h = 0x8000; h <= 0xFF80; ++h) x.push_back(scalar::from_bf16(uint16_t(h)));  // -0 .. -inf
  for (uint32_t bits = 0xB0000000u; bits <= scalar::bits_of(-105.0f); bits += 4999) x.push_back(scalar::float_of(bits));
  for_each_variant(attention_table, [&](AttentionFn* fn) { expect_attention_weights(fn, x); });
}

// silu(x) = x / (1 + exp(-x)) reaches the arguments of both signs, infinities and NaN.
TEST(Exp, EveryVariantOfSwigluHasTheScalarOne) {
  std::vector<float> x;
  for (uint32_t h = 0; h < 0x10000; ++h) x.push_back(scalar::from_bf16(uint16_t(h)));
  for (uint32_t bits = 0x30000000u; bits <= scalar::bits_of(105.0f); bits += 4999) {
    x.push_back(scalar::float_of(bits));
    x.push_back(-scalar::float_of(bits));
  }
  const std::vector<float> one(x.size(), 1.0f);
  for_each_variant(swiglu_table, [&](SwigluFn* fn) {
    std::vector<float> out(x.size());
    SwigluArgs a = {};
    a.gate = x.data();
    a.up = one.data();
    a.out = out.data();
    a.rows = 1;
    a.n = int64_t(x.size());
    a.dtype = DType::kF32;
    fn(a);
    for (size_t i = 0; i < x.size(); ++i) {
      const float want = scalar::canonical(x[i] / (1.0f + scalar::exp(-x[i])));
      ASSERT_EQ(scalar::bits_of(out[i]), scalar::bits_of(want)) << x[i];
    }
  });
}

}  // namespace
}  // namespace tle::test
