#include "tests/cpp/harness.h"

namespace tle::test {
namespace {

TEST(RmsNorm, EveryVariantEqualsTheReference) {
  Random random(1);
  const int64_t pad = 3;  // between rows
  for (DType t : kDTypes)
    for (DType wt : {t, DType::kF32})
      for (int64_t d : {1, 2, 15, 16, 17, 31, 64, 100, 576, 1027})
        for (int64_t rows : {0, 1, 3})
          for (NormKind kind : {NormKind::kF32, NormKind::kLlama, NormKind::kGemma})
            for (bool residual : {false, true}) {
              SCOPED_TRACE(std::string(name_of(t)) + " d=" + std::to_string(d) + " kind=" + std::to_string(int(kind)));
              const size_t size = size_t(dtype_size(t)), n = size_t(rows * (d + pad));
              Guarded x(n * size), r(n * size), w(size_t(d * dtype_size(wt)));
              fill_normal(random, t, x.as(), int64_t(n), 3.0f);
              fill_normal(random, t, r.as(), int64_t(n));
              fill_normal(random, wt, w.as(), d);
              auto run = [&](RmsNormFn* fn, Guarded& out, Guarded& sum) {
                RmsNormArgs a = {};
                a.x = x.as();
                a.residual = residual ? r.as() : nullptr;
                a.weight = w.as();
                a.out = out.as();
                a.sum = residual ? sum.as() : nullptr;
                a.rows = rows;
                a.d = d;
                a.x_stride = a.residual_stride = d + pad;
                a.out_stride = a.sum_stride = d;
                a.eps = 1e-6f;
                a.kind = kind;
                a.dtype = t;
                a.weight_dtype = wt;
                fn(a);
              };
              const size_t out_bytes = size_t(rows * d) * size;
              Guarded want(out_bytes), want_sum(out_bytes);
              run(rms_norm_ref, want, want_sum);
              for_each_variant(rms_norm_table, [&](RmsNormFn* fn) {
                Guarded got(out_bytes), got_sum(out_bytes);
                run(fn, got, got_sum);
                EXPECT_TRUE(got == want);
                EXPECT_TRUE(got_sum == want_sum);
              });
            }
}

}  // namespace
}  // namespace tle::test
