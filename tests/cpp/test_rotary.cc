#include <math.h>

#include "csrc/engine/rotary.h"
#include "tests/cpp/harness.h"

namespace tle::test {
namespace {

TEST(Rotary, EveryVariantEqualsTheReference) {
  Random random(1);
  for (DType t : kDTypes)
    for (int64_t d : {2, 8, 30, 46, 64, 96, 128, 256})
      for (int64_t r : {int64_t(0), int64_t(2), d / 2 / 2 * 2, d})
        for (bool in_place : {false, true}) {
          SCOPED_TRACE(std::string(name_of(t)) + " d=" + std::to_string(d) + " r=" + std::to_string(r));
          const int64_t heads = 3, pad = 5, size = dtype_size(t);
          Guarded x(size_t((heads - 1) * (d + pad) + d) * size_t(size)), cos(size_t(r * size)), sin(size_t(r * size));
          fill_normal(random, t, x.as(), int64_t(x.size()) / size);
          fill_normal(random, t, cos.as(), r);
          fill_normal(random, t, sin.as(), r);
          auto run = [&](RotaryFn* fn, Guarded& out) {
            const int64_t stride = d + pad;
            if (in_place) memcpy(out.as(), x.as(), x.size());
            fn({in_place ? out.as() : x.as(), cos.as(), sin.as(), out.as(), heads, d, r, stride, stride, t});
          };
          Guarded want(x.size());
          run(rotary_ref, want);
          for_each_variant(rotary_table, [&](RotaryFn* fn) {
            Guarded got(x.size());
            run(fn, got);
            EXPECT_TRUE(got == want);
          });
        }
}

// cos_sin in double against the C library: both are within a unit of 2^-53 of a value below 1; the reduction adds n
// times the last part's error (2^-122 for n < 2^20: nothing).
TEST(Rotary, CosSinIsAccurate) {
  Random random(2);
  std::uniform_real_distribution<double> near(-4.0, 4.0), far(-1048576.0, 1048576.0);
  for (int i = 0; i < 200000; ++i) {
    const double angle = i % 2 ? near(random) : double(float(far(random)));
    double c, s;
    cos_sin(angle, &c, &s);
    ASSERT_NEAR(c, ::cos(angle), 0x1p-52) << angle;
    ASSERT_NEAR(s, ::sin(angle), 0x1p-52) << angle;
  }
  double c, s;
  cos_sin(0.0, &c, &s);
  EXPECT_EQ(c, 1.0);
  EXPECT_EQ(s, 0.0);
}

}  // namespace
}  // namespace tle::test
