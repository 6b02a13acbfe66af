// attention on the 16 canonical lanes; include after one of common/lanes_*.h and after
//
//   kGroup                   rows that go through both products together
//   Slice, kSliceLanes       the lanes that a tile of q k goes through before the others, with load_slice<T>(p),
//                            zero_slice(), fma and store
//   kDotRows, kDotKeys[r]    that tile: r = 1 .. kDotRows rows x kDotKeys[r] keys, whose slices fit in registers;
//                            kDotKeys[r] divides 16
//   kValueLanes[r]           the tile of p v: r = 1 .. kGroup rows x kValueLanes[r] x 16 columns
//   kStreamRows              rows of that tile at most where values come from memory and it does not span them
//   kDirectRows              with more rows than this, 16-bit keys and values are widened once into a buffer
//   kJoinsKeys               a slice is all lanes, and those of a tile of 4 keys are joined (join_4) before the next
//                            tile, which saves storing them; keys are then read 32 elements at a time
//   load_2<T>(p, to)         p[0 .. 15], p[16 .. 31]
//
// A block of keys goes through three passes: scores of all rows, softmax row by row, and the weighted sum of the
// values. The scores lie in [rows][kScoreStride], one column for each key of the block of any row (rows may start at
// different keys). A key that is none of the row's, or that is skipped, gets the weight kSkipped: the values of a group
// of rows are multiplied without looking where every row has every key, and row by row elsewhere.
#pragma once

#include "csrc/kernels/attention/attention.h"
#include "csrc/kernels/attention/merge_lanes.h"
#include "csrc/kernels/common/prefetch.h"
#include "csrc/kernels/common/registers.h"

namespace tle {
namespace {

constexpr int64_t kScoreStride = kAttentionBlock + kAttentionSpread + 64;
constexpr int64_t kSubBlock = 64;  // keys or values that are widened, or stay in the first cache, at a time
constexpr float kSkipped = -1.0f;  // no exp is negative
// Several rows use a line more slowly than one row does: then what the hardware prefetches by itself is too little.
// Into the second cache, because the first has too few lines in flight: half as fast. Each line: with every second one
// it is 15 % slower. How far ahead matters little for 16-bit slots (Zen 4, one thread, 2 rows of 128, 3 and 4 rows of
// 64: 75, 78 and 66 % of the bandwidth, and 74, 76 and 62 % with 16 KiB); int8 ones are read a fifth more slowly with
// 8 KiB.
template <DType T>
constexpr int64_t kPrefetchBytes = T == DType::kI8 ? 16 * 1024 : 8 * 1024;
constexpr float kLane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

static inline int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

// [rows, d] in fp32, each row padded with zeros to whole lanes.
template <DType T>
static inline void widen(const typename Element<T>::type* from, int64_t stride, int64_t rows, int64_t d, float* to) {
  const int64_t whole = d / 16 * 16, padded = (d + 15) / 16 * 16;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < whole; i += 16) store(to + r * padded + i, load_as<T>(from + r * stride, i));
    if (whole < d) store(to + r * padded + whole, load_tail<T>(from + r * stride, whole, d - whole));
  }
}

// What a loop over keys prefetches: cache lines first .. last - 1 of the row that lies kPrefetchBytes ahead of each of
// its own. The lines of a row are shared out among those who go over the same keys, because a processor drops
// prefetches that come too many at a time.
struct Ahead {
  const char* rows;
  int64_t stride;  // bytes
  int64_t first, last;

  void fetch(int64_t row) const { prefetch_lines(rows + row * stride + 64 * first, last - first); }
  // The part of one among `count` equal ones.
  Ahead share(int64_t index, int64_t count) const {
    return {rows, stride, first + (last - first) * index / count, first + (last - first) * (index + 1) / count};
  }
  Ahead from(int64_t row) const { return {rows + row * stride, stride, first, last}; }
};

