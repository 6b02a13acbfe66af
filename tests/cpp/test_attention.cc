// attention and attention_merge: every variant against the reference, and the engine's divisions of the work against
// each other.
#include <algorithm>
#include <cmath>

#include "csrc/engine/attention.h"
#include "tests/cpp/harness.h"

namespace tle::test {
namespace {

bool same_bits(float a, float b) { return a != a ? b != b : scalar::bits_of(a) == scalar::bits_of(b); }

int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }

const float kSinks[] = {0.5f, -3.0f, 9.0f};
const std::vector<float> kManySinks = [] {
  std::vector<float> sinks;
  for (int i = 0; i < 70; ++i) sinks.push_back(float(i % 7) - 3.0f);
  return sinks;
}();

// What q and out hold, and what keys and values do.
struct Kind {
  DType dtype, kv;
  std::string name() const { return std::string(name_of(dtype)) + (kv == DType::kI8 ? " on int8" : ""); }
};
const Kind kKinds[] = {{DType::kF32, DType::kF32}, {DType::kBF16, DType::kBF16}, {DType::kF16, DType::kF16},
                       {DType::kF32, DType::kI8},  {DType::kBF16, DType::kI8},   {DType::kF16, DType::kI8}};

int64_t scale_bytes(DType kv) { return kv == DType::kI8 ? kScaleBytes : 0; }

// A key or a value of n elements.
void fill_slot(Random& random, DType kv, void* p, int64_t n, float magnitude = 1.0f) {
  if (kv != DType::kI8) return fill_normal(random, kv, p, n, magnitude);
  fill_codes(random, static_cast<int8_t*>(p), n);
  const float scale = std::uniform_real_distribution<float>(0.5f, 1.0f)(random) * magnitude / 64.0f;
  memcpy(static_cast<int8_t*>(p) + n, &scale, sizeof scale);
}

// One call of the kernel: a tile of rows, the slots that their keys lie in, and perhaps a mask.
struct KernelCase {
  Kind kind = kKinds[0];
  int64_t heads = 1, queries = 1, slots = 0, d = 64, dv = 64;
  std::vector<int64_t> begin, end;  // [rows]
  int64_t first_block = 0, last_block = 100;
  float softcap = 0.0f, magnitude = 1.0f;
  MaskKind mask = MaskKind::kNone;
  bool mask_per_head = false, mask_strided = false;

  int64_t rows() const { return heads * queries; }
  int64_t k_size() const { return d + scale_bytes(kind.kv); }
  int64_t v_size() const { return dv + scale_bytes(kind.kv); }
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
        q_((c.queries * c.heads * (c.d + 3)) * dtype_size(c.kind.dtype)),
        k_(std::max<int64_t>(0, c.slots * (c.k_size() + 5) - 5) * dtype_size(c.kind.kv)),
        v_(std::max<int64_t>(0, c.slots * (c.v_size() + 1) - 1) * dtype_size(c.kind.kv)),
        mask_(size_t(mask_elements() * mask_size())) {
    fill_normal(random, c.kind.dtype, q_.as(), c.queries * c.heads * (c.d + 3), c.magnitude);
    // Slots that no row may look at keep their NaN.
    std::vector<bool> used(size_t(c.slots), false);
    fill_mask(random);
    for (int64_t r = 0; r < c.rows(); ++r)
      for (int64_t key = c.begin[size_t(r)]; key < c.end[size_t(r)]; ++key)
        if (allowed(r, key)) used[size_t(key)] = true;
    for (int64_t key = 0; key < c.slots; ++key) {
      if (!used[size_t(key)]) continue;
      fill_slot(random, c.kind.kv, k(key), c.d, c.magnitude);
      fill_slot(random, c.kind.kv, v(key), c.dv);
    }
  }

