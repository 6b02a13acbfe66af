// Runs each kernel of the tables once, on a small shape, inside a window that a counter of instructions sees.
// benchmarks/counts.py starts this program under the counters and does the arithmetic. A window is opened by
//
//   --step        this program itself, x86-64 only: the CPU's trap flag raises a signal after every instruction.
//                 Any level that the CPU has, exact, some 5 to 20 microseconds an instruction
//   callgrind     the function tle_window (--toggle-collect, --dump-after). Up to AVX2: valgrind decodes no more
//   qemu-aarch64  prctl calls that scripts/arm/insn_plugin.c knows
//
// A line on stdout says what a window held: `window NUMBER KIND FORMAT LEVEL UNITS`. Units are what the count is
// divided by: bytes of the packed weight that were read (codes, scales, minima), multiply-adds, or multiply-adds of
// scores and values. A kernel's first window is a call without any work, with 0 units: the cost of the window itself.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/kernels/naive_attention.h"
#include "csrc/engine/attention.h"
#include "csrc/engine/linear.h"
#include "csrc/kernels/tables.h"
#include "csrc/runtime/cpu.h"
#include "csrc/runtime/packed_weight.h"
#include "csrc/runtime/threads.h"

#if defined(__x86_64__)
#include <signal.h>
#include <x86intrin.h>
#elif defined(__aarch64__)
#include <sys/prctl.h>
#endif

namespace {

int window = 0;  // the number of the next one

#if defined(__x86_64__)
bool step = false;  // count here
volatile uint64_t steps;
void on_trap(int) { steps = steps + 1; }

// Bit 8 of the flags: trap after every instruction.
inline void trap(bool on) { __writeeflags(on ? __readeflags() | 0x100 : __readeflags() & ~uint64_t(0x100)); }
#endif

}  // namespace

// callgrind finds it by its name: no clone of another name may be called in its place.
extern "C" __attribute__((noipa, visibility("default"))) void tle_window(void (*run)(void*), void* of) {
#if defined(__x86_64__)
  if (step) {
    trap(true);
    run(of);
    trap(false);
  } else {
    run(of);
  }
#elif defined(__aarch64__)
  prctl(0x544c4501);
  run(of);
  prctl(0x544c4502, window);
#else
  run(of);
#endif
}

namespace tle::bench {

NaiveAttentionFn* naive_attention(Isa isa) {
  switch (isa) {
    TLE_X86(case Isa::kAvx2: return naive_attention_avx2;)
    TLE_ARM(case Isa::kNeon: return naive_attention_neon;)
    default: return nullptr;
  }
}

namespace {

struct Filter {
  std::string kind, format, isa;  // "": all
};
Filter filter;

bool wanted(const char* kind, const std::string& format, Isa isa) {
  return (filter.kind.empty() || filter.kind == kind) && (filter.format.empty() || filter.format == format) &&
         (filter.isa.empty() || filter.isa == isa_name(isa)) && isa != Isa::kRef;
}

void count(const char* kind, const std::string& format, const char* level, int64_t units, std::function<void()> run) {
  printf("window %d %s %s %s %ld\n", window, kind, format.c_str(), level, long(units));
  fflush(stdout);
#if defined(__x86_64__)
  steps = 0;
#endif
  tle_window([](void* of) { (*static_cast<std::function<void()>*>(of))(); }, &run);
#if defined(__x86_64__)
  // The same line as the plugin's.
  if (step) fprintf(stderr, "insn window %d %lu\n", window, static_cast<unsigned long>(steps));
#endif
  ++window;
}

// Memory that reads as zeros, on a page: kernels take the same path whatever the codes are.
class Zeros {
 public:
  explicit Zeros(int64_t bytes) : bytes_(size_t(bytes + 4095) / 4096 * 4096), data_(aligned_alloc(4096, bytes_)) {
    memset(data_, 0, bytes_);
  }
  ~Zeros() { free(data_); }
  Zeros(const Zeros&) = delete;
  Zeros& operator=(const Zeros&) = delete;
  template <class T>
  T* as() const { return static_cast<T*>(data_); }

