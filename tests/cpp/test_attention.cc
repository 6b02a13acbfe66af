// attention and attention_merge: every variant against the reference, and the engine's divisions of the work against each other.
#include <algorithm>
#include <cmath>
#include <functional>

#include "csrc/engine/attention.h"
#include "tests/cpp/harness.h"

namespace tle::test {
namespace {

bool same_bits(float a, float b) { return a != a ? b != b : scalar::bits_of(a) == scalar::bits_of(b); }

int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }

// One call of the kernel: a tile of rows, the slots that their keys lie in, and perhaps a mask.
struct KernelCase {
  DType dtype = DType::kF32;
  int64_t heads = 1, queries = 1, slots = 0, d = 64, dv = 64;
  std::vector<int64_t> begin, end;  // [rows]
  int64_t first_block = 0, last_block = 100;
  float softcap = 0.0f, magnitude = 1.0f;
  MaskKind mask = MaskKind::kNone;
  bool mask_per_head = false, mask_strided = false;

  int64_t rows() const { return heads * queries; }
  void all_rows(int64_t first, int64_t last) {
    begin.assign(size_t(rows()), first);
    end.assign(size_t(rows()), last);
  }
};

struct KernelResult {
  std::vector<float> max, sum, acc;
};

class KernelRun {
 public:
  KernelRun(const KernelCase& c, Random& random)
      : c_(c),
        q_((c.queries * c.heads * (c.d + 3)) * dtype_size(c.dtype)),
        k_(std::max<int64_t>(0, c.slots * (c.d + 5) - 5) * dtype_size(c.dtype)),
        v_(std::max<int64_t>(0, c.slots * (c.dv + 1) - 1) * dtype_size(c.dtype)),
        mask_(size_t(mask_elements() * mask_size())) {
    fill_normal(random, c.dtype, q_.as(), c.queries * c.heads * (c.d + 3), c.magnitude);
    // Slots that no row may look at keep their NaN.
    std::vector<bool> used(size_t(c.slots), false);
    fill_mask(random);
    for (int64_t r = 0; r < c.rows(); ++r)
      for (int64_t key = c.begin[size_t(r)]; key < c.end[size_t(r)]; ++key)
        if (allowed(r, key)) used[size_t(key)] = true;
    for (int64_t key = 0; key < c.slots; ++key) {
      if (!used[size_t(key)]) continue;
      fill_normal(random, c.dtype, k_.as<char>() + key * (c.d + 5) * dtype_size(c.dtype), c.d, c.magnitude);
      fill_normal(random, c.dtype, v_.as<char>() + key * (c.dv + 1) * dtype_size(c.dtype), c.dv);
    }
  }

  void* k(int64_t slot) { return k_.as<char>() + slot * (c_.d + 5) * dtype_size(c_.dtype); }
  void* v(int64_t slot) { return v_.as<char>() + slot * (c_.dv + 1) * dtype_size(c_.dtype); }

  KernelResult operator()(AttentionFn* fn) {
    const int64_t rows = c_.rows();
    Guarded max(size_t(rows) * 4), sum(size_t(rows) * 4), acc(size_t(rows * padded(c_.dv)) * 4);
    Guarded workspace(size_t(attention_workspace(rows, c_.d, c_.dv)));
    AttentionArgs a = {};
    a.q = q_.as();
    a.k = k_.as();
    a.v = v_.as();
    a.begin = c_.begin.data();
    a.end = c_.end.data();
    a.max = max.as<float>();
    a.sum = sum.as<float>();
    a.acc = acc.as<float>();
    a.workspace = workspace.as();
    a.mask = {mask_.as(), c_.mask_per_head ? mask_row() : 0, mask_row() * (c_.mask_per_head ? c_.heads : 1),
              mask_step(), c_.mask};
    a.heads = c_.heads;
    a.queries = c_.queries;
    a.d = c_.d;
    a.dv = c_.dv;
    a.q_head_stride = c_.d + 3;
    a.q_query_stride = c_.heads * (c_.d + 3);
    a.k_stride = c_.d + 5;
    a.v_stride = c_.dv + 1;
    a.acc_stride = padded(c_.dv);
    a.first_block = c_.first_block;
    a.last_block = c_.last_block;
    a.scale = 1.0f / std::sqrt(float(c_.d));
    a.softcap = c_.softcap;
    a.dtype = c_.dtype;
    fn(a);
    KernelResult result;
    for (int64_t r = 0; r < rows; ++r) {
      result.max.push_back(a.max[r]);
      result.sum.push_back(a.sum[r]);
      for (int64_t i = 0; i < c_.dv; ++i) result.acc.push_back(a.acc[r * a.acc_stride + i]);
    }
    return result;
  }

