#include "csrc/engine/attention.h"

#include <algorithm>

#include "csrc/kernels/tables.h"

namespace tle {

namespace {

// Of blocks: few enough that memory is read in long streams, enough that the last one to finish keeps the others
// waiting only briefly.
constexpr int64_t kUnitsPerMember = 8;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

const void* offset(const void* p, int64_t elements, DType t) {
  return p ? static_cast<const char*>(p) + elements * dtype_size(t) : nullptr;
}
void* offset(void* p, int64_t elements, DType t) { return static_cast<char*>(p) + elements * dtype_size(t); }

// Tiles of `heads` heads x `queries` queries of one key/value head.
struct AttentionStage {
  AttentionCall call;
  AttentionFn* attention;
  AttentionMergeFn* merge;
  int64_t group;           // query heads per key/value head
  int64_t heads, queries;  // of a tile
  int64_t head_tiles, query_tiles, tiles;
  int64_t partials;        // 1: a tile is one unit and joins its blocks as it goes. Otherwise each block has its
  int64_t runs;            // result, and a unit is one of a tile's `runs` runs of neighbouring blocks.
  int64_t acc_stride, rows;
  // Results of units, [tiles or members][partials][rows]; a tile that is one unit needs them only while it runs.
  float *max, *sum, *acc;
  char* workspace;  // [members][workspace_bytes]
  int64_t workspace_bytes;
  // With a mask: the first and the last + 1 key of each row that it allows, [batch, mask_heads, queries].
  int64_t *mask_begin, *mask_end;
  int64_t mask_heads;
};

struct Tile {
  int64_t batch, kv_head, head, heads, query, queries;  // head: the first, of all heads
};

Tile tile_of(const AttentionStage& s, int64_t index) {
  Tile t;
  // The longest rows of a causal mask first, so that what is left at the end is short.
  const int64_t query_tile = s.query_tiles - 1 - index % s.query_tiles;
  index /= s.query_tiles;
  const int64_t head_tile = index % s.head_tiles;
  index /= s.head_tiles;
  t.kv_head = index % s.call.kv_heads;
  t.batch = index / s.call.kv_heads;
  t.head = t.kv_head * s.group + head_tile * s.heads;
  t.heads = std::min(s.heads, s.group - head_tile * s.heads);
  t.query = query_tile * s.queries;
  t.queries = std::min(s.queries, s.call.queries - t.query);
  return t;
}

struct Range {
  int64_t begin, end;
};

int64_t keys_of(const AttentionCall& c) { return c.keys_now != nullptr ? *c.keys_now : c.keys; }

// The keys that causality, window and starts leave to a query.
Range range_of(const AttentionCall& c, int64_t batch, int64_t query) {
  const int64_t keys = keys_of(c);
  Range r;
  r.end = std::clamp<int64_t>(c.causal ? keys - c.queries + query + 1 : keys, 0, keys);
  r.begin = c.starts ? c.starts[batch] : 0;
  if (c.window > 0) r.begin = std::max(r.begin, r.end - c.window);
  return r;
}

bool allowed(const AttentionMask& m, int64_t i) {
  switch (m.kind) {
    case MaskKind::kNone: return true;
    case MaskKind::kBool: return static_cast<const uint8_t*>(m.data)[i] != 0;
    case MaskKind::kF32: return static_cast<const uint32_t*>(m.data)[i] != 0xFF800000u;
    case MaskKind::kBF16: return static_cast<const uint16_t*>(m.data)[i] != 0xFF80u;
    case MaskKind::kF16: return static_cast<const uint16_t*>(m.data)[i] != 0xFC00u;
  }
  return true;
}

// Narrows the ranges of one query (of one head, if the mask differs between heads) to what the mask allows.
void scan_mask(const AttentionStage& s, int64_t unit, int) {
  const AttentionCall& c = s.call;
  const int64_t query = unit % c.queries, head = unit / c.queries % s.mask_heads;
  const int64_t batch = unit / c.queries / s.mask_heads;
  Range r = range_of(c, batch, query);
  const int64_t row = batch * c.mask_batch_stride + head * c.mask.head_stride + query * c.mask.query_stride;
  while (r.begin < r.end && !allowed(c.mask, row + r.begin * c.mask.key_stride)) ++r.begin;
  while (r.begin < r.end && !allowed(c.mask, row + (r.end - 1) * c.mask.key_stride)) --r.end;
  s.mask_begin[unit] = r.begin;
  s.mask_end[unit] = r.end;
}

// The smallest interval with all points that were added.
struct Span {
  int64_t low = INT64_MAX, high = INT64_MIN;
  void add(int64_t x) {
    low = std::min(low, x);
    high = std::max(high, x);
  }
  int64_t length() const { return low > high ? 0 : high - low; }
};

// Calls the kernel for blocks first .. last - 1 of the tile's rows. Rows whose first keys lie far apart (which only an
// arbitrary mask makes) go in several calls.
void run_tile(const AttentionStage& s, const Tile& t, int64_t first, int64_t last, float* max, float* sum, float* acc,
              int member) {
  const AttentionCall& c = s.call;
  int64_t begin[kAttentionRows], end[kAttentionRows];
  for (int64_t i = 0; i < t.queries; ++i) {
    const Range r = range_of(c, t.batch, t.query + i);
    for (int64_t h = 0; h < t.heads; ++h) {
      const int64_t row = i * t.heads + h;
      begin[row] = r.begin;
      end[row] = r.end;
      if (s.mask_begin != nullptr) {
        const int64_t head = s.mask_heads == 1 ? 0 : t.head + h;
        const int64_t at = (t.batch * s.mask_heads + head) * c.queries + t.query + i;
        begin[row] = s.mask_begin[at];
        end[row] = s.mask_end[at];
      }
    }
  }

  AttentionArgs a = {};
  a.k = offset(c.k, t.batch * c.k_strides.batch + t.kv_head * c.k_strides.head, c.kv_dtype);
  a.v = offset(c.v, t.batch * c.v_strides.batch + t.kv_head * c.v_strides.head, c.kv_dtype);
  a.workspace = s.workspace + member * s.workspace_bytes;
  a.d = c.d;
  a.dv = c.dv;
  a.q_head_stride = c.q_strides.head;
  a.q_query_stride = c.q_strides.token;
  a.k_stride = c.k_strides.token;
  a.v_stride = c.v_strides.token;
  a.acc_stride = s.acc_stride;
  a.first_block = first;
  a.last_block = last;
  a.scale = c.scale;
  a.softcap = c.softcap;
  a.dtype = c.dtype;
  a.kv_dtype = c.kv_dtype;
  a.mask = c.mask;
  const int64_t mask_size = c.mask.kind == MaskKind::kBool ? 1 : c.mask.kind == MaskKind::kF32 ? 4 : 2;

  auto run = [&](int64_t query, int64_t queries, int64_t head, int64_t heads) {
    const int64_t row = query * t.heads + head;
    a.q = offset(c.q, t.batch * c.q_strides.batch + (t.head + head) * c.q_strides.head +
                          (t.query + query) * c.q_strides.token, c.dtype);
    if (c.mask.kind != MaskKind::kNone)
      a.mask.data = static_cast<const char*>(c.mask.data) +
                    mask_size * (t.batch * c.mask_batch_stride + (t.head + head) * c.mask.head_stride +
                                 (t.query + query) * c.mask.query_stride);
    a.begin = begin + row;
    a.end = end + row;
    a.max = max + row;
    a.sum = sum + row;
    a.acc = acc + row * s.acc_stride;
    a.heads = heads;
    a.queries = queries;
    s.attention(a);
  };

  for (int64_t query = 0; query < t.queries;) {
    Span span;
    int64_t until = query;
    for (; until < t.queries; ++until) {
      Span wider = span;
      for (int64_t row = until * t.heads; row < (until + 1) * t.heads; ++row)
        if (begin[row] < end[row]) wider.add(begin[row]);
      if (wider.length() > kAttentionSpread) break;
      span = wider;
    }
    if (until > query) {
      run(query, until - query, 0, t.heads);
      query = until;
    } else {
      for (int64_t head = 0; head < t.heads; ++head) run(query, 1, head, 1);
      ++query;
    }
  }
}

void finish_tile(const AttentionStage& s, const Tile& t, float* max, float* sum, float* acc) {
  const AttentionCall& c = s.call;
  AttentionMergeArgs a = {};
  a.max = max;
  a.sum = sum;
  a.acc = acc;
  a.sinks = offset(c.sinks, t.head, c.sinks_dtype);
  a.out = offset(c.out, t.batch * c.out_strides.batch + t.head * c.out_strides.head + t.query * c.out_strides.token,
                 c.dtype);
  a.partials = s.partials;
  a.heads = t.heads;
  a.queries = t.queries;
  a.dv = c.dv;
  a.partial_stride = s.rows;
  a.acc_stride = s.acc_stride;
  a.out_head_stride = c.out_strides.head;
  a.out_query_stride = c.out_strides.token;
  a.sinks_dtype = c.sinks_dtype;
  a.dtype = c.dtype;
  s.merge(a);
}

void whole_tile(const AttentionStage& s, int64_t unit, int member) {
  const Tile t = tile_of(s, unit);
  float *max = s.max + member * s.rows, *sum = s.sum + member * s.rows, *acc = s.acc + member * s.rows * s.acc_stride;
  run_tile(s, t, 0, ceil_div(keys_of(s.call), kAttentionBlock), max, sum, acc, member);
  finish_tile(s, t, max, sum, acc);
}

void run_of_blocks(const AttentionStage& s, int64_t unit, int member) {
  // Equally long runs, so that equal numbers of units are equal work: no short one at the end of each tile.
  const int64_t tile = unit / s.runs, run = unit % s.runs;
  const int64_t first = run * s.partials / s.runs, last = (run + 1) * s.partials / s.runs;
  const Tile t = tile_of(s, tile);
  for (int64_t block = first; block < last; ++block) {
    const int64_t at = (tile * s.partials + block) * s.rows;
    run_tile(s, t, block, block + 1, s.max + at, s.sum + at, s.acc + at * s.acc_stride, member);
  }
}

void merge_blocks(const AttentionStage& s, int64_t unit, int) {
  const int64_t at = unit * s.partials * s.rows;
  finish_tile(s, tile_of(s, unit), s.max + at, s.sum + at, s.acc + at * s.acc_stride);
}

}  // namespace

UnitShape add_attention(Program& program, const AttentionCall& call, bool following) {
  const AttentionCall& c = call;
  if (c.batch == 0 || c.heads == 0 || c.queries == 0) return {};
  AttentionStage s = {};
  s.call = c;
  s.attention = attention_table.get();
  s.merge = attention_merge_table.get();
  s.group = c.heads / c.kv_heads;
  s.heads = std::min(s.group, kAttentionRows);
  s.queries = std::min(c.queries, kAttentionRows / s.heads);
  s.rows = s.heads * s.queries;
  s.head_tiles = ceil_div(s.group, s.heads);
  s.query_tiles = ceil_div(c.queries, s.queries);
  s.tiles = c.batch * c.kv_heads * s.head_tiles * s.query_tiles;
  s.acc_stride = ceil_div(c.dv, 16) * 16;
  s.workspace_bytes = ceil_div(attention_workspace(s.rows, c.d, c.dv), 64) * 64;
  s.workspace = program.scratch<char>(program.members() * s.workspace_bytes);

  // Blocks that a row can have: with a window, it is as long as the window at most.
  const int64_t longest = c.window > 0 ? std::min(c.window, c.keys) : c.keys;
  const bool split = program.members() > 1 && s.tiles < 4 * program.members();
  s.partials = split ? std::max<int64_t>(1, ceil_div(longest, kAttentionBlock)) : 1;
  s.runs = ceil_div(s.partials, std::max<int64_t>(1, s.tiles * s.partials / (kUnitsPerMember * program.members())));
  const int64_t results = (s.partials > 1 ? s.tiles * s.partials : program.members()) * s.rows;
  s.max = program.scratch<float>(results);
  s.sum = program.scratch<float>(results);
  s.acc = program.scratch<float>(results * s.acc_stride);

  if (c.mask.kind != MaskKind::kNone) {
    s.mask_heads = c.mask.head_stride == 0 ? 1 : c.heads;
    const int64_t rows = c.batch * s.mask_heads * c.queries;
    s.mask_begin = program.scratch<int64_t>(rows);
    s.mask_end = program.scratch<int64_t>(rows);
    program.add(s, rows, rows * c.keys, scan_mask);
  }
  const int64_t bytes = c.batch * c.kv_heads * c.keys * (c.d + c.dv) * dtype_size(c.kv_dtype) *
                        ceil_div(s.group * c.queries, 8);
  const bool by_head = c.queries == 1 && s.head_tiles == 1;  // a tile is a batch row's key head
  if (s.partials > 1) {
    program.add(s, s.tiles * s.runs, bytes, run_of_blocks);
    program.add(s, s.tiles, 0, merge_blocks);
  } else if (following && by_head && c.mask.kind == MaskKind::kNone && program.can_follow(s.tiles)) {
    program.follow(s, bytes, whole_tile);
  } else {
    program.add(s, s.tiles, bytes, whole_tile);
  }
  return by_head ? UnitShape{1, s.group * c.dv} : UnitShape{};
}

}  // namespace tle
