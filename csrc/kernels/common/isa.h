// The instruction-set levels that kernels are written for. The order is the order of TLE_ISA's cap.
#pragma once

namespace tle {

enum class Isa : int { kRef = 0, kNeon, kDotprod, kI8mm, kSve2, kAvx2, kAvx512, kVnni, kAmx };
inline constexpr int kIsaCount = 9;

// One row of an operator's table: an implementation and the level that it needs.
template <class Fn>
struct Variant {
  Isa isa;
  Fn* fn;
  bool (*pays)() = nullptr;  // whether a CPU of this level is faster with this row than with those below; null: always
};

}  // namespace tle
