// AVX2: a line is two registers of 8 channels.
#include "csrc/kernels/common/lanes_avx2.h"

namespace tle {
namespace {

using Bytes = __m256i;
static inline Bytes load_bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
static inline Bytes splat8(int8_t a) { return _mm256_set1_epi8(a); }
static inline Bytes splat16(int16_t a) { return _mm256_set1_epi16(a); }
static inline Bytes splat32(int32_t a) { return _mm256_set1_epi32(a); }
static inline Bytes xor_bits(Bytes a, Bytes b) { return _mm256_xor_si256(a, b); }
static inline Bytes and_bits(Bytes a, Bytes b) { return _mm256_and_si256(a, b); }
static inline Bytes add16(Bytes a, Bytes b) { return _mm256_add_epi16(a, b); }
static inline Bytes add32(Bytes a, Bytes b) { return _mm256_add_epi32(a, b); }
static inline Bytes shift16(Bytes a) { return _mm256_srli_epi16(a, 4); }
static inline Bytes abs8(Bytes a) { return _mm256_abs_epi8(a); }
static inline Bytes signed8(Bytes x, Bytes w) { return _mm256_sign_epi8(x, w); }
static inline Bytes maddubs(Bytes u, Bytes s) { return _mm256_maddubs_epi16(u, s); }
static inline Bytes madd(Bytes a, Bytes b) { return _mm256_madd_epi16(a, b); }

using Sums = __m256i;
using Part = __m256;
constexpr int kParts = 2;
static inline Part part(f32x16 a, int i) { return i == 0 ? a.lo : a.hi; }
static inline f32x16 whole(const Part a[2]) { return {a[0], a[1]}; }
static inline Part to_float(Sums a) { return _mm256_cvtepi32_ps(a); }
static inline Part broadcast(float a) { return _mm256_set1_ps(a); }
static inline Part mul(Part a, Part b) { return _mm256_mul_ps(a, b); }
static inline Part fma(Part a, Part b, Part c) { return _mm256_fmadd_ps(a, b, c); }

}  // namespace
}  // namespace tle

#include "csrc/kernels/linear_group/linear_group_maddubs.h"
#include "csrc/kernels/linear_group/linear_group_tiles.h"

namespace tle {
namespace {

// Many rows of 8-bit codes: vpsignb shares its ports with the products (Zen), an exclusive or does not. So x is made
// magnitudes and signs, once for several panels, a piece at a time: whole pairs of groups, few enough that the rows'
// pieces and a panel's stay in the first-level cache together.
constexpr int64_t kPiece = 1024;
constexpr int64_t kMostGroups = 512;  // of a row

// For every four codes: four |x| and then, as bytes, -1 where x is negative. Returns the sum of the |x| of negative x.
static inline int32_t split_codes(const int8_t* x, int64_t count, uint32_t* to) {
  __m256i sums = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
    const __m256i negative = _mm256_cmpgt_epi8(_mm256_setzero_si256(), codes), magnitude = _mm256_abs_epi8(codes);
    const __m256i low = _mm256_unpacklo_epi32(magnitude, negative), high = _mm256_unpackhi_epi32(magnitude, negative);
    __m256i* two = reinterpret_cast<__m256i*>(to + i / 2);
    _mm256_storeu_si256(two, _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_storeu_si256(two + 1, _mm256_permute2x128_si256(low, high, 0x31));
    sums = _mm256_add_epi64(sums, _mm256_sad_epu8(_mm256_and_si256(magnitude, negative), _mm256_setzero_si256()));
  }
  const __m128i halves = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  int32_t sum = _mm_cvtsi128_si32(halves) + _mm_extract_epi32(halves, 2);
  for (; i < count; ++i) {
    uint8_t* four = reinterpret_cast<uint8_t*>(to + i / 4 * 2) + i % 4;
    four[0] = uint8_t(x[i] < 0 ? -x[i] : x[i]);
    four[4] = x[i] < 0 ? 0xFF : 0;
    sum += x[i] < 0 ? four[0] : 0;
  }
  return sum;
}

// The outputs of kRows rows of at most kMostGroups groups.
template <bool kChannelScale, int kRows, int kTogether>
static inline void rows_by_magnitudes(const LinearGroupArgs& a, int64_t row) {
  constexpr int64_t kPanels = 12;  // that share a piece
  alignas(64) uint32_t x[kRows][kPiece / 2];
  int32_t left_out[kRows * kMostGroups];
  const int64_t groups = linear_group_groups(a), piece_groups = kPiece / a.group, panels = linear_group_panels(a);
  for (int64_t first = 0; first < panels; first += kPanels) {
    const int64_t count = panels - first < kPanels ? panels - first : kPanels;
    Place<kRows> at[kPanels];
    Part acc[kPanels][kRows][kParts];
    for (int64_t p = 0; p < count; ++p) {
      at[p] = place_of<GroupCodes::kInt8, kRows>(a, row, first + p);
      at[p].x_stride = sizeof x[0];
      at[p].x_sum = left_out;
      clear_tile(acc[p]);
    }
    for (int64_t g = 0; g < groups; g += piece_groups) {
      const int64_t last = g + piece_groups < groups ? g + piece_groups : groups;
      for (int r = 0; r < kRows; ++r)
        for (int64_t i = g; i < last; ++i) {
          const int64_t k = i * a.group, codes = a.k - k < a.group ? (a.k - k + 3) / 4 * 4 : a.group;
          left_out[r * groups + i] =
              split_codes(a.x + (row + r) * a.x_stride + k, codes, x[r] + (i - g) * a.group / 2);
        }
      for (int64_t p = 0; p < count; ++p) {
        Part of_panel[kRows][kParts];
        TLE_UNROLL for (int r = 0; r < kRows; ++r)
          TLE_UNROLL for (int i = 0; i < kParts; ++i) of_panel[r][i] = acc[p][r][i];
        at[p].x = reinterpret_cast<const int8_t*>(x);
        add_groups<GroupCodes::kInt8, 2, kChannelScale, false, true, kTogether>(a, g, last, at[p], of_panel);
        TLE_UNROLL for (int r = 0; r < kRows; ++r)
          TLE_UNROLL for (int i = 0; i < kParts; ++i) acc[p][r][i] = of_panel[r][i];
      }
    }
    for (int64_t p = 0; p < count; ++p) store_tile(a, row, first + p, acc[p]);
  }
}

}  // namespace

void linear_group_avx2(const LinearGroupArgs& a) {
  int64_t row = 0;
  // Fewer rows are bound by memory, which wants each panel in one piece.
  if (a.codes == GroupCodes::kInt8 && a.rows > 8 && linear_group_groups(a) <= kMostGroups)
    for (; row + 4 <= a.rows; row += 4)
      a.channel_scale ? rows_by_magnitudes<true, 4, 2>(a, row) : rows_by_magnitudes<false, 4, 2>(a, row);
  for (; row + 4 <= a.rows; row += 4) rows_of_tiles<4, 2>(a, row);
  switch (a.rows - row) {
    case 3: return rows_of_tiles<3, 2>(a, row);
    case 2: return rows_of_tiles<2, 2>(a, row);
    case 1: return rows_of_tiles<1, 2>(a, row);
  }
}

}  // namespace tle