 private:
  size_t bytes_;
  void* data_;
};

struct Shape {
  const char* kind;
  int64_t rows, n, k;
  // Instructions per weight byte do not depend on n, beyond the panels that a kernel takes together (8 at most): 128
  // channels instead of 4096.
  int64_t units(int64_t weight_bytes) const { return rows == 1 ? weight_bytes : rows * n * k; }
};
constexpr Shape kGemv = {"gemv", 1, 128, 4096}, kGemm = {"gemm", 128, 128, 1024};

// What every linear kernel wants for a shape: rows quantised by groups of at least 32, and room for fp32 results.
struct Operands {
  Operands(const Shape& s, int64_t weight_bytes)
      : weight(weight_bytes),
        x(s.rows * QuantizedRows::stride_for(s.k) * 4),
        scales(s.rows * s.k / 32 * 4),
        sums(s.rows * s.k / 32 * 4),
        out(s.rows * s.n * 4) {}
  Zeros weight, x, scales, sums, out;
};

// Every variant of a kernel on packed weights, with no channels and with all. `a` holds what is this kernel's alone.
template <class Table, class Args>
void count_packed(const Table& table, Args a, const Shape& s, const std::string& scheme, const PackedLayout& l) {
  const Operands o(s, l.panels * l.panel_stride);
  a.panels = o.weight.as<uint8_t>();
  a.panel_stride = l.panel_stride;
  a.scale_offset = l.scale_offset;
  a.x = o.x.as<int8_t>();
  a.x_stride = QuantizedRows::stride_for(s.k);
  a.x_scale = o.scales.as<float>();
  a.x_sum = o.sums.as<int32_t>();
  a.rows = s.rows;
  a.out = o.out.as<float>();
  a.out_stride = s.n;
  a.out_dtype = DType::kF32;
  for (const auto& row : table.rows()) {
    if (!cpu_supports(row.isa) || !wanted(s.kind, scheme, row.isa)) continue;
    for (int64_t n : {int64_t(0), s.n}) {
      a.n = n;
      count(s.kind, scheme, isa_name(row.isa), n ? s.units(l.panels * l.panel_stride) : 0, [&] { row.fn(a); });
    }
  }
}

void count_w8(const Shape& s, const std::string& scheme) {
  const PackedLayout l = layout_of(make_header(parse_scheme(scheme), s.n, s.k));
  LinearW8Args a = {};
  a.lines = l.lines;
  count_packed(linear_w8_table, a, s, scheme, l);
}

void count_group(const Shape& s, const std::string& scheme) {
  const PackedHeader header = make_header(parse_scheme(scheme), s.n, s.k);
  const PackedLayout l = layout_of(header);
  LinearGroupArgs a = {};
  a.k = s.k;
  a.group = header.act_group;
  a.codes = header.code_bits == 8                    ? GroupCodes::kInt8
            : header.min_type == ScaleType::kNone ? GroupCodes::kInt4
                                                  : GroupCodes::kInt4Min;
  a.channel_scale = header.group == 0;
  a.scale_type = DType::kF16;
  count_packed(linear_group_table, a, s, scheme, l);
}

void count_scheme(const Shape& s, const std::string& scheme) {
  parse_scheme(scheme).act_group == 0 ? count_w8(s, scheme) : count_group(s, scheme);
}

void count_sdot(const Shape& s) {
  const Operands o(s, s.n * s.k);
  SdotGemvArgs a = {};
  a.packed = o.weight.as<int8_t>();
  a.stride = 4 * s.n;
  a.blocks = s.k / 4;
  a.a = o.x.as<int8_t>();
  a.a_stride = s.k;
  a.rows = s.rows;
  a.out = o.out.as<void>();
  a.out_stride = s.n;
  for (const auto& row : sdot_gemv_table.rows()) {
    if (!cpu_supports(row.isa) || !wanted(s.kind, "sdot", row.isa)) continue;
    for (int64_t n : {int64_t(0), s.n}) {
      a.n = n;
      count(s.kind, "sdot", isa_name(row.isa), n * s.k, [&] { row.fn(a); });
    }
  }
}

void count_dense(const Shape& s, const std::string& format, DType dtype) {
  const Operands o(s, s.n * s.k * dtype_size(dtype));
  LinearDenseArgs a = {};
  a.x = o.x.as<void>();
  a.w = o.weight.as<void>();
  a.out = o.out.as<void>();
  a.rows = s.rows;
  a.k = a.x_stride = a.w_stride = s.k;
  a.out_stride = s.n;
  a.dtype = a.out_dtype = dtype;
  for (const auto& row : linear_dense_table.rows()) {
    if (!cpu_supports(row.isa) || !wanted(s.kind, format, row.isa)) continue;
    for (int64_t n : {int64_t(0), s.n}) {
      a.n = n;
      count(s.kind, format, isa_name(row.isa), n ? s.units(s.n * s.k * dtype_size(dtype)) : 0, [&] { row.fn(a); });
    }
  }
}

// One token of a model with 16 query heads and 8 of keys and values of 128: the whole operator on one thread, beside
// the plain loop over the query heads, and with int8 keys and values.
void count_attention() {
  const int64_t heads = 16, kv_heads = 8, d = 128, keys = 1024, one = kv_heads * keys * d;
  const std::pair<const char*, DType> formats[] = {{"bf16", DType::kBF16}, {"int8", DType::kI8}};
  const Zeros q(2 * heads * d), k(2 * one), v(2 * one), out(2 * heads * d);
  AttentionCall call;
  call.q = q.as<void>();
  call.k = k.as<void>();
  call.v = v.as<void>();
  call.out = out.as<void>();
  call.dtype = DType::kBF16;
  call.batch = call.queries = 1;
  call.heads = heads;
  call.kv_heads = kv_heads;
  call.d = call.dv = d;
  call.scale = 0.1f;
  call.causal = true;
  call.q_strides = call.out_strides = {heads * d, d, heads * d};
  const auto attend = [&](int64_t of_keys) {
    call.keys = of_keys;
    Program program(kAttentionStages);
    add_attention(program, call);
    program.run();
  };
  set_num_threads(1);
  const int64_t units = heads * keys * d * 2;
  for (Isa isa : attention_table.isas()) {
    if (!cpu_supports(isa)) continue;
    set_isa_cap(isa_name(isa));
    for (const auto& [format, kv_dtype] : formats) {
      if (!wanted("attention", format, isa)) continue;
      call.kv_dtype = kv_dtype;
      const int64_t slot = d + (kv_dtype == DType::kI8 ? kScaleBytes : 0);
      call.k_strides = call.v_strides = {kv_heads * keys * slot, keys * slot, slot};
      attend(keys);  // scratch memory is made by the first call
      for (int64_t of_keys : {int64_t(0), keys})
        count("attention", format, isa_name(isa), of_keys ? units : 0, [&] { attend(of_keys); });
    }
    NaiveAttentionFn* naive = naive_attention(isa);
    if (naive == nullptr || !wanted("attention", "bf16", isa)) continue;
    std::vector<float> scores(size_t(keys), 0.0f);
    NaiveAttention a = {q.as<uint16_t>(), k.as<uint16_t>(), v.as<uint16_t>(), out.as<uint16_t>(), scores.data(),
                        0,                heads / kv_heads, keys,             d,                  call.scale};
    for (int64_t of_heads : {int64_t(0), heads}) {
      a.heads = of_heads;
      count("attention", "bf16-naive", isa_name(isa), of_heads ? units : 0, [&] { naive(a); });
    }
  }
}

[[noreturn]] void usage(int status) {
  fprintf(status ? stderr : stdout,
          "tle_kernel_count [--step] [--kind gemv|gemm|attention] [--format SCHEME|bf16|int8|sdot] [--isa LEVEL]\n"
          "Started by benchmarks/counts.py under a counter of instructions; --step counts by itself (x86-64).\n");
  exit(status);
}

void main_of(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--help") usage(0);
#if defined(__x86_64__)
    if (name == "--step") {
      signal(SIGTRAP, on_trap);
      step = true;
      continue;
    }
#endif
    std::string* to = name == "--kind"     ? &filter.kind
                      : name == "--format" ? &filter.format
                      : name == "--isa"    ? &filter.isa
                                           : nullptr;
    if (to == nullptr || i + 1 == argc) usage(1);
    *to = argv[++i];
  }
  printf("compiler GCC %d.%d\n", __GNUC__, __GNUC_MINOR__);
  for (const std::string& scheme : scheme_names()) count_scheme(kGemv, scheme);
  count_dense(kGemv, "bf16", DType::kBF16);
  count_sdot(kGemv);
  for (const char* scheme : {"w8a8", "w8a8-g32", "w4a8-g32", "w4a8-g32-asym"}) count_scheme(kGemm, scheme);
  if (filter.kind.empty() || filter.kind == "attention") count_attention();
}

}  // namespace
}  // namespace tle::bench

int main(int argc, char** argv) {
  tle::bench::main_of(argc, argv);
  return 0;
}