// rows: `count` of n elements of T, `stride` elements apart. Where there are not so many, nothing is fetched.
template <DType T>
static inline Ahead ahead_of(const typename Element<T>::type* rows, int64_t stride, int64_t n, int64_t count) {
  constexpr int64_t kSize = int64_t(sizeof(typename Element<T>::type));
  const int64_t bytes = stride * kSize;
  const int64_t distance = bytes > 0 && bytes < kPrefetchBytes<T> ? kPrefetchBytes<T> / bytes : 1;
  if (count <= distance) return {};
  // A row that begins within a line ends in one more. Without that one, int8 of 64 + 4 bytes are read 20 % more slowly.
  const int64_t lines = (n * kSize + 63) / 64 + (bytes % 64 != 0);
  return {reinterpret_cast<const char*>(rows + distance * stride), bytes, 0, lines};
}

// The dot products of kRows rows with 16 keys, d padded to whole lanes.
template <DType T, int kRows>
static inline void dot_16_keys(const float* q, const typename Element<T>::type* k, int64_t k_stride, int64_t d,
                               float* scores, const Ahead& ahead) {
  if constexpr (kRows > kDotRows) {
    dot_16_keys<T, kDotRows>(q, k, k_stride, d, scores, ahead.share(0, 2));
    dot_16_keys<T, kRows - kDotRows>(q + kDotRows * d, k, k_stride, d, scores + kDotRows * kScoreStride,
                                     ahead.share(1, 2));
  } else {
    constexpr int kKeys = kDotKeys[kRows];
    if constexpr (kJoinsKeys) {
      static_assert(kKeys == 4 && kSliceLanes == 16);
      f32x16 joined[kRows][4];
      for (int first = 0; first < 16; first += 4) {
        f32x16 acc[kRows][4];
        TLE_UNROLL for (int r = 0; r < kRows; ++r)
          TLE_UNROLL for (int j = 0; j < 4; ++j) acc[r][j] = zero_slice();
        for (int j = 0; j < 4; ++j) ahead.fetch(first + j);
        int64_t i = 0;
        for (; i + 32 <= d; i += 32) {
          f32x16 keys[4][2];
          TLE_UNROLL for (int j = 0; j < 4; ++j) load_2<T>(k + (first + j) * k_stride + i, keys[j]);
          TLE_UNROLL for (int half = 0; half < 2; ++half)
            TLE_UNROLL for (int r = 0; r < kRows; ++r) {
              const f32x16 query = load(q + r * d + i + 16 * half);
              TLE_UNROLL for (int j = 0; j < 4; ++j) acc[r][j] = fma(query, keys[j][half], acc[r][j]);
            }
        }
        for (; i < d; i += 16) {
          f32x16 keys[4];
          TLE_UNROLL for (int j = 0; j < 4; ++j) keys[j] = load_slice<T>(k + (first + j) * k_stride + i);
          TLE_UNROLL for (int r = 0; r < kRows; ++r) {
            const f32x16 query = load(q + r * d + i);
            TLE_UNROLL for (int j = 0; j < 4; ++j) acc[r][j] = fma(query, keys[j], acc[r][j]);
          }
        }
        TLE_UNROLL for (int r = 0; r < kRows; ++r) joined[r][first / 4] = join_4(acc[r]);
      }
      for (int r = 0; r < kRows; ++r) store(scores + r * kScoreStride, reduce_joined(joined[r]));
    } else {
      alignas(64) float lanes[kRows][16][16];  // of each key
      for (int first = 0; first < 16; first += kKeys) {
        for (int j = 0; j < kKeys; ++j) ahead.fetch(first + j);
        for (int lane = 0; lane < 16; lane += kSliceLanes) {
          Slice acc[kRows][kKeys];
          TLE_UNROLL for (int r = 0; r < kRows; ++r)
            TLE_UNROLL for (int j = 0; j < kKeys; ++j) acc[r][j] = zero_slice();
          for (int64_t i = lane; i < d; i += 16) {
            Slice queries[kRows];
            TLE_UNROLL for (int r = 0; r < kRows; ++r) queries[r] = load_slice<DType::kF32>(q + r * d + i);
            TLE_UNROLL for (int j = 0; j < kKeys; ++j) {
              const Slice key = load_slice<T>(k + (first + j) * k_stride + i);
              TLE_UNROLL for (int r = 0; r < kRows; ++r) acc[r][j] = fma(queries[r], key, acc[r][j]);
            }
          }
          TLE_UNROLL for (int r = 0; r < kRows; ++r)
            TLE_UNROLL for (int j = 0; j < kKeys; ++j) store(lanes[r][first + j] + lane, acc[r][j]);
        }
      }
      for (int r = 0; r < kRows; ++r) {
        f32x16 of_keys[16];
        TLE_UNROLL for (int j = 0; j < 16; ++j) of_keys[j] = load(lanes[r][j]);
        store(scores + r * kScoreStride, reduce_add_16(of_keys));
      }
    }
  }
}