  void set_blocks(int64_t first, int64_t last) {
    c_.first_block = first;
    c_.last_block = last;
  }
  void* k(int64_t slot) { return k_.as<char>() + slot * (c_.k_size() + 5) * dtype_size(c_.kind.kv); }
  void* v(int64_t slot) { return v_.as<char>() + slot * (c_.v_size() + 1) * dtype_size(c_.kind.kv); }

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
    a.k_stride = c_.k_size() + 5;
    a.v_stride = c_.v_size() + 1;
    a.acc_stride = padded(c_.dv);
    a.first_block = c_.first_block;
    a.last_block = c_.last_block;
    a.scale = 1.0f / std::sqrt(float(c_.d));
    a.softcap = c_.softcap;
    a.dtype = c_.kind.dtype;
    a.kv_dtype = c_.kind.kv;
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
  SCOPED_TRACE(c.kind.name() + " heads=" + std::to_string(c.heads) + " queries=" +
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
  for (const Kind& kind : kKinds)
    for (int64_t d : kHeadSizes)
      for (int64_t heads : {1, 3}) {
        KernelCase c;
        c.kind = kind;
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
  for (const Kind& kind : kKinds)
    for (int64_t keys : {0, 1, 3, 16, 63, 65, 255, 256, 257, 600})
      for (int64_t heads : {1, 2, 3, 4, 5, 7, 8, 9, 16}) {
        KernelCase c;
        c.kind = kind;
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
  for (const Kind& kind : {kKinds[0], kKinds[1], kKinds[4]})
    for (int64_t heads : {1, 3})
      for (int64_t queries : {2, 5, 20, 64})
        for (int64_t slots : {2, 64, 300, 531})
          for (int64_t window : {0, 1, 7, 256, 300})
            for (int64_t start : {0, 13}) {
              KernelCase c;
              c.kind = kind;
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
  for (const Kind& kind : {kKinds[1], kKinds[4]})
    for (MaskKind mask : {MaskKind::kBool, MaskKind::kF32, MaskKind::kBF16, MaskKind::kF16})
      for (bool per_head : {false, true})
        for (bool strided : {false, true})
          for (int64_t queries : {1, 12})
            for (float softcap : {0.0f, 2.0f}) {
              KernelCase c;
              c.kind = kind;
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
  for (const Kind& kind : kKinds)
    for (float key_value : special)
      for (float value : special)
        for (int64_t keys : {1, 5, 270}) {
          KernelCase c;
          c.kind = kind;
          c.heads = 2;
          c.queries = 2;
          c.slots = keys;
          c.d = c.dv = 16;
          c.all_rows(0, keys);
          KernelRun run(c, random);
          // One element (of int8: the scale) of a key and of two values; a score of -inf skips the key, so that its NaN
          // value does no harm.
          auto put = [&](void* slot, int64_t element, float x) {
            if (kind.kv != DType::kI8) return scalar::store(kind.dtype, slot, element, x);
            const float scale = std::fabs(x);
            memcpy(static_cast<int8_t*>(slot) + 16, &scale, sizeof scale);
          };
          put(run.k(keys / 2), 3, key_value);
          put(run.v(keys / 2), 5, value);
          put(run.v(keys - 1), 7, value);
          expect_variants_equal(run);
        }
}

TEST(Attention, BlocksOneByOneAndJoinedEqualOneCall) {
  Random random(7);
  for (const Kind& kind : kKinds) {
    KernelCase c;
    c.kind = kind;
    c.heads = 3;
    c.queries = 7;
    c.slots = 1100;
    c.d = 48;
    c.dv = 40;
    causal(c, 5, 700);
    KernelRun run(c, random);
    const KernelResult whole = run(attention_ref);
    std::vector<KernelResult> blocks;
    for (int64_t b = 0; b < 5; ++b) {  // the rows have three blocks
      run.set_blocks(b, b + 1);
      blocks.push_back(run(attention_ref));
    }
    const int64_t rows = c.rows(), acc_stride = padded(c.dv);

    for (const float* sinks : {static_cast<const float*>(nullptr), kSinks}) {
      auto merge = [&](AttentionMergeFn* fn, const std::vector<KernelResult>& partials) {
        std::vector<float> max, sum, acc(size_t(rows * acc_stride) * partials.size(), NAN);
        for (size_t p = 0; p < partials.size(); ++p) {
          max.insert(max.end(), partials[p].max.begin(), partials[p].max.end());
          sum.insert(sum.end(), partials[p].sum.begin(), partials[p].sum.end());
          for (int64_t r = 0; r < rows; ++r)
            std::copy_n(&partials[p].acc[size_t(r * c.dv)], c.dv, &acc[size_t((int64_t(p) * rows + r) * acc_stride)]);
        }
        Guarded out(size_t(rows * c.dv * dtype_size(kind.dtype)));
        AttentionMergeArgs a = {};
        a.max = max.data();
        a.sum = sum.data();
        a.acc = acc.data();
        a.sinks = sinks;
        a.out = out.as();
        a.partials = int64_t(partials.size());
        a.heads = c.heads;
        a.queries = c.queries;
        a.dv = c.dv;
        a.partial_stride = rows;
        a.acc_stride = acc_stride;
        a.out_head_stride = c.dv;
        a.out_query_stride = c.heads * c.dv;
        a.sinks_dtype = DType::kF32;
        a.dtype = kind.dtype;
        fn(a);
        return std::string(out.as<char>(), out.size());
      };
      const std::string want = merge(attention_merge_ref, {whole});
      EXPECT_EQ(merge(attention_merge_ref, blocks), want);
      for_each_variant(attention_merge_table, [&](AttentionMergeFn* fn) {
        EXPECT_EQ(merge(fn, {whole}), want);
        EXPECT_EQ(merge(fn, blocks), want);
      });
    }
  }
}

// ---- the engine ----

// [batch][heads][tokens][size] in memory of its own, in one of two orders.
struct Tokens {
  int64_t batch, heads, tokens, size;  // int8: size counts the bytes of the scale
  DType dtype;
  bool tokens_first;  // stored as [batch, tokens, heads, size]
  std::vector<char> memory;

  Tokens(int64_t b, int64_t h, int64_t n, int64_t d, DType t, bool first = false)
      : batch(b), heads(h), tokens(n), size(d), dtype(t), tokens_first(first),
        memory(size_t(b * h * n * d * dtype_size(t)), char(0xFF)) {}  // NaN

  TokenStrides strides() const {
    return tokens_first ? TokenStrides{heads * tokens * size, size, heads * size}
                        : TokenStrides{heads * tokens * size, tokens * size, size};
  }
  char* at(int64_t b, int64_t h, int64_t i) {
    const TokenStrides s = strides();
    return memory.data() + (b * s.batch + h * s.head + i * s.token) * dtype_size(dtype);
  }
  void fill(Random& random, int64_t b, int64_t first, int64_t last) {
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = first; i < last; ++i) fill_slot(random, dtype, at(b, h, i), size - scale_bytes(dtype));
  }
  std::string bytes(int64_t b, int64_t h, int64_t i) {
    return std::string(at(b, h, i), size_t(size * dtype_size(dtype)));
  }
};

struct Operands {
  Tokens q, k, v;
  Operands(Random& random, const Kind& kind, int64_t batch, int64_t heads, int64_t kv_heads, int64_t queries,
           int64_t keys, int64_t d, int64_t dv)
      : q(batch, heads, queries, d, kind.dtype, true),
        k(batch, kv_heads, keys, d + scale_bytes(kind.kv), kind.kv),
        v(batch, kv_heads, keys, dv + scale_bytes(kind.kv), kind.kv) {
    for (int64_t b = 0; b < batch; ++b) {
      q.fill(random, b, 0, queries);
      k.fill(random, b, 0, keys);
      v.fill(random, b, 0, keys);
    }
  }
  AttentionCall call() {
    AttentionCall c;
    c.q = q.memory.data();
    c.k = k.memory.data();
    c.v = v.memory.data();
    c.q_strides = q.strides();
    c.k_strides = k.strides();
    c.v_strides = v.strides();
    c.dtype = q.dtype;
    c.kv_dtype = k.dtype;
    c.batch = q.batch;
    c.heads = q.heads;
    c.kv_heads = k.heads;
    c.queries = q.tokens;
    c.keys = k.tokens;
    c.d = q.size;
    c.dv = v.size - scale_bytes(v.dtype);
    c.scale = 1.0f / std::sqrt(float(q.size));
    c.causal = true;
    return c;
  }
};

Tokens run(AttentionCall c, int threads = 1) {
  Tokens out(c.batch, c.heads, c.queries, c.dv, c.dtype, true);
  c.out = out.memory.data();
  c.out_strides = out.strides();
  set_num_threads(threads);
  {
    Program program(kAttentionStages);
    add_attention(program, c);
    program.run();
  }
  set_num_threads(1);
  return out;
}

TEST(AttentionEngine, ThreadsAndLevelsDoNotChangeBits) {
  Random random(11);
  const struct {
    int64_t batch, heads, kv_heads, queries, keys, window;
  } cases[] = {{1, 4, 2, 1, 5000, 0},   {1, 4, 2, 1, 5000, 1000}, {2, 6, 2, 9, 700, 0},
               {1, 2, 1, 300, 300, 0}, {1, 3, 3, 100, 400, 70},   {1, 70, 1, 2, 300, 0}};
  for (const Kind& kind : {kKinds[1], kKinds[4]})
    for (const auto& c : cases) {
      Operands operands(random, kind, c.batch, c.heads, c.kv_heads, c.queries, c.keys, 32, 16);
      AttentionCall call = operands.call();
      call.window = c.window;
      call.sinks = kManySinks.data();
      Tokens want = run(call);
      for (int threads : {2, 3, 5}) EXPECT_EQ(run(call, threads).memory, want.memory) << threads << " threads";
      for (Isa isa : supported_isas()) {
        set_isa_cap(isa_name(isa));
        EXPECT_EQ(run(call, 2).memory, want.memory) << isa_name(isa);
      }
      set_isa_cap("");
    }
}

TEST(AttentionEngine, ARowOfABatchEqualsTheRowAlone) {
  Random random(12);
  for (const Kind& kind : kKinds) {
    Operands all(random, kind, 3, 6, 3, 4, 400, 40, 40);
    Tokens want = run(all.call(), 2);
    for (int64_t b = 0; b < 3; ++b) {
      AttentionCall one = all.call();
      one.batch = 1;
      one.q = all.q.at(b, 0, 0);
      one.k = all.k.at(b, 0, 0);
      one.v = all.v.at(b, 0, 0);
      Tokens got = run(one, 2);
      for (int64_t h = 0; h < 6; ++h)
        for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(got.bytes(0, h, i), want.bytes(b, h, i));
    }
  }
}

TEST(AttentionEngine, ARowOfAPrefillEqualsItsDecodeStep) {
  Random random(13);
  for (const Kind& kind : kKinds)
    for (int64_t window : {0, 100, 256}) {
      const int64_t tokens = 330;
      Operands all(random, kind, 1, 4, 2, tokens, tokens, 24, 24);
      AttentionCall prefill = all.call();
      prefill.window = window;
      Tokens want = run(prefill, 2);
      for (int64_t i = 0; i < tokens; i += 13) {
        AttentionCall step = prefill;
        step.q = all.q.at(0, 0, i);
        step.queries = 1;
        step.keys = i + 1;
        Tokens got = run(step, 2);
        for (int64_t h = 0; h < 4; ++h) ASSERT_EQ(got.bytes(0, h, 0), want.bytes(0, h, i)) << "token " << i;
      }
    }
}

// Rows that are padded on the left, by `starts` or by a mask, against the same rows alone. What the padding holds is
// NaN.
TEST(AttentionEngine, APaddedRowEqualsTheRowAlone) {
  Random random(14);
  const int64_t keys = 640, queries = 5, heads = 4, kv_heads = 2, d = 32;
  const int64_t starts[] = {0, 1, 255, 600, 638};
  const int64_t batch = 5;
  for (const Kind& kind : kKinds) {
    Operands padded(random, kind, batch, heads, kv_heads, queries, keys, d, d);
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t h = 0; h < kv_heads; ++h)
        for (int64_t i = 0; i < starts[b]; ++i) {
          memset(padded.k.at(b, h, i), 0xFF, size_t(padded.k.size * dtype_size(kind.kv)));
          memset(padded.v.at(b, h, i), 0xFF, size_t(padded.v.size * dtype_size(kind.kv)));
        }
    std::vector<uint8_t> allowed(size_t(batch * keys), 1);
    std::vector<float> added(size_t(batch * keys), 0.0f);
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t i = 0; i < starts[b]; ++i) {
        allowed[size_t(b * keys + i)] = 0;
        added[size_t(b * keys + i)] = -INFINITY;
      }
    AttentionCall by_starts = padded.call(), by_bools = padded.call(), by_sums = padded.call();
    by_starts.starts = starts;
    by_bools.mask = {allowed.data(), 0, 0, 1, MaskKind::kBool};
    by_bools.mask_batch_stride = keys;
    by_sums.mask = {added.data(), 0, 0, 1, MaskKind::kF32};
    by_sums.mask_batch_stride = keys;
    Tokens want = run(by_starts, 2);
    EXPECT_EQ(run(by_bools, 2).memory, want.memory);
    EXPECT_EQ(run(by_sums, 3).memory, want.memory);
    for (int64_t b = 0; b < batch; ++b) {
      AttentionCall alone = padded.call();
      alone.batch = 1;
      alone.q = padded.q.at(b, 0, 0);
      alone.k = padded.k.at(b, 0, starts[b]);
      alone.v = padded.v.at(b, 0, starts[b]);
      alone.keys = keys - starts[b];
      Tokens got = run(alone);
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t i = 0; i < queries; ++i) EXPECT_EQ(got.bytes(0, h, i), want.bytes(b, h, i)) << b << " " << i;
    }
  }
}

// Each query and each head starts at a key of its own, far from its neighbours': the tile goes through the kernel in
// parts.
TEST(AttentionEngine, RowsWhoseFirstKeysLieFarApart) {
  Random random(15);
  const int64_t keys = 900, queries = 6, heads = 4;
  Operands operands(random, kKinds[0], 1, heads, 1, queries, keys, 16, 16);
  std::vector<uint8_t> allowed(size_t(heads * queries * keys), 0);
  auto first = [&](int64_t h, int64_t i) { return (h * 210 + i * 37) % 800; };
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t i = 0; i < queries; ++i)
      for (int64_t key = first(h, i); key < keys - i; ++key) allowed[size_t((h * queries + i) * keys + key)] = 1;
  AttentionCall call = operands.call();
  call.causal = false;
  call.mask = {allowed.data(), queries * keys, keys, 1, MaskKind::kBool};
  Tokens want = run(call);
  EXPECT_EQ(run(call, 3).memory, want.memory);
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t i = 0; i < queries; ++i) {
      AttentionCall one = operands.call();
      one.causal = false;
      one.heads = one.queries = 1;
      one.q = operands.q.at(0, h, i);
      one.k = operands.k.at(0, 0, first(h, i));
      one.v = operands.v.at(0, 0, first(h, i));
      one.keys = keys - i - first(h, i);
      EXPECT_EQ(run(one).memory, std::vector<char>(want.at(0, h, i), want.at(0, h, i) + 16 * 4)) << h << " " << i;
    }
}

