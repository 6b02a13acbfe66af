// What lanes_avx512.h, lanes_avx2.h and lanes_neon.h share: written once with their primitives.
#pragma once

namespace tle {
namespace {

// Loads and stores by element type; the type is a template argument, so that loops have no branch on it.
template <DType T>
static inline f32x16 load_as(const void* p, int64_t i) {
  if constexpr (T == DType::kF32) return load(static_cast<const float*>(p) + i);
  if constexpr (T == DType::kBF16) return load_bf16(static_cast<const uint16_t*>(p) + i);
  if constexpr (T == DType::kF16) return load_f16(static_cast<const uint16_t*>(p) + i);
  if constexpr (T == DType::kI8) return load_i8(static_cast<const int8_t*>(p) + i);
}

template <DType T>
static inline void store_as(void* p, int64_t i, f32x16 a) {
  if constexpr (T == DType::kF32) store(static_cast<float*>(p) + i, canonical(a));
  if constexpr (T == DType::kBF16) store_bf16(static_cast<uint16_t*>(p) + i, a);
  if constexpr (T == DType::kF16) store_f16(static_cast<uint16_t*>(p) + i, a);
}

template <DType T>
struct Element {
  using type = uint16_t;
};
template <>
struct Element<DType::kF32> {
  using type = float;
};
template <>
struct Element<DType::kI8> {
  using type = int8_t;
};

// The first n < 16 elements; the other lanes are +0, which is what the specification pads with. Never reads past them.
template <DType T>
static inline f32x16 load_tail(const void* p, int64_t i, int64_t n) {
  typename Element<T>::type buffer[16] = {};
  memcpy(buffer, static_cast<const typename Element<T>::type*>(p) + i, size_t(n) * sizeof(buffer[0]));
  return load_as<T>(buffer, 0);
}

template <DType T>
static inline void store_tail(void* p, int64_t i, int64_t n, f32x16 a) {
  typename Element<T>::type buffer[16];
  store_as<T>(buffer, 0, a);
  memcpy(static_cast<typename Element<T>::type*>(p) + i, buffer, size_t(n) * sizeof(buffer[0]));
}

// The same for a type that is only known at run time, and n <= 16 elements: for what is done once per result and not
// per operand.
static inline f32x16 load_any(DType t, const void* p, int64_t i, int64_t n) {
  const bool whole = n >= 16;
  switch (t) {
    case DType::kF32: return whole ? load_as<DType::kF32>(p, i) : load_tail<DType::kF32>(p, i, n);
    case DType::kBF16: return whole ? load_as<DType::kBF16>(p, i) : load_tail<DType::kBF16>(p, i, n);
    default: return whole ? load_as<DType::kF16>(p, i) : load_tail<DType::kF16>(p, i, n);
  }
}

static inline void store_any(DType t, void* p, int64_t i, int64_t n, f32x16 a) {
  const bool whole = n >= 16;
  switch (t) {
    case DType::kF32: return whole ? store_as<DType::kF32>(p, i, a) : store_tail<DType::kF32>(p, i, n, a);
    case DType::kBF16: return whole ? store_as<DType::kBF16>(p, i, a) : store_tail<DType::kBF16>(p, i, n, a);
    default: return whole ? store_as<DType::kF16>(p, i, a) : store_tail<DType::kF16>(p, i, n, a);
  }
}

// a rounded to T and back.
template <DType T>
static inline f32x16 round_to(f32x16 a) {
  if constexpr (T == DType::kF32) return canonical(a);
  if constexpr (T == DType::kBF16) return round_to_bf16(a);
  uint16_t buffer[16];
  store_as<T>(buffer, 0, a);
  return load_as<T>(buffer, 0);
}

// exp as exp_constants.h states it; NaN gives NaN.
static inline f32x16 exp(f32x16 a) {
  const f32x16 x = max_gt(set1(TLE_EXP_MIN), min_lt(set1(TLE_EXP_MAX), a));  // a NaN passes both selects
  const f32x16 n = round_even(mul(x, set1(TLE_EXP_LOG2E)));
  const f32x16 r = fma(n, set1(-TLE_EXP_LN2_LOW), fma(n, set1(-TLE_EXP_LN2_HIGH), x));
  f32x16 p = set1(TLE_EXP_C6);
  p = fma(p, r, set1(TLE_EXP_C5));
  p = fma(p, r, set1(TLE_EXP_C4));
  p = fma(p, r, set1(TLE_EXP_C3));
  p = fma(p, r, set1(TLE_EXP_C2));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  return scale_by_power(p, n);
}

}  // namespace
}  // namespace tle