// The same for the columns first .. last - 1 of the scores, 16 at a time. k, scores, ahead: of column 0.
template <DType T, int kRows>
static inline void dot_keys(const float* q, const typename Element<T>::type* k, int64_t k_stride, int64_t d,
                            int64_t first, int64_t last, float* scores, const Ahead& ahead) {
  for (int64_t i = first; i < last; i += 16)
    dot_16_keys<T, kRows>(q, k + i * k_stride, k_stride, d, scores + i, ahead.from(i));
}

// Columns of the scores: of a group, those that any of its rows has and those that all have (core); of a kernel's call,
// all.
struct Columns {
  int64_t low, high, core_low, core_high;
};

// acc[r][column] += p[r][i] v[i][column] for the columns i of the scores in low .. high - 1, increasing. All rows have
// those of the core.
template <DType T, int kRows, int kLanes>
static inline void add_values_tile(const float* p, const typename Element<T>::type* v, int64_t v_stride, int64_t low,
                                   int64_t core_low, int64_t core_high, int64_t high, float* acc, int64_t acc_stride,
                                   const Ahead& ahead) {
  f32x16 sum[kRows][kLanes];
  TLE_UNROLL for (int r = 0; r < kRows; ++r)
    TLE_UNROLL for (int c = 0; c < kLanes; ++c) sum[r][c] = load(acc + r * acc_stride + 16 * c);
  auto some_rows = [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      TLE_UNROLL for (int r = 0; r < kRows; ++r) {
        const float weight = p[r * kScoreStride + i];
        if (weight < 0.0f) continue;
        TLE_UNROLL for (int c = 0; c < kLanes; ++c)
          sum[r][c] = fma(set1(weight), load_as<T>(v + i * v_stride, 16 * c), sum[r][c]);
      }
    }
  };
  some_rows(low, core_low);
  for (int64_t i = core_low; i < core_high; ++i) {
    ahead.fetch(i);
    f32x16 values[kLanes];
    if constexpr (kLanes % 2 == 0) {
      TLE_UNROLL for (int c = 0; c < kLanes; c += 2) load_2<T>(v + i * v_stride + 16 * c, values + c);
    } else {
      TLE_UNROLL for (int c = 0; c < kLanes; ++c) values[c] = load_as<T>(v + i * v_stride, 16 * c);
    }
    TLE_UNROLL for (int r = 0; r < kRows; ++r) {
      const f32x16 weight = set1(p[r * kScoreStride + i]);
      TLE_UNROLL for (int c = 0; c < kLanes; ++c) sum[r][c] = fma(weight, values[c], sum[r][c]);
    }
  }
  some_rows(core_high, high);
  TLE_UNROLL for (int r = 0; r < kRows; ++r)
    TLE_UNROLL for (int c = 0; c < kLanes; ++c) store(acc + r * acc_stride + 16 * c, sum[r][c]);
}

// All dv columns (padded to whole lanes): the widest tile, then narrower ones for what remains. The first prefetches.
template <DType T, int kRows, int kLanes>
static inline void add_values(const float* p, const typename Element<T>::type* v, int64_t v_stride, const Columns& c,
                              int64_t first, int64_t last, float* acc, int64_t dv, int64_t from, Ahead ahead) {
  const int64_t low = at_least(c.low, first), high = at_most(c.high, last);
  const int64_t core_low = at_most(at_least(c.core_low, low), high);
  const int64_t core_high = at_most(at_least(c.core_high, core_low), high);
  for (; from + 16 * kLanes <= dv; from += 16 * kLanes, ahead = {})
    add_values_tile<T, kRows, kLanes>(p, v + from, v_stride, low, core_low, core_high, high, acc + from, dv, ahead);
  if constexpr (kLanes > 1) add_values<T, kRows, kLanes / 2>(p, v, v_stride, c, first, last, acc, dv, from, ahead);
}