TEST(AttentionEngine, RowsWithoutKeysAreExactlyZero) {
  Random random(16);
  Operands operands(random, kKinds[1], 1, 2, 1, 5, 3, 16, 16);
  for (int threads : {1, 2}) {
    Tokens out = run(operands.call(), threads);  // queries 0 and 1 stand before the first key
    for (int64_t h = 0; h < 2; ++h)
      for (int64_t i = 0; i < 5; ++i) EXPECT_EQ(out.bytes(0, h, i) == std::string(32, '\0'), i < 2) << i;
    AttentionCall empty = operands.call();
    empty.keys = 0;
    empty.k = empty.v = nullptr;
    EXPECT_EQ(run(empty, threads).memory, std::vector<char>(2 * 5 * 16 * 2, 0));
  }
}

TEST(AttentionEngine, DecodingAllocatesNothingOnceItRuns) {
  Random random(17);
  Operands operands(random, kKinds[1], 1, 4, 2, 1, 3000, 64, 64);
  const AttentionCall call = operands.call();
  for (int threads : {1, 2}) {
    run(call, threads);
    run(call, threads);
    const int64_t before = scratch_allocations();
    for (int i = 0; i < 5; ++i) run(call, threads);
    EXPECT_EQ(scratch_allocations(), before);
  }
}

}  // namespace
}  // namespace tle::test
