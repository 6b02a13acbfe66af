// AVX-512 VNNI: a line is one register, and vpdpbusd multiplies its 64 codes by 4 broadcast codes of x.
//
// vpdpbusd wants unsigned times signed. XOR with 0x80 makes the weights unsigned (w + 128), so the sum is too large by
// 128 sum(x): the accumulators start at minus that. Everything wraps modulo 2^32, so only the final value must fit.
#include "csrc/kernels/common/lanes_avx512.h"
#include "csrc/kernels/common/registers.h"
#include "csrc/kernels/linear_w8/linear_w8_epilogue.h"

namespace tle {
namespace {

static inline __m512i unsigned_line(const uint8_t* p) {
  return _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(int8_t(0x80)));
}

static inline __m512i four_codes(const int8_t* x) {
  int32_t codes;
  memcpy(&codes, x, 4);
  return _mm512_set1_epi32(codes);
}

static inline __m512i start(const LinearW8Args& a, int64_t row) {
  return _mm512_set1_epi32(int32_t(0u - 128u * uint32_t(a.x_sum[row])));
}

// kRows rows times kPanels panels in kRows * kPanels registers. A broadcast serves kPanels products and a line kRows.
template <int kRows, int kPanels>
static inline void tile(const LinearW8Args& a, int64_t row, int64_t panel) {
  __m512i acc[kRows][kPanels], sums[kRows][kPanels];
  TLE_UNROLL for (int r = 0; r < kRows; ++r)
    TLE_UNROLL for (int p = 0; p < kPanels; ++p) acc[r][p] = start(a, row + r);

  const uint8_t *panels = linear_w8_panel(a, panel), *w = panels;
  const int8_t* x = a.x + row * a.x_stride;
  for (int64_t line = 0; line < a.lines; ++line, w += 64, x += 4) {
    __m512i codes[kPanels];
    TLE_UNROLL for (int p = 0; p < kPanels; ++p) {
      prefetch_weights(panels + p * a.panel_stride, line);
      codes[p] = unsigned_line(w + p * a.panel_stride);
    }
    TLE_UNROLL for (int r = 0; r < kRows; ++r) {
      const __m512i four = four_codes(x + r * a.x_stride);
      TLE_UNROLL for (int p = 0; p < kPanels; ++p) acc[r][p] = _mm512_dpbusd_epi32(acc[r][p], codes[p], four);
    }
  }
  TLE_UNROLL for (int r = 0; r < kRows; ++r)
    TLE_UNROLL for (int p = 0; p < kPanels; ++p) sums[r][p] = acc[r][p];

  for (int r = 0; r < kRows; ++r)
    for (int p = 0; p < kPanels; ++p) linear_w8_store(a, row + r, panel + p, {sums[r][p]});
}

// One row times one panel: four accumulators over k, because vpdpbusd takes four cycles. A panel of 4096 k takes x out
// of the first-level cache as it passes, so x is asked for as well.
static inline void vector_panel(const LinearW8Args& a, int64_t row, int64_t panel) {
  const uint8_t* w = linear_w8_panel(a, panel);
  const int8_t* x = a.x + row * a.x_stride;
  __m512i acc[4] = {start(a, row), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
  int64_t line = 0;
  for (; line + 4 <= a.lines; line += 4)
    TLE_UNROLL for (int i = 0; i < 4; ++i) {
      if (i == 0) __builtin_prefetch(x + 4 * line + 128);
      prefetch_weights(w + 64 * line, i);
      acc[i] = _mm512_dpbusd_epi32(acc[i], unsigned_line(w + 64 * (line + i)), four_codes(x + 4 * (line + i)));
    }
  for (; line < a.lines; ++line)
    acc[0] = _mm512_dpbusd_epi32(acc[0], unsigned_line(w + 64 * line), four_codes(x + 4 * line));
  const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(acc[0], acc[1]), _mm512_add_epi32(acc[2], acc[3]));
  linear_w8_store(a, row, panel, {sum});
}

template <int kRows>
static inline void rows_of_tiles(const LinearW8Args& a, int64_t row) {
  const int64_t panels = linear_w8_panels(a);
  int64_t panel = 0;
  // A few rows are bound by memory, which is fastest when it is read in one stream.
  for (; a.rows <= 8 && panel < panels; ++panel) tile<kRows, 1>(a, row, panel);
  for (; panel + 3 <= panels; panel += 3) tile<kRows, 3>(a, row, panel);
  if (panel + 2 == panels) tile<kRows, 2>(a, row, panel);
  if (panel + 1 == panels) tile<kRows, 1>(a, row, panel);
}

}  // namespace

void linear_w8_vnni(const LinearW8Args& a) {
  int64_t row = 0;
  for (; row + 8 <= a.rows; row += 8) rows_of_tiles<8>(a, row);
  switch (a.rows - row) {
    case 7: return rows_of_tiles<7>(a, row);
    case 6: return rows_of_tiles<6>(a, row);
    case 5: return rows_of_tiles<5>(a, row);
    case 4: return rows_of_tiles<4>(a, row);
    case 3: return rows_of_tiles<3>(a, row);
    case 2: return rows_of_tiles<2>(a, row);
    case 1:
      for (int64_t panel = 0; panel < linear_w8_panels(a); ++panel) vector_panel(a, row, panel);
  }
}

}  // namespace tle