// The same with values that stream from memory: rows of v that a tile does not span are used up at once by a few of
// the group's rows, rather than in parts that lie apart, because memory is fastest in one stream.
template <DType T, int kRows>
static inline void stream_values(const float* p, const typename Element<T>::type* v, int64_t v_stride, const Columns& c,
                                 int64_t first, int64_t last, float* acc, int64_t dv, const Ahead& ahead) {
  if constexpr (kRows > kStreamRows) {
    if (dv > 16 * kValueLanes[kRows]) {
      stream_values<T, kStreamRows>(p, v, v_stride, c, first, last, acc, dv, ahead.share(0, 2));
      return stream_values<T, kRows - kStreamRows>(p + kStreamRows * kScoreStride, v, v_stride, c, first, last,
                                                   acc + kStreamRows * dv, dv, ahead.share(1, 2));
    }
  }
  add_values<T, kRows, kValueLanes[kRows]>(p, v, v_stride, c, first, last, acc, dv, 0, ahead);
}

// What the mask adds to n scores: -inf where the key is not allowed. i: the mask's element for the first key.
template <class E, class Convert>
static inline void mask_bias_as(const void* mask, int64_t i, int64_t stride, int64_t n, float* bias, Convert convert) {
  const E* from = static_cast<const E*>(mask) + i;
  for (int64_t key = 0; key < n; key += 16) {
    E elements[16] = {};
    const int64_t count = at_most(16, n - key);
    if (stride == 1) memcpy(elements, from + key, size_t(count) * sizeof(E));
    else for (int64_t j = 0; j < count; ++j) elements[j] = from[(key + j) * stride];
    convert(elements, bias + key);
  }
}

static inline void mask_bias(const AttentionMask& mask, int64_t i, int64_t n, float* bias) {
  switch (mask.kind) {
    case MaskKind::kNone: return;
    case MaskKind::kBool:
      return mask_bias_as<uint8_t>(mask.data, i, mask.key_stride, n, bias, [](const uint8_t* from, float* to) {
        for (int j = 0; j < 16; ++j) to[j] = from[j] ? 0.0f : -INFINITY;
      });
    case MaskKind::kF32:
      return mask_bias_as<float>(mask.data, i, mask.key_stride, n, bias,
                                 [](const float* from, float* to) { store(to, load(from)); });
    case MaskKind::kBF16:
      return mask_bias_as<uint16_t>(mask.data, i, mask.key_stride, n, bias,
                                    [](const uint16_t* from, float* to) { store(to, load_bf16(from)); });
    case MaskKind::kF16:
      return mask_bias_as<uint16_t>(mask.data, i, mask.key_stride, n, bias,
                                    [](const uint16_t* from, float* to) { store(to, load_f16(from)); });
  }
}

struct RowSum {
  float max, sum;  // sum 0: no keys
  bool skips;      // some of the keys are skipped
};

// scales[i]: the scale that lies behind the n codes of the i-th of `count` slots.
static inline void slot_scales(const int8_t* slots, int64_t stride, int64_t n, int64_t count, float* scales) {
  for (int64_t i = 0; i < count; ++i) memcpy(scales + i, slots + i * stride + n, sizeof(float));
}