 private:
  int64_t mask_step() const { return c_.mask_strided ? 2 : 1; }
  int64_t mask_row() const { return c_.slots * mask_step(); }
  int64_t mask_size() const { return c_.mask == MaskKind::kBool ? 1 : c_.mask == MaskKind::kF32 ? 4 : 2; }
  int64_t mask_elements() const {
    return c_.mask == MaskKind::kNone ? 0 : c_.queries * (c_.mask_per_head ? c_.heads : 1) * mask_row();
  }
  int64_t mask_element(int64_t row, int64_t key) const {
    const int64_t query = row / c_.heads, head = row % c_.heads;
    return (c_.mask_per_head ? query * c_.heads + head : query) * mask_row() + key * mask_step();
  }
  DType mask_dtype() const {
    return c_.mask == MaskKind::kF32 ? DType::kF32 : c_.mask == MaskKind::kBF16 ? DType::kBF16 : DType::kF16;
  }

  // A third of the keys, and a stretch of 40 whatever the row, is not allowed.
  void fill_mask(Random& random) {
    if (c_.mask == MaskKind::kNone) return;
    std::uniform_int_distribution<int> third(0, 2);
    std::normal_distribution<float> normal(0.0f, 2.0f);
    for (int64_t r = 0; r < c_.rows(); ++r) {
      if (!c_.mask_per_head && r % c_.heads != 0) continue;
      for (int64_t key = 0; key < c_.slots; ++key) {
        const bool blocked = third(random) == 0 || (key >= 20 && key < 60);
        const int64_t at = mask_element(r, key);
        if (c_.mask == MaskKind::kBool) {
          mask_.as<uint8_t>()[at] = blocked ? 0 : 1;
        } else {
          scalar::store(mask_dtype(), mask_.as(), at, blocked ? -INFINITY : normal(random));
        }
      }
    }
  }
  bool allowed(int64_t row, int64_t key) {
    if (c_.mask == MaskKind::kNone) return true;
    const int64_t at = mask_element(row, key);
    if (c_.mask == MaskKind::kBool) return mask_.as<uint8_t>()[at] != 0;
    return scalar::load(mask_dtype(), mask_.as(), at) != -INFINITY;
  }

  KernelCase c_;
  Guarded q_, k_, v_, mask_;
};

void expect_same(const std::vector<float>& got, const std::vector<float>& want, const char* what) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i)
    ASSERT_TRUE(same_bits(got[i], want[i])) << what << " " << i << ": " << got[i] << " instead of " << want[i];
}

void expect_variants_equal(KernelRun& run) {
  const KernelResult want = run(attention_ref);
  for_each_variant(attention_table, [&](AttentionFn* fn) {
    const KernelResult got = run(fn);
    expect_same(got.sum, want.sum, "sum");
    expect_same(got.acc, want.acc, "acc");
    // A maximum of 0 may have either sign: everything that is computed from it is the same.
    for (size_t i = 0; i < got.max.size(); ++i) ASSERT_EQ(got.max[i], want.max[i]);
  });
}

