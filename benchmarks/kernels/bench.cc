// Times every row of the kernel tables that this CPU can run, through the engine and its team of threads, and holds
// each against its bound in the same run: one row of x against the machine's read bandwidth, many rows against the
// multiply-adds that the level's instructions reach in registers alone.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "benchmarks/kernels/peak.h"
#include "csrc/engine/attention.h"
#include "csrc/engine/linear.h"
#include "csrc/engine/sdot.h"
#include "csrc/kernels/tables.h"
#include "csrc/runtime/bandwidth.h"
#include "csrc/runtime/cpu.h"
#include "csrc/runtime/huge_pages.h"
#include "csrc/runtime/packed_weight.h"
#include "csrc/runtime/threads.h"

namespace tle::bench {
namespace {

struct Options {
  std::vector<int> threads = {1, 2};
  std::string op, isa, shape;  // "": all; the shape is a part of what is printed
  double seconds = 0.4;  // for each figure
  bool best = false;     // the fastest call instead of the median: for a machine that others use too
  bool quick = false;    // small buffers: shows that everything runs, the figures mean nothing
};
Options options;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double typical(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return options.best ? v[0] : v[v.size() / 2];
}

// Seconds of one call; `a` and `b` take turns, so that a change of the machine's speed meets both.
struct Pair {
  double a, b;
};
Pair time_in_turns(const std::function<void()>& a, const std::function<void()>& b) {
  std::vector<double> of_a, of_b;
  a();
  b();
  const double end = now() + options.seconds;
  do {
    const double t0 = now();
    a();
    const double t1 = now();
    b();
    of_a.push_back(t1 - t0);
    of_b.push_back(now() - t1);
  } while (now() < end || of_a.size() < 3);
  return {typical(of_a), typical(of_b)};
}

double time_of(const std::function<void()>& f) {
  return time_in_turns(f, [] {}).a;
}

// A chain of operations that each take one cycle. (Not additions: some CPUs do several of those at once when they
// rename registers.)
double gigahertz() {
  const int64_t steps = 200'000;
  std::vector<double> times;
  for (int repeat = 0; repeat < 500; ++repeat) {
    const double t = now();
    uint64_t x = 0;
    for (int64_t i = 0; i < steps; i += 10) {
#if defined(__x86_64__)
      __asm__ volatile(
          "xor $1, %0\n xor $1, %0\n xor $1, %0\n xor $1, %0\n xor $1, %0\n"
          "xor $1, %0\n xor $1, %0\n xor $1, %0\n xor $1, %0\n xor $1, %0\n"
          : "+r"(x));
#elif defined(__aarch64__)
      __asm__ volatile(
          "eor %0, %0, #1\n eor %0, %0, #1\n eor %0, %0, #1\n eor %0, %0, #1\n eor %0, %0, #1\n"
          "eor %0, %0, #1\n eor %0, %0, #1\n eor %0, %0, #1\n eor %0, %0, #1\n eor %0, %0, #1\n"
          : "+r"(x));
#endif
    }
    times.push_back(now() - t);
  }
  return double(steps) / *std::min_element(times.begin(), times.end()) * 1e-9;
}

int64_t last_level_cache() {
  int64_t kib = 0;
  for (int index = 0; index < 5; ++index) {
    const std::string path = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/size";
    if (FILE* f = fopen(path.c_str(), "r")) {
      int64_t value = 0;
      char unit = 'K';
      if (fscanf(f, "%ld%c", &value, &unit) >= 1) kib = std::max(kib, unit == 'M' ? value * 1024 : value);
      fclose(f);
    }
  }
  return kib > 0 ? kib * 1024 : int64_t(32) << 20;
}

// What is read must come from memory: eight times the last-level cache.
int64_t working_set() { return options.quick ? 1 << 20 : 8 * last_level_cache(); }

// In huge pages where the system has them, as weights and caches are.
struct Bytes {
  explicit Bytes(int64_t n)
      : size(n), data(static_cast<uint8_t*>(aligned_alloc(4096, size_t(n + 4095) / 4096 * 4096))) {
    advise_huge(data, n);
  }
  ~Bytes() { free(data); }
  Bytes(Bytes&& other) : size(other.size), data(std::exchange(other.data, nullptr)) {}
  int64_t size;
  uint8_t* data;
};

// The loop that does nothing but read.
void read_all(const uint8_t* data, int64_t bytes) { read_memory(data, bytes / 64 * 64, weight_hints_pay()); }

struct LevelPeak {
  Isa isa;
  PeakFn* int8;
  PeakFn* fp32;
};
const std::vector<LevelPeak>& peaks() {
  static const std::vector<LevelPeak> all = {
      TLE_X86({Isa::kAmx, int8_peak_amx, fp32_peak_avx512}, {Isa::kVnni, int8_peak_vnni, fp32_peak_avx512},
              {Isa::kAvx512, int8_peak_avx512, fp32_peak_avx512}, {Isa::kAvx2, int8_peak_avx2, fp32_peak_avx2}, )
      TLE_ARM({Isa::kI8mm, int8_peak_i8mm, fp32_peak_neon}, {Isa::kDotprod, int8_peak_dotprod, fp32_peak_neon},
              {Isa::kNeon, int8_peak_neon, fp32_peak_neon}, )
  };
  return all;
}

// Multiply-adds per second of one thread in registers; 0 where no such loop exists (the scalar reference).
double peak_of(Isa isa, bool int8) {
  for (const LevelPeak& p : peaks()) {
    if (p.isa != isa) continue;
    PeakFn* fn = int8 ? p.int8 : p.fp32;
    int64_t macs = 0;
    const double seconds = time_of([&] { macs = fn(20'000); });
    return double(macs) / seconds;
  }
  return 0.0;
}

double cycles_per_second;

// The headline of a figure. Columns: operator, level, shape, threads, time, rate, share of the bound.
void print_bandwidth(const char* op, Isa isa, const std::string& shape, int threads, double seconds, int64_t bytes,
                     double bound) {
  const double rate = double(bytes) / seconds;
  printf("%-14s %-8s %-42s %2d  %10.1f us  %7.2f GB/s   %5.1f %% of %.2f GB/s\n", op, isa_name(isa), shape.c_str(),
         threads, seconds * 1e6, rate * 1e-9, 100 * rate / bound, bound * 1e-9);
  fflush(stdout);
}

void print_macs(const char* op, Isa isa, const std::string& shape, int threads, double seconds, double macs,
                double peak) {
  const double per_cycle = macs / seconds / cycles_per_second;
  printf("%-14s %-8s %-42s %2d  %10.1f us  %7.2f MAC/cycle", op, isa_name(isa), shape.c_str(), threads, seconds * 1e6,
         per_cycle);
  const double bound = peak * threads;
  if (bound > 0) printf("  %5.1f %% of %.1f", 100 * macs / seconds / bound, bound / cycles_per_second);
  printf("\n");
  fflush(stdout);
}

std::mt19937 random_bits(1);

Bytes random_bytes(int64_t n) {
  Bytes b(n);
  for (int64_t i = 0; i + 4 <= n; i += 4) {
    const uint32_t word = uint32_t(random_bits());
    memcpy(b.data + i, &word, 4);
  }
  return b;
}

// Small normal numbers of any of the three types.
Bytes random_values(DType t, int64_t count) {
  Bytes b(count * dtype_size(t));
  for (int64_t i = 0; i < count; ++i) {
    const float v = float(int32_t(random_bits())) * 0x1p-31f;
    uint32_t bits;
    memcpy(&bits, &v, 4);
    if (t == DType::kF32) memcpy(b.data + 4 * i, &v, 4);
    const uint16_t half = t == DType::kBF16 ? uint16_t(bits >> 16) : uint16_t(0x2C00 | (bits & 0x83FF));
    if (t != DType::kF32) memcpy(b.data + 2 * i, &half, 2);
  }
  return b;
}

// Weights side by side in one buffer that is as large as `total`, so that each call finds its weights in memory and not
// in a cache.
struct Weights {
  Weights(Bytes memory, std::vector<LinearWeight> views) : memory(std::move(memory)), views(std::move(views)) {}
  Bytes memory;
  std::vector<LinearWeight> views;
  size_t turn = 0;
  const LinearWeight& next() { return views[turn++ % views.size()]; }
};

Weights packed_weights(const std::string& scheme, int64_t n, int64_t k, int64_t total) {
  const PackedHeader header = make_header(parse_scheme(scheme), n, k);
  const PackedLayout l = layout_of(header);
  const int64_t copies = std::max<int64_t>(1, (total + l.total_bytes - 1) / l.total_bytes);
  Bytes memory(copies * l.total_bytes);
  // One panel of random codes, everywhere.
  std::vector<int8_t> codes(size_t(16 * k));
  for (int8_t& c : codes) c = header.code_bits == 8 ? int8_t(random_bits() % 255 - 127) : int8_t(random_bits() % 16);
  const std::vector<float> scales(size_t(16 * l.groups), 0.01f);
  std::vector<uint8_t> first(size_t(sizeof header + l.panel_stride));
  PackedHeader one = header;
  one.n = std::min<int64_t>(n, 16);
  const float* mins = header.min_type == ScaleType::kNone ? nullptr : scales.data();
  pack_panel(one, first.data(), 0, codes.data(), k, scales.data(), mins);
  std::vector<LinearWeight> views;
  for (int64_t i = 0; i < copies; ++i) {
    uint8_t* at = memory.data + i * l.total_bytes;
    memcpy(at, &header, sizeof header);
    for (int64_t p = 0; p < l.panels; ++p)
      memcpy(at + sizeof header + p * l.panel_stride, first.data() + sizeof header, size_t(l.panel_stride));
    LinearWeight w;
    w.data = at;
    w.packed = true;
    w.header = header;
    w.layout = l;
    w.n = n;
    w.k = k;
    views.push_back(w);
  }
  return Weights(std::move(memory), std::move(views));
}

Weights dense_weights(DType t, int64_t n, int64_t k, int64_t total) {
  const int64_t bytes = n * k * dtype_size(t), copies = std::max<int64_t>(1, (total + bytes - 1) / bytes);
  Bytes memory = random_values(t, copies * n * k);
  std::vector<LinearWeight> views;
  for (int64_t i = 0; i < copies; ++i) {
    LinearWeight w;
    w.data = memory.data + i * bytes;
    w.dtype = t;
    w.row_stride = k;
    w.n = n;
    w.k = k;
    views.push_back(w);
  }
  return Weights(std::move(memory), std::move(views));
}

// Rows of x, quantised in every way that a weight may want.
struct Rows {
  Rows(DType t, int64_t rows, int64_t k) : x(random_values(t, rows * k)) {
    activation.x = x.data;
    activation.dtype = t;
    activation.rows = rows;
    activation.k = activation.stride = k;
    for (size_t i = 0; i < std::size(Activation::kGroups); ++i) {
      const int64_t group = Activation::kGroups[i], groups = group ? (k + group - 1) / group : 1;
      const int64_t stride = QuantizedRows::stride_for(k);
      QuantizedRows& q = activation.quantized[i];
      q.codes = reinterpret_cast<int8_t*>(keep(rows * stride));
      q.code_stride = stride;
      q.scales = reinterpret_cast<float*>(keep(rows * groups * 4));
      q.sums = reinterpret_cast<int32_t*>(keep(rows * groups * 4));
      quantize_rows_table.get()({x.data, q.codes, q.scales, q.sums, rows, k, group, k, stride, t});
    }
  }
  uint8_t* keep(int64_t bytes) { return buffers.emplace_back(bytes).data; }
  Bytes x;
  std::vector<Bytes> buffers;
  Activation activation;
};

std::string shape_of(const std::string& what, int64_t rows, int64_t n, int64_t k) {
  return what + " " + std::to_string(rows) + " x [" + std::to_string(n) + ", " + std::to_string(k) + "]";
}

bool wanted(const std::string& shape) { return shape.find(options.shape) != std::string::npos; }

// Where the weights of a case are.
enum class From { kMemory, kCache };

// Times run(), which reads `bytes` of `memory` at each call, in turns with the loop over as many bytes that only reads, from the
// opposite side of the same buffer.
void bandwidth_case(const char* op, Isa isa, const std::string& shape, int threads, const Bytes& memory, int64_t bytes,
                    const std::function<void()>& run) {
  int64_t at = 0;
  const Pair time = time_in_turns(run, [&] {
    const int64_t opposite = (at + memory.size / 2) % memory.size / 4096 * 4096;
    read_all(memory.data + std::min(opposite, memory.size - bytes), bytes);
    at += bytes;
  });
  print_bandwidth(op, isa, shape, threads, time.a, bytes, double(bytes) / time.b);
}

// One linear of `rows` rows in bf16 (or the dense weight's type), at every thread count. format: a scheme, or the type
// of a dense weight.
void linear_case(const char* op, Isa isa, const std::string& format, int64_t rows, int64_t n, int64_t k, From from) {
  if (options.quick) n = std::min<int64_t>(n, 256);
  const std::string shape = shape_of(format + (from == From::kMemory ? " memory" : " cache"), rows, n, k);
  if (!wanted(shape)) return;
  const DType t = format == "fp32" ? DType::kF32 : format == "fp16" ? DType::kF16 : DType::kBF16;
  const bool dense = format == "fp32" || format == "fp16" || format == "bf16";
  const int64_t total = from == From::kMemory ? working_set() : 0;
  Weights weights = dense ? dense_weights(t, n, k, total) : packed_weights(format, n, k, total);
  Rows x(t, rows, k);
  Bytes out(rows * n * dtype_size(t));
  auto run = [&] {
    const LinearWeight* w = &weights.next();
    const LinearOut to = {out.data, n, t};
    Program program(1);
    add_linears(program, x.activation, &w, &to, 1);
    program.run();
  };
  for (int threads : options.threads) {
    set_num_threads(threads);
    // Up to eight rows of a weight in memory are bound by its bytes.
    if (rows <= 8 && from == From::kMemory)
      bandwidth_case(op, isa, shape, threads, weights.memory, weights.views[0].bytes(), run);
    else
      print_macs(op, isa, shape, threads, time_of(run), double(rows * n * k), peak_of(isa, !dense));
  }
}

void linear_w8_cases(Isa isa) {
  const char* op = "linear_w8";
  linear_case(op, isa, "w8a8", 1, 4096, 4096, From::kMemory);
  linear_case(op, isa, "w8a8", 1, 151936, 1024, From::kMemory);
  for (auto [n, k] : {std::pair<int, int>{576, 576}, {1536, 576}, {576, 1536}}) {
    linear_case(op, isa, "w8a8", 1, n, k, From::kMemory);
    linear_case(op, isa, "w8a8", 1, n, k, From::kCache);
  }
  for (int64_t rows : {2, 4, 8}) linear_case(op, isa, "w8a8", rows, 4096, 4096, From::kMemory);
  for (auto [n, k] : {std::pair<int, int>{576, 576}, {1536, 576}, {576, 1536}, {4096, 4096}})
    linear_case(op, isa, "w8a8", 512, n, k, From::kCache);
}

void linear_group_cases(Isa isa) {
  const char* op = "linear_group";
  for (const std::string& scheme : scheme_names()) {
    if (parse_scheme(scheme).act_group == 0) continue;  // linear_w8's
    linear_case(op, isa, scheme, 1, 4096, 4096, From::kMemory);
    linear_case(op, isa, scheme, 1, 1536, 576, From::kMemory);
    linear_case(op, isa, scheme, 4, 4096, 4096, From::kMemory);
    linear_case(op, isa, scheme, 512, 1536, 576, From::kCache);
    linear_case(op, isa, scheme, 512, 2048, 2048, From::kCache);
  }
}

void linear_dense_cases(Isa isa) {
  const char* op = "linear_dense";
  linear_case(op, isa, "bf16", 1, 49152, 576, From::kMemory);
  for (const char* type : {"bf16", "fp16", "fp32"}) {
    linear_case(op, isa, type, 1, 4096, 4096, From::kMemory);
    linear_case(op, isa, type, 512, 1536, 576, From::kCache);
    linear_case(op, isa, type, 512, 2048, 2048, From::kCache);
  }
}

void sdot_gemv_cases(Isa isa) {
  for (auto [n, k] : {std::pair<int64_t, int64_t>{4096, 4096}, {1536, 576}}) {
    if (options.quick) n = 256;
    const std::string shape = shape_of("memory", 1, n, k);
    if (!wanted(shape)) continue;
    const int64_t bytes = n * k, copies = std::max<int64_t>(1, working_set() / bytes);
    const Bytes memory = random_bytes(copies * bytes), a = random_bytes(k), out(4 * n);
    int64_t turn = 0;
    for (int threads : options.threads) {
      set_num_threads(threads);
      bandwidth_case("sdot_gemv", isa, shape, threads, memory, bytes, [&] {
        SdotGemvArgs s = {};
        s.packed = reinterpret_cast<const int8_t*>(memory.data + turn++ % copies * bytes);
        s.stride = 4 * n;
        s.blocks = k / 4;
        s.n = n;
        s.a = reinterpret_cast<const int8_t*>(a.data);
        s.a_stride = k;
        s.rows = 1;
        s.out = out.data;
        s.out_stride = n;
        Program program(1);
        add_sdot_gemv(program, s);
        program.run();
      });
    }
  }
}

// Decoding reads keys and values from memory; prefill is bound by multiply-adds (half of them: causal).
// Queries behind `keys` keys: one query of keys and values in memory, or of few that stay in a cache, or a prompt.
void attention_case(Isa isa, int64_t heads, int64_t kv_heads, int64_t d, int64_t queries, int64_t keys, From from) {
  const std::string shape = "bf16 " + std::to_string(heads) + ":" + std::to_string(kv_heads) + " heads of " +
                            std::to_string(d) + (from == From::kMemory ? " memory" : " cache") + ", " +
                            std::to_string(queries) + " x " + std::to_string(keys);
  if (!wanted(shape)) return;
  AttentionCall call;
  call.dtype = call.kv_dtype = DType::kBF16;
  call.batch = 1;
  call.heads = heads;
  call.kv_heads = kv_heads;
  call.d = call.dv = d;
  call.scale = 0.1f;
  call.causal = true;
  const int64_t one = kv_heads * keys * d;  // elements of the keys, and of the values
  const int64_t copies = from == From::kMemory ? std::max<int64_t>(1, working_set() / (4 * one)) : 1;
  const Bytes memory = random_values(DType::kBF16, 2 * one * copies);
  const Bytes q = random_values(DType::kBF16, heads * queries * d);
  const Bytes out(2 * heads * queries * d);
  call.queries = queries;
  call.keys = keys;
  call.q = q.data;
  call.out = out.data;
  call.q_strides = call.out_strides = {heads * queries * d, d, heads * d};
  call.k_strides = call.v_strides = {one, keys * d, d};
  int64_t turn = 0;
  auto run = [&] {
    call.k = memory.data + turn++ % copies * 4 * one;
    call.v = static_cast<const uint8_t*>(call.k) + 2 * one;
    Program program(kAttentionStages);
    add_attention(program, call);
    program.run();
  };
  for (int threads : options.threads) {
    set_num_threads(threads);
    if (from == From::kMemory) {
      bandwidth_case("attention", isa, shape, threads, memory, 4 * one, run);
    } else {
      // A causal prompt attends to half of its square.
      const double pairs = queries == 1 ? double(keys) : double(queries) * double(keys) / 2;
      print_macs("attention", isa, shape, threads, time_of(run), 2 * double(heads * d) * pairs, peak_of(isa, false));
    }
  }
}

void attention_cases(Isa isa) {
  for (auto [heads, kv_heads, d] : {std::tuple<int, int, int>{16, 8, 128}, {9, 3, 64}, {32, 8, 64}}) {
    attention_case(isa, heads, kv_heads, d, 1, 4096, From::kMemory);
    attention_case(isa, heads, kv_heads, d, 1, 512, From::kCache);
    attention_case(isa, heads, kv_heads, d, 512, 512, From::kCache);
  }
}

// Operators on rows: one thread, everything in the cache, against the plain loop over the bytes that they read and
// write.
void row_case(const char* op, Isa isa, const std::string& shape, int64_t bytes, const std::function<void()>& run) {
  if (!wanted(shape)) return;
  const Bytes memory = random_bytes(bytes);
  set_num_threads(1);
  const Pair time = time_in_turns(run, [&] { read_all(memory.data, bytes); });
  print_bandwidth(op, isa, shape, 1, time.a, bytes, double(bytes) / time.b);
}

void quantize_rows_cases(Isa isa) {
  const int64_t rows = 16, k = 2048;
  const Bytes x = random_values(DType::kBF16, rows * k), codes(rows * k);
  const Bytes scales(4 * rows * k / 32), sums(4 * rows * k / 32);
  for (int64_t group : {0, 32})
    row_case("quantize_rows", isa, "bf16 16 x 2048, groups of " + std::to_string(group), rows * k * 3, [&] {
      quantize_rows_table.get()({x.data, reinterpret_cast<int8_t*>(codes.data), reinterpret_cast<float*>(scales.data),
                                 reinterpret_cast<int32_t*>(sums.data), rows, k, group, k, k, DType::kBF16});
    });
}

void rms_norm_cases(Isa isa) {
  const int64_t rows = 16, d = 2048;
  const Bytes x = random_values(DType::kBF16, rows * d), w = random_values(DType::kBF16, d), out(2 * rows * d);
  RmsNormArgs a = {};
  a.x = x.data;
  a.weight = w.data;
  a.out = out.data;
  a.rows = rows;
  a.d = a.x_stride = a.out_stride = d;
  a.eps = 1e-6f;
  a.kind = NormKind::kLlama;
  a.dtype = a.weight_dtype = DType::kBF16;
  row_case("rms_norm", isa, "bf16 16 x 2048", 4 * rows * d, [&] { rms_norm_table.get()(a); });
}

void swiglu_cases(Isa isa) {
  const int64_t rows = 16, n = 2048;
  const Bytes gate = random_values(DType::kBF16, rows * n), up = random_values(DType::kBF16, rows * n);
  const Bytes out(2 * rows * n);
  row_case("swiglu", isa, "bf16 16 x 2048", 6 * rows * n,
           [&] { swiglu_table.get()({gate.data, up.data, out.data, rows, n, n, n, n, DType::kBF16}); });
}

void rotary_cases(Isa isa) {
  const int64_t heads = 16, d = 128;
  const Bytes x = random_values(DType::kBF16, heads * d), out(2 * heads * d);
  const Bytes cos = random_values(DType::kBF16, d), sin = random_values(DType::kBF16, d);
  row_case("rotary", isa, "bf16 16 heads of 128", 4 * heads * d,
           [&] { rotary_table.get()({x.data, cos.data, sin.data, out.data, heads, d, d, d, d, DType::kBF16}); });
}

// A table that is not listed here is reported as not measured.
struct OpCases {
  const char* op;
  void (*run)(Isa);
};
constexpr OpCases kCases[] = {
    {"attention", attention_cases},         {"linear_dense", linear_dense_cases}, {"linear_group", linear_group_cases},
    {"linear_w8", linear_w8_cases},         {"quantize_rows", quantize_rows_cases}, {"rms_norm", rms_norm_cases},
    {"rotary", rotary_cases},               {"sdot_gemv", sdot_gemv_cases},       {"swiglu", swiglu_cases},
};

void run_table(KernelTableBase& table) {
  if (!options.op.empty() && options.op != table.op()) return;
  for (const OpCases& cases : kCases) {
    if (strcmp(cases.op, table.op()) != 0) continue;
    for (Isa isa : table.isas()) {
      if (!cpu_supports(isa) || (!options.isa.empty() && options.isa != isa_name(isa))) continue;
      if (isa == Isa::kRef && options.isa.empty()) continue;  // slow, and nobody's choice: on request only
      set_isa_cap(isa_name(isa));
      if (table.chosen_isa() == isa) cases.run(isa);
    }
    return;
  }
  const bool is_part = strcmp(table.op(), "attention_merge") == 0;
  printf("%-14s not measured%s\n", table.op(), is_part ? " by itself: a part of attention" : "");
}

[[noreturn]] void usage(int status) {
  fprintf(status ? stderr : stdout,
          "tle_kernel_bench [--op NAME] [--isa LEVEL] [--shape TEXT] [--threads 1,2] [--seconds S] [--best] [--quick]\n"
          "Without options: every operator and level of this CPU with 1 and 2 threads.\n"
          "TEXT: a part of the shape as it is printed. S: seconds for each figure.\n"
          "--best: the fastest call instead of the median, for a machine that others use too.\n"
          "--quick: small buffers, to see that everything runs; its figures mean nothing.\n");
  exit(status);
}

void parse(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--help") usage(0);
    if (name == "--quick") {
      options.quick = true;
      options.seconds = 0.0;
      continue;
    }
    if (name == "--best") {
      options.best = true;
      continue;
    }
    if (i + 1 == argc) usage(1);
    const std::string value = argv[++i];
    if (name == "--op") {
      options.op = value;
    } else if (name == "--isa") {
      options.isa = value;
    } else if (name == "--shape") {
      options.shape = value;
    } else if (name == "--seconds") {
      options.seconds = atof(value.c_str());
    } else if (name == "--threads") {
      options.threads.clear();
      for (const char* at = value.c_str(); at != nullptr; at = strchr(at, ',') ? strchr(at, ',') + 1 : nullptr)
        options.threads.push_back(std::max(1, atoi(at)));
    } else {
      usage(1);
    }
  }
}

void main_of(int argc, char** argv) {
  parse(argc, argv);
  cycles_per_second = gigahertz() * 1e9;
  printf("%s, %.2f GHz, last-level cache %ld KiB, buffers of %ld MiB\n", cpu_model().c_str(), cycles_per_second * 1e-9,
         long(last_level_cache() / 1024), long(working_set() >> 20));
  {
    const Bytes memory = random_bytes(working_set());
    for (int threads : options.threads) {
      set_num_threads(threads);
      printf("read bandwidth, %d thread%s: %.2f GB/s\n", threads, threads == 1 ? "" : "s",
             double(memory.size) / time_of([&] { read_all(memory.data, memory.size); }) * 1e-9);
    }
  }
  std::vector<KernelTableBase*> tables = KernelTableBase::all();
  std::sort(tables.begin(), tables.end(), [](auto* a, auto* b) { return strcmp(a->op(), b->op()) < 0; });
  for (KernelTableBase* table : tables) run_table(*table);
}

}  // namespace
}  // namespace tle::bench

int main(int argc, char** argv) {
  tle::bench::main_of(argc, argv);
  return 0;
}