// n > 0 dot products become the weights p; where a key is skipped, and behind the last key up to whole lanes, kSkipped.
// bias: what the mask adds, or null. key_scales, value_scales: of int8 keys and values, or null; what is stored is then
// p times its value's scale, while the sum is that of p.
static inline RowSum softmax_row(float* s, int64_t n, float scale, float softcap, const float* bias,
                                 const float* key_scales, const float* value_scales) {
  const f32x16 minus_infinity = set1(-INFINITY), lane = load(kLane);
  f32x16 max = minus_infinity, min = zero();
  for (int64_t i = 0; i < n; i += 16) {
    f32x16 x = load(s + i);
    if (key_scales != nullptr) x = mul(x, load(key_scales + i));
    x = mul(x, set1(scale));
    if (softcap > 0.0f) {
      const f32x16 y = div(x, set1(softcap)), t = exp(mul(set1(-2.0f), abs(y)));
      x = mul(set1(softcap), copy_sign(div(sub(set1(1.0f), t), add(set1(1.0f), t)), y));
    }
    if (bias != nullptr) {
      const f32x16 added = load(bias + i);
      x = select_equal(added, minus_infinity, added, add(x, added));
    }
    f32x16 low = x;
    if (n - i < 16) {
      const f32x16 left = set1(float(n - i));
      x = select_less(lane, left, x, minus_infinity);
      low = select_less(lane, left, low, zero());
    }
    max = max_gt(x, max);
    min = min_lt(low, min);
    store(s + i, x);
  }
  float maxima[16], minima[16];
  store(maxima, max);
  store(minima, min);
  RowSum row = {-INFINITY, 0.0f, false};
  for (int j = 0; j < 16; ++j) {
    row.max = maxima[j] > row.max ? maxima[j] : row.max;
    row.skips = row.skips || minima[j] == -INFINITY;
  }
  if (row.max == -INFINITY) {
    // Every score is -inf or NaN. Without a NaN the row has no keys here.
    bool any = false;
    for (int64_t i = 0; i < n; ++i) any = any || s[i] != -INFINITY;
    if (!any) {
      for (int64_t i = 0; i < n; i += 16) store(s + i, set1(kSkipped));
      return row;
    }
  }
  const f32x16 m = set1(row.max);
  f32x16 sum = zero();
  for (int64_t i = 0; i < n; i += 16) {
    const f32x16 x = load(s + i);
    const f32x16 p = exp(sub(x, m));  // +0 for a skipped key: adds nothing
    sum = add(sum, p);
    const f32x16 weight = value_scales != nullptr ? mul(p, load(value_scales + i)) : p;
    store(s + i, select_equal(x, minus_infinity, set1(kSkipped), weight));
  }
  row.sum = reduce_add(sum);
  return row;
}

// One call with keys and values of type T: the buffers of its workspace, and where each row's keys of the current block
// lie among the columns.
template <DType T>
struct AttentionTile {
  using E = typename Element<T>::type;

  explicit AttentionTile(const AttentionArgs& args)
      : a(args),
        rows(args.heads * args.queries),
        d((args.d + 15) / 16 * 16),
        dv((args.dv + 15) / 16 * 16),
        wide_keys(args.d != d || (T != DType::kF32 && rows > kDirectRows)),
        wide_values(args.dv != dv || (T != DType::kF32 && rows > kDirectRows)),
        q(static_cast<float*>(args.workspace)),
        scores(q + rows * d),
        block_acc(scores + rows * kScoreStride),
        keys(block_acc + rows * dv),
        values(keys + kSubBlock * d),
        bias(values + kSubBlock * dv),
        key_scales(bias + kScoreStride),
        value_scales(key_scales + kScoreStride) {}

  const E* k(int64_t column) const { return static_cast<const E*>(a.k) + (first_key + column) * a.k_stride; }
  const E* v(int64_t column) const { return static_cast<const E*>(a.v) + (first_key + column) * a.v_stride; }

  // Sets the columns for block b. False: no row has keys there.
  bool place(int64_t b) {
    first_key = INT64_MAX;
    int64_t last_key = INT64_MIN, end = 0;
    for (int64_t r = 0; r < rows; ++r) {
      low[r] = a.begin[r] + b * kAttentionBlock;
      high[r] = at_most(low[r] + kAttentionBlock, a.end[r]);
      if (low[r] >= high[r]) continue;
      first_key = at_most(first_key, low[r]);
      last_key = at_least(last_key, high[r]);
      end = at_least(end, a.end[r]);
    }
    if (first_key >= last_key) return false;
    columns = last_key - first_key;
    for (int64_t r = 0; r < rows; ++r) {
      low[r] -= first_key;
      high[r] -= first_key;
    }
    keys_ahead = ahead_of<T>(k(0), a.k_stride, a.d, end - first_key);
    values_ahead = ahead_of<T>(v(0), a.v_stride, a.dv, end - first_key);
    return true;
  }

  // One row uses memory as fast as it comes without prefetching.
  Ahead group_ahead(const Ahead& ahead, int64_t row) const {
    return rows == 1 ? Ahead{} : ahead.share(row / kGroup, (rows + kGroup - 1) / kGroup);
  }