void check(const KernelCase& c, Random& random) {
  SCOPED_TRACE(std::string(name_of(c.dtype)) + " heads=" + std::to_string(c.heads) + " queries=" +
               std::to_string(c.queries) + " slots=" + std::to_string(c.slots) + " d=" + std::to_string(c.d) +
               " dv=" + std::to_string(c.dv) + " mask=" + std::to_string(int(c.mask)));
  KernelRun run(c, random);
  expect_variants_equal(run);
}

// Causal rows over `slots` slots, the last query at the last slot.
void causal(KernelCase& c, int64_t start, int64_t window) {
  c.begin.clear();
  c.end.clear();
  for (int64_t i = 0; i < c.queries; ++i) {
    const int64_t end = std::max<int64_t>(0, c.slots - c.queries + i + 1);
    for (int64_t h = 0; h < c.heads; ++h) {
      c.begin.push_back(std::max(start, window > 0 ? end - window : 0));
      c.end.push_back(end);
    }
  }
}

const int64_t kHeadSizes[] = {1, 8, 46, 64, 72, 80, 96, 112, 120, 128, 192, 256, 512};

TEST(Attention, EveryVariantEqualsTheReferenceForEveryHeadSize) {
  Random random(1);
  for (DType t : kDTypes)
    for (int64_t d : kHeadSizes)
      for (int64_t heads : {1, 3}) {
        KernelCase c;
        c.dtype = t;
        c.heads = heads;
        c.d = d;
        c.dv = d;
        c.slots = 37;
        c.all_rows(0, 37);
        check(c, random);
        c.dv = d == 192 ? 128 : d % 100 + 1;
        check(c, random);
      }
}

TEST(Attention, EveryVariantEqualsTheReferenceForEveryNumberOfKeysAndRows) {
  Random random(2);
  for (DType t : kDTypes)
    for (int64_t keys : {0, 1, 3, 16, 63, 65, 255, 256, 257, 600})
      for (int64_t heads : {1, 2, 3, 4, 5, 7, 8, 9, 16}) {
        KernelCase c;
        c.dtype = t;
        c.heads = heads;
        c.slots = keys;
        c.d = 64;
        c.dv = 32;
        c.all_rows(0, keys);
        check(c, random);
      }
}

TEST(Attention, TilesOfQueriesWithCausalityWindowsAndPadding) {
  Random random(3);
  for (DType t : {DType::kF32, DType::kBF16})
    for (int64_t heads : {1, 3})
      for (int64_t queries : {2, 5, 20, 64})
        for (int64_t slots : {2, 64, 300, 531})
          for (int64_t window : {0, 1, 7, 256, 300})
            for (int64_t start : {0, 13}) {
              KernelCase c;
              c.dtype = t;
              c.heads = heads;
              c.queries = std::min(queries, kAttentionRows / heads);
              c.slots = slots;
              c.d = 32;
              c.dv = 24;
              causal(c, start, window);
              check(c, random);
            }
}

TEST(Attention, MasksOfEveryKind) {
  Random random(4);
  for (MaskKind mask : {MaskKind::kBool, MaskKind::kF32, MaskKind::kBF16, MaskKind::kF16})
    for (bool per_head : {false, true})
      for (bool strided : {false, true})
        for (int64_t queries : {1, 12})
          for (float softcap : {0.0f, 2.0f}) {
            KernelCase c;
            c.dtype = DType::kBF16;
            c.heads = 3;
            c.queries = queries;
            c.slots = 290;
            c.d = c.dv = 32;
            c.mask = mask;
            c.mask_per_head = per_head;
            c.mask_strided = strided;
            c.softcap = softcap;
            causal(c, 0, 0);
            check(c, random);
          }
}

TEST(Attention, SoftcapsAndLargeScores) {
  Random random(5);
  for (float softcap : {0.5f, 50.0f})
    for (float magnitude : {0.01f, 1.0f, 30.0f, 1e12f, 1e30f}) {
      KernelCase c;
      c.heads = 2;
      c.queries = 3;
      c.slots = 270;
      c.softcap = softcap;
      c.magnitude = magnitude;  // 1e30: dots overflow, to infinities and NaN
      causal(c, 0, 0);
      check(c, random);
      c.softcap = 0.0f;
      check(c, random);
    }
}

