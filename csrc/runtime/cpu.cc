#include "csrc/runtime/cpu.h"

#include <stdlib.h>

#include <atomic>
#include <fstream>
#include <stdexcept>

#include "csrc/runtime/kernel_table.h"
#include "csrc/runtime/topology.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#include <sys/prctl.h>
#endif

namespace tle {

namespace {

constexpr const char* kNames[kIsaCount] = {"ref", "neon", "dotprod", "i8mm", "sve2", "avx2", "avx512", "vnni", "amx"};

#if defined(__x86_64__)
// Tiles need the kernel's permission, once for a process and what it forks: without it their first instruction is
// illegal. (The permission has a price: signal stacks must have room for the tiles. A kernel that cannot give it says
// no.)
bool tiles_permitted() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kTile) == 0 || (d & kInt8) == 0) return false;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

bool detect(Isa isa) {
#if defined(__x86_64__)
  // __builtin_cpu_supports also asks the operating system (XGETBV) whether it saves the wide registers.
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#if defined(TLE_SIMDE)
  // A test build: the AVX-512, VNNI and AMX sources are compiled for AVX2, through SIMDe.
  if (isa == Isa::kAvx512 || isa == Isa::kVnni || isa == Isa::kAmx) return avx2;
#endif
  switch (isa) {
    case Isa::kRef: return true;
    case Isa::kAvx2: return avx2;
    case Isa::kAvx512: return avx512;
    case Isa::kVnni: return avx512 && __builtin_cpu_supports("avx512vnni");
    case Isa::kAmx: return avx512 && __builtin_cpu_supports("avx512vnni") && tiles_permitted();
    default: return false;
  }
#elif defined(__aarch64__)
  // HWCAP and not /proc/cpuinfo: it is what the kernel lets this process use.
  const unsigned long hwcap = getauxval(AT_HWCAP), hwcap2 = getauxval(AT_HWCAP2);
  const bool dotprod = hwcap & HWCAP_ASIMDDP;
  switch (isa) {
    case Isa::kRef: return true;
    case Isa::kNeon: return hwcap & HWCAP_ASIMD;
    case Isa::kDotprod: return dotprod;
    case Isa::kI8mm: return dotprod && (hwcap2 & HWCAP2_I8MM);
    case Isa::kSve2: return dotprod && (hwcap & HWCAP_SVE) && (hwcap2 & HWCAP2_SVE2);
    default: return false;
  }
#else
  return isa == Isa::kRef;
#endif
}

Isa best_isa() { return supported_isas().back(); }

Isa parse(const std::string& name, const char* source) {
  for (int i = 0; i < kIsaCount; ++i) {
    if (name != kNames[i]) continue;
    if (cpu_supports(Isa(i))) return Isa(i);
    std::string have;
    for (Isa isa : supported_isas()) have += std::string(have.empty() ? "" : ", ") + isa_name(isa);
    throw std::runtime_error(std::string(source) + "=" + name + ": this CPU lacks it; it has " + have);
  }
  std::string all;
  for (const char* n : kNames) all += std::string(all.empty() ? "" : "|") + n;
  throw std::runtime_error(std::string(source) + "=" + name + ": unknown level; known are " + all);
}

std::atomic<int> cap{-1};

}  // namespace

const char* isa_name(Isa isa) { return kNames[int(isa)]; }

bool cpu_supports(Isa isa) {
  static const auto supported = [] {
    std::vector<bool> s(kIsaCount);
    for (int i = 0; i < kIsaCount; ++i) s[size_t(i)] = detect(Isa(i));
    return s;
  }();
  return supported[size_t(isa)];
}

bool sve_is_wide() {
#if defined(__aarch64__)
  if (!cpu_supports(Isa::kSve2)) return false;
  const int length = prctl(PR_SVE_GET_VL);
  return length >= 0 && (length & PR_SVE_VL_LEN_MASK) > 16;
#else
  return false;
#endif
}

bool weight_hints_pay() {
#if defined(__x86_64__)
  static const bool intel = [] {
    __builtin_cpu_init();
    return __builtin_cpu_is("intel") != 0;
  }();
  return intel;
#else
  return false;
#endif
}

std::vector<Isa> supported_isas() {
  std::vector<Isa> found;
  for (int i = 0; i < kIsaCount; ++i)
    if (cpu_supports(Isa(i))) found.push_back(Isa(i));
  return found;
}

Isa isa_cap() {
  int c = cap.load(std::memory_order_relaxed);
  if (c < 0) {
    const char* wanted = getenv("TLE_ISA");
    c = int(wanted && *wanted ? parse(wanted, "TLE_ISA") : best_isa());
    cap.store(c, std::memory_order_relaxed);
  }
  return Isa(c);
}

void set_isa_cap(const std::string& name) {
  cap.store(int(name.empty() ? best_isa() : parse(name, "set_isa")), std::memory_order_relaxed);
  for (KernelTableBase* table : KernelTableBase::all()) table->forget_choice();
}

int default_num_threads() { return topology::usable_cores(topology::System{}); }

std::string cpu_model() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
#if defined(__aarch64__)
  std::ifstream model("/sys/firmware/devicetree/base/model");
  std::string name;
  if (std::getline(model, name, '\0') && !name.empty()) return name;
#endif
  return "unknown";
}

}  // namespace tle