  Columns group_columns(int64_t first, int64_t count) const {
    Columns c = {INT64_MAX, INT64_MIN, INT64_MIN, INT64_MAX};
    for (int64_t r = first; r < first + count; ++r) {
      if (low[r] < high[r]) {
        c.low = at_most(c.low, low[r]);
        c.high = at_least(c.high, high[r]);
      }
      c.core_low = at_least(c.core_low, low[r]);
      c.core_high = at_most(c.core_high, high[r]);
    }
    return c;
  }

  // Columns that all rows go through before the next ones: a group that is alone needs nobody to find them in the first
  // cache again.
  int64_t sub_block() const { return rows > kGroup ? kSubBlock : kScoreStride; }

  // Whether the tile of p v has all columns of a value that comes from memory: then it is read once.
  bool spans_values() const {
    const int64_t most = at_most(rows, kGroup);
    return dv <= 16 * kValueLanes[most] || most > kStreamRows;
  }

  // wide: `keys` holds the columns from first on.
  template <int kRows>
  void group_scores(int64_t row, int64_t first, int64_t last, bool wide) const {
    const Columns c = group_columns(row, kRows);
    const int64_t low = at_least(c.low, first) / 16 * 16, high = at_most(c.high, last);
    float* to = scores + row * kScoreStride;
    const Ahead ahead = group_ahead(keys_ahead, row);
    if (wide) {
      dot_keys<DType::kF32, kRows>(q + row * d, keys - first * d, d, d, low, high, to, ahead);
    } else {
      dot_keys<T, kRows>(q + row * d, k(0), a.k_stride, d, low, high, to, ahead);
    }
  }

  void sub_block_scores(int64_t first, int64_t last, bool wide) const {
    int64_t row = 0;
    for (; row + kGroup <= rows; row += kGroup) group_scores<kGroup>(row, first, last, wide);
    switch (rows - row) {
      case 3: group_scores<3>(row, first, last, wide); break;
      case 2: group_scores<2>(row, first, last, wide); break;
      case 1: group_scores<1>(row, first, last, wide); break;
    }
  }

  void block_scores() const {
    if constexpr (T == DType::kI8) slot_scales(k(0), a.k_stride, a.d, columns, key_scales);
    // The last few keys are widened in any case, because the products take 16 at a time.
    const int64_t direct = wide_keys ? 0 : columns / 16 * 16;
    for (int64_t first = 0; first < direct; first += sub_block())
      sub_block_scores(first, at_most(first + sub_block(), direct), false);
    for (int64_t first = direct; first < columns; first += kSubBlock) {
      const int64_t last = at_most(first + kSubBlock, columns), padded = (last + 15) / 16 * 16;
      widen<T>(k(first), a.k_stride, last - first, a.d, keys);
      for (int64_t i = (last - first) * d; i < (padded - first) * d; i += 16) store(keys + i, zero());
      sub_block_scores(first, last, true);
    }
  }

  // Weights and sums of a group's rows; narrows the core if a row skips keys.
  void group_softmax(int64_t first, int64_t count, Columns& c) {
    for (int64_t r = first; r < first + count; ++r) {
      float* s = scores + r * kScoreStride;
      block_sums[r] = {-INFINITY, 0.0f, true};
      if (low[r] < high[r]) {
        const float* added = nullptr;
        if (a.mask.kind != MaskKind::kNone) {
          const int64_t at = r % a.heads * a.mask.head_stride + r / a.heads * a.mask.query_stride +
                             (first_key + low[r]) * a.mask.key_stride;
          // Heads that share their mask follow each other.
          if (at != bias_at || high[r] - low[r] != bias_count) mask_bias(a.mask, at, high[r] - low[r], bias);
          bias_at = at;
          bias_count = high[r] - low[r];
          added = bias;
        }
        constexpr bool kScaled = T == DType::kI8;
        block_sums[r] = softmax_row(s + low[r], high[r] - low[r], a.scale, a.softcap, added,
                                    kScaled ? key_scales + low[r] : nullptr, kScaled ? value_scales + low[r] : nullptr);
        for (int64_t i = c.low; i < low[r]; ++i) s[i] = kSkipped;
        for (int64_t i = high[r]; i < c.high; ++i) s[i] = kSkipped;
      } else {
        for (int64_t i = c.low; i < c.high; ++i) s[i] = kSkipped;
      }
      if (block_sums[r].skips) c.core_high = c.core_low;
    }
  }

