#include "csrc/runtime/gguf_blocks.h"

#include <string.h>

#include <algorithm>
#include <stdexcept>

#include "csrc/kernels/common/scalar.h"

namespace tle {

namespace {

constexpr SchemeSpec kInt8 = {Scheme::kW8A8, 32, 32}, kInt4 = {Scheme::kW4A8, 32, 32},
                     kInt4Min = {Scheme::kW4A8Asym, 32, 32};
constexpr GgufType kTypes[] = {
    {"Q4_0", 32, 18, kInt4, ScaleType::kF16},
    {"Q4_1", 32, 20, kInt4Min, ScaleType::kF16},
    {"Q8_0", 32, 34, kInt8, ScaleType::kF16},
    {"Q4_K", 256, 144, kInt4Min, ScaleType::kF32},
};
constexpr uint32_t kLow = 0x0F0F0F0Fu, kHigh = 0xF0F0F0F0u;

uint32_t word(const uint8_t* p) {
  uint32_t w;
  memcpy(&w, p, 4);
  return w;
}

// One channel of a panel: where its codes of a line, its scale and its minimum of a group go.
struct Channel {
  uint8_t* panel;
  PackedLayout layout;
  int64_t c;

  void line(int64_t index, uint32_t codes) const { memcpy(panel + layout.line(index) + c * 4, &codes, 4); }
  void scale16(int64_t group, const uint8_t* f16) const { memcpy(panel + layout.scales(group) + c * 2, f16, 2); }
  void min16(int64_t group, const uint8_t* f16) const { memcpy(panel + layout.mins(group) + c * 2, f16, 2); }
  void scale32(int64_t group, float x) const { memcpy(panel + layout.scales(group) + c * 4, &x, 4); }
  void min32(int64_t group, float x) const { memcpy(panel + layout.mins(group) + c * 4, &x, 4); }

  // 32 codes in 16 bytes: k 0 .. 15 in the low nibbles, k 16 .. 31 in the high ones.
  void nibbles_split(int64_t group, const uint8_t* p) const {
    for (int64_t half = 0; half < 2; ++half) {
      const uint32_t a = word(p + 8 * half), b = word(p + 8 * half + 4);
      line(group * 4 + half, (a & kLow) | (b & kLow) << 4);
      line(group * 4 + 2 + half, (a & kHigh) >> 4 | (b & kHigh));
    }
  }
  // 32 codes, all in the low (shift 0) or all in the high (shift 4) nibbles of 32 bytes.
  void nibbles_side(int64_t group, const uint8_t* p, int shift) const {
    for (int64_t l = 0; l < 4; ++l)
      line(group * 4 + l, ((word(p + 8 * l) >> shift) & kLow) | ((word(p + 8 * l + 4) >> shift) & kLow) << 4);
  }
};

// The 6-bit scale and minimum of group j of 8 in Q4_K's twelve bytes: the first four groups in the low six bits of
// bytes j and j + 4; of the others the low nibbles stand in bytes 8 .. 11 and the two high bits on top of the first
// four's bytes.
void six_bits(const uint8_t* p, int j, int* scale, int* min) {
  if (j < 4) {
    *scale = p[j] & 63;
    *min = p[j + 4] & 63;
  } else {
    *scale = (p[j + 4] & 15) | (p[j - 4] >> 6) << 4;
    *min = p[j + 4] >> 4 | (p[j] >> 6) << 4;
  }
}

void pack_channel(const GgufType& type, const Channel& out, int64_t k, const uint8_t* block) {
  for (int64_t b = 0; b < k / type.block_k; ++b, block += type.block_bytes) {
    if (type.block_k == 256) {
      const float d = scalar::from_f16(uint16_t(word(block))), dmin = scalar::from_f16(uint16_t(word(block) >> 16));
      for (int j = 0; j < 8; ++j) {
        int s, m;
        six_bits(block + 4, j, &s, &m);
        out.scale32(b * 8 + j, d * float(s));
        out.min32(b * 8 + j, -(dmin * float(m)));
        out.nibbles_side(b * 8 + j, block + 16 + j / 2 * 32, j % 2 * 4);
      }
    } else if (type.scheme.scheme == Scheme::kW8A8) {
      out.scale16(b, block);
      for (int64_t l = 0; l < 8; ++l) out.line(b * 8 + l, word(block + 2 + 4 * l));
    } else {
      const bool minimum = type.scheme.scheme == Scheme::kW4A8Asym;
      out.scale16(b, block);
      if (minimum) out.min16(b, block + 2);
      out.nibbles_split(b, block + (minimum ? 4 : 2));
    }
  }
}

}  // namespace

const GgufType& gguf_type(const std::string& name) {
  std::string known;
  for (const GgufType& t : kTypes) {
    if (name == t.name) return t;
    known += std::string(known.empty() ? "" : ", ") + t.name;
  }
  throw std::invalid_argument("GGUF type " + name + " cannot be taken over as it is; those that can are " + known);
}

PackedHeader gguf_header(const GgufType& type, int64_t n, int64_t k) {
  if (k % type.block_k != 0)
    throw std::invalid_argument(std::string("GGUF type ") + type.name + " has blocks of " +
                                std::to_string(type.block_k) + ", which do not divide K = " + std::to_string(k));
  PackedHeader header = make_header(type.scheme, n, k);
  header.scale_type = type.scale_type;
  if (header.min_type != ScaleType::kNone) header.min_type = type.scale_type;
  return header;
}

void pack_gguf_panel(const GgufType& type, const PackedHeader& header, uint8_t* packed, int64_t panel,
                     const uint8_t* const rows[16]) {
  const PackedLayout layout = layout_of(header);
  uint8_t* out = packed + sizeof(PackedHeader) + panel * layout.panel_stride;
  const int64_t channels = std::min(kPanelChannels, header.n - panel * kPanelChannels);
  if (channels < kPanelChannels || layout.groups % 2 == 1) {  // absent channels, or scales of a group that is not there
    memset(out, 0, size_t(layout.panel_stride));
    if (type.scheme.scheme == Scheme::kW4A8)
      for (int64_t line = 0; line < layout.lines; ++line) memset(out + layout.line(line), 0x88, 64);
  }
  for (int64_t c = 0; c < channels; ++c) pack_channel(type, {out, layout, c}, header.k, rows[c]);
}

}  // namespace tle