TEST(Attention, InfinitiesAndNanInKeysAndValues) {
  Random random(6);
  const float special[] = {INFINITY, -INFINITY, NAN, 1e-41f, -0.0f};
  for (DType t : kDTypes)
    for (float key_value : special)
      for (float value : special)
        for (int64_t keys : {1, 5, 270}) {
          KernelCase c;
          c.dtype = t;
          c.heads = 2;
          c.queries = 2;
          c.slots = keys;
          c.d = c.dv = 16;
          c.all_rows(0, keys);
          KernelRun run(c, random);
          // One element of one key and of another value; a score of -inf skips the key, so that its NaN value does no harm.
          scalar::store(t, run.k(keys / 2), 3, key_value);
          scalar::store(t, run.v(keys / 2), 5, value);
          scalar::store(t, run.v(keys - 1), 7, value);
          expect_variants_equal(run);
        }
}

TEST(Attention, BlocksOneByOneAndJoinedEqualOneCall) {
  Random random(7);
  for (DType t : kDTypes)
    for (bool sinks : {false, true}) {
      KernelCase c;
      c.dtype = t;
      c.heads = 3;
      c.queries = 7;
      c.slots = 1100;
      c.d = 48;
      c.dv = 40;
      causal(c, 5, 700);
      KernelRun whole(c, random);
      const KernelResult want = whole(attention_ref);
      const int64_t rows = c.rows(), blocks = 5;

      auto merge = [&](AttentionMergeFn* fn, const std::vector<KernelResult>& parts) {
        std::vector<float> max, sum, acc(size_t(rows * padded(c.dv)) * parts.size(), NAN);
        for (size_t p = 0; p < parts.size(); ++p) {
          max.insert(max.end(), parts[p].max.begin(), parts[p].max.end());
          sum.insert(sum.end(), parts[p].sum.begin(), parts[p].sum.end());
          for (int64_t r = 0; r < rows; ++r)
            std::copy_n(&parts[p].acc[size_t(r * c.dv)], c.dv, &acc[size_t((int64_t(p) * rows + r) * padded(c.dv))]);
        }
        const float sink[] = {0.5f, -3.0f, 9.0f};
        Guarded out(size_t(rows * c.dv * dtype_size(t)));
        AttentionMergeArgs a = {};
        a.max = max.data();
        a.sum = sum.data();
        a.acc = acc.data();
        a.sinks = sinks ? sink : nullptr;
        a.out = out.as();
        a.partials = int64_t(parts.size());
        a.heads = c.heads;
        a.queries = c.queries;
        a.dv = c.dv;
        a.partial_stride = rows;
        a.acc_stride = padded(c.dv);
        a.out_head_stride = c.dv;
        a.out_query_stride = c.heads * c.dv;
        a.sinks_dtype = DType::kF32;
        a.dtype = t;
        fn(a);
        return std::string(out.as<char>(), out.size());
      };
      const std::string result = merge(attention_merge_ref, {want});
      std::vector<KernelResult> parts;
      for (int64_t b = 0; b < blocks; ++b) {
        KernelCase one = c;
        one.first_block = b;
        one.last_block = b + 1;
        Random same(7);  // the same operands as `whole`
        KernelRun run(one, same);
        parts.push_back(run(attention_ref));
      }
      // Two runs with the same seed only have the same operands if nothing was drawn before them.
      Random again(7);
      KernelRun first(c, again);
      const std::string expected = merge(attention_merge_ref, {first(attention_ref)});
      EXPECT_EQ(merge(attention_merge_ref, parts), expected);
      for_each_variant(attention_merge_table, [&](AttentionMergeFn* fn) {
        EXPECT_EQ(merge(fn, parts), expected);
        EXPECT_EQ(merge(fn, {want}), result);
      });
    }
}

}  // namespace
}  // namespace tle::test