  template <int kRows>
  void group_values(int64_t row, const Columns& c, int64_t first, int64_t last) const {
    if (at_least(c.low, first) >= at_most(c.high, last)) return;
    const float* p = scores + row * kScoreStride;
    float* acc = block_acc + row * dv;
    const Ahead ahead = group_ahead(values_ahead, row);
    if (wide_values) {
      add_values<DType::kF32, kRows, kValueLanes[kRows]>(p, values - first * dv, dv, c, first, last, acc, dv, 0, ahead);
    } else {
      stream_values<T, kRows>(p, v(0), a.v_stride, c, first, last, acc, dv, ahead);
    }
  }

  void block_values() {
    if constexpr (T == DType::kI8) slot_scales(v(0), a.v_stride, a.dv, columns, value_scales);
    Columns of_group[kAttentionRows / kGroup + 1];
    for (int64_t row = 0; row < rows; row += kGroup) {
      const int64_t count = at_most(kGroup, rows - row);
      of_group[row / kGroup] = group_columns(row, count);
      group_softmax(row, count, of_group[row / kGroup]);
    }
    for (int64_t i = 0; i < rows * dv; i += 16) store(block_acc + i, zero());
    const int64_t step = wide_values || !spans_values() ? kSubBlock : sub_block();
    for (int64_t first = 0; first < columns; first += step) {
      const int64_t last = at_most(first + step, columns);
      if (wide_values) widen<T>(v(first), a.v_stride, last - first, a.dv, values);
      int64_t row = 0;
      for (; row + kGroup <= rows; row += kGroup) group_values<kGroup>(row, of_group[row / kGroup], first, last);
      switch (rows - row) {
        case 3: group_values<3>(row, of_group[row / kGroup], first, last); break;
        case 2: group_values<2>(row, of_group[row / kGroup], first, last); break;
        case 1: group_values<1>(row, of_group[row / kGroup], first, last); break;
      }
    }
  }

  void run() {
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t from = r % a.heads * a.q_head_stride + r / a.heads * a.q_query_stride;
      for (int64_t i = 0; i < a.d; i += 16) store(q + r * d + i, load_any(a.dtype, a.q, from + i, a.d - i));
      a.max[r] = -INFINITY;
      a.sum[r] = 0.0f;
    }
    for (int64_t b = a.first_block; b < a.last_block && place(b); ++b) {
      block_scores();
      block_values();
      for (int64_t r = 0; r < rows; ++r)
        merge_block(a.max + r, a.sum + r, a.acc + r * a.acc_stride, block_sums[r].max, block_sums[r].sum,
                    block_acc + r * dv, dv);
    }
    for (int64_t r = 0; r < rows; ++r)
      if (a.sum[r] == 0.0f)
        for (int64_t i = 0; i < dv; i += 16) store(a.acc + r * a.acc_stride + i, zero());
  }

  const AttentionArgs& a;
  const int64_t rows, d, dv;  // d, dv: rounded up to whole lanes
  const bool wide_keys, wide_values;
  float* const q;
  float* const scores;
  float* const block_acc;
  float* const keys;
  float* const values;
  float* const bias;
  float* const key_scales;
  float* const value_scales;
  int64_t first_key = 0, columns = 0;  // of the current block
  Ahead keys_ahead, values_ahead;
  int64_t low[kAttentionRows], high[kAttentionRows];
  RowSum block_sums[kAttentionRows];
  int64_t bias_at = -1, bias_count = 0;
};

static inline void attention_lanes(const AttentionArgs& a) {
  switch (a.kv_dtype) {
    case DType::kF32: return AttentionTile<DType::kF32>(a).run();
    case DType::kBF16: return AttentionTile<DType::kBF16>(a).run();
    case DType::kF16: return AttentionTile<DType::kF16>(a).run();
    case DType::kI8: return AttentionTile<DType::kI8>(a).run();
  }
}

}  // namespace
}  // namespace tle
