#include "csrc/runtime/gguf_blocks.h"

#include <string.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "csrc/kernels/common/scalar.h"

namespace tle {

struct GgufChannel {
  uint8_t* panel;
  PackedLayout layout;
  int64_t c;
  const int64_t* place;

  // The channel with its groups where they belong; line `index` of 4 (4-bit codes) or 8 (8-bit codes) of a group.
  int64_t at(int64_t group) const { return place ? place[group] : group; }
  void line4(int64_t group, int64_t index, uint32_t codes) const { line(at(group) * 4 + index, codes); }
  void line8(int64_t group, int64_t index, uint32_t codes) const { line(at(group) * 8 + index, codes); }
  void line(int64_t index, uint32_t codes) const { memcpy(panel + layout.line(index) + c * 4, &codes, 4); }
  void scale16(int64_t group, const uint8_t* f16) const { memcpy(panel + layout.scales(at(group)) + c * 2, f16, 2); }
  void min16(int64_t group, const uint8_t* f16) const { memcpy(panel + layout.mins(at(group)) + c * 2, f16, 2); }
  void scale32(int64_t group, float x) const { memcpy(panel + layout.scales(at(group)) + c * 4, &x, 4); }
  void min32(int64_t group, float x) const { memcpy(panel + layout.mins(at(group)) + c * 4, &x, 4); }

  // 32 codes in 16 bytes: k 0 .. 15 in the low nibbles, k 16 .. 31 in the high ones.
  void nibbles_split(int64_t group, const uint8_t* p) const;
  // 32 codes, all in the low (shift 0) or all in the high (shift 4) nibbles of 32 bytes.
  void nibbles_side(int64_t group, const uint8_t* p, int shift) const;
  // Eight-bit codes of a group.
  void bytes(int64_t group, const int8_t codes[kGgufGroup]) const {
    for (int64_t l = 0; l < 8; ++l) {
      uint32_t four;
      memcpy(&four, codes + 4 * l, 4);
      line8(group, l, four);
    }
  }
};

namespace {

constexpr uint32_t kLow = 0x0F0F0F0Fu, kHigh = 0xF0F0F0F0u;

uint32_t word(const uint8_t* p) {
  uint32_t w;
  memcpy(&w, p, 4);
  return w;
}

float f16_at(const uint8_t* p) { return scalar::from_f16(uint16_t(p[0] | p[1] << 8)); }

// The 6-bit scale and minimum of group j of 8 in the twelve bytes of Q4_K and Q5_K: the first four groups in the low
// six bits of bytes j and j + 4; of the others the low nibbles stand in bytes 8 .. 11 and the two high bits on top of
// the first four's bytes.
void six_bits(const uint8_t* p, int j, int* scale, int* min) {
  if (j < 4) {
    *scale = p[j] & 63;
    *min = p[j + 4] & 63;
  } else {
    *scale = (p[j + 4] & 15) | (p[j - 4] >> 6) << 4;
    *min = p[j + 4] >> 4 | (p[j] >> 6) << 4;
  }
}

// A code of 5 bits: nibbles as in nibbles_split, and the fifth bits of 32 codes.
int five_bits(const uint8_t* nibbles, uint32_t fifth, int k) {
  const int low = k < 16 ? nibbles[k] & 15 : nibbles[k - 16] >> 4;
  return low | int(fifth >> k & 1) << 4;
}

// ---- taken over ----

void take_q4_0(const GgufChannel& out, int64_t group, const uint8_t* block) {
  out.scale16(group, block);
  out.nibbles_split(group, block + 2);
}

void take_q4_1(const GgufChannel& out, int64_t group, const uint8_t* block) {
  out.scale16(group, block);
  out.min16(group, block + 2);
  out.nibbles_split(group, block + 4);
}

void take_q5_0(const GgufChannel& out, int64_t group, const uint8_t* block) {
  int8_t codes[kGgufGroup];
  const uint32_t fifth = word(block + 2);
  for (int k = 0; k < kGgufGroup; ++k) codes[k] = int8_t(five_bits(block + 6, fifth, k) - 16);
  out.scale16(group, block);
  out.bytes(group, codes);
}

void take_q8_0(const GgufChannel& out, int64_t group, const uint8_t* block) {
  out.scale16(group, block);
  for (int64_t l = 0; l < 8; ++l) out.line8(group, l, word(block + 2 + 4 * l));
}

void take_q4_k(const GgufChannel& out, int64_t group, const uint8_t* block) {
  const float d = f16_at(block), dmin = f16_at(block + 2);
  for (int j = 0; j < 8; ++j) {
    int s, m;
    six_bits(block + 4, j, &s, &m);
    out.scale32(group + j, d * float(s));
    out.min32(group + j, -(dmin * float(m)));
    out.nibbles_side(group + j, block + 16 + j / 2 * 32, j % 2 * 4);
  }
}

constexpr int8_t kIq4Levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

void take_iq4_levels(const GgufChannel& out, int64_t group, const uint8_t* nibbles) {
  int8_t codes[kGgufGroup];
  for (int k = 0; k < kGgufGroup; ++k) codes[k] = kIq4Levels[five_bits(nibbles, 0, k)];
  out.bytes(group, codes);
}

void take_iq4_nl(const GgufChannel& out, int64_t group, const uint8_t* block) {
  out.scale16(group, block);
  take_iq4_levels(out, group, block + 2);
}

void take_iq4_xs(const GgufChannel& out, int64_t group, const uint8_t* block) {
  const float d = f16_at(block);
  const int high = block[2] | block[3] << 8;
  for (int j = 0; j < 8; ++j) {
    const int s = (block[4 + j / 2] >> j % 2 * 4 & 15) | (high >> 2 * j & 3) << 4;
    out.scale32(group + j, d * float(s - 32));
    take_iq4_levels(out, group + j, block + 8 + 16 * j);
  }
}

// ---- values ----

void values_q5_1(const uint8_t* block, float* out) {
  const float d = f16_at(block), m = f16_at(block + 2);
  const uint32_t fifth = word(block + 4);
  for (int k = 0; k < 32; ++k) out[k] = d * float(five_bits(block + 8, fifth, k)) + m;
}

void values_q5_k(const uint8_t* block, float* out) {
  const float d = f16_at(block), dmin = f16_at(block + 2);
  const uint8_t *fifth = block + 16, *nibbles = block + 48;
  for (int j = 0; j < 8; ++j) {
    int s, m;
    six_bits(block + 4, j, &s, &m);
    for (int k = 0; k < 32; ++k) {
      const int q = (nibbles[j / 2 * 32 + k] >> j % 2 * 4 & 15) | (fifth[k] >> j & 1) << 4;
      out[32 * j + k] = d * float(s) * float(q) - dmin * float(m);
    }
  }
}

void values_q6_k(const uint8_t* block, float* out) {
  const float d = f16_at(block + 208);
  for (int k = 0; k < 256; ++k) {
    const int half = k / 128, in_half = k % 128;
    const uint8_t low = block[64 * half + in_half % 64], high = block[128 + 32 * half + in_half % 32];
    const int q = (low >> in_half / 64 * 4 & 15) | (high >> in_half / 32 * 2 & 3) << 4;
    out[k] = d * float(int8_t(block[192 + k / 16])) * float(q - 32);
  }
}

constexpr SchemeSpec kInt8 = {Scheme::kW8A8, kGgufGroup, kGgufGroup}, kInt4 = {Scheme::kW4A8, kGgufGroup, kGgufGroup},
                     kInt4Min = {Scheme::kW4A8Asym, kGgufGroup, kGgufGroup};
constexpr GgufType kTypes[] = {
    {"Q4_0", 32, 18, kInt4, ScaleType::kF16, take_q4_0, nullptr},
    {"Q4_1", 32, 20, kInt4Min, ScaleType::kF16, take_q4_1, nullptr},
    {"Q5_0", 32, 22, kInt8, ScaleType::kF16, take_q5_0, nullptr},
    {"Q8_0", 32, 34, kInt8, ScaleType::kF16, take_q8_0, nullptr},
    {"IQ4_NL", 32, 18, kInt8, ScaleType::kF16, take_iq4_nl, nullptr},
    {"Q4_K", 256, 144, kInt4Min, ScaleType::kF32, take_q4_k, nullptr},
    {"IQ4_XS", 256, 136, kInt8, ScaleType::kF32, take_iq4_xs, nullptr},
    {"Q5_1", 32, 24, kInt8, ScaleType::kF32, nullptr, values_q5_1},
    {"Q5_K", 256, 176, kInt8, ScaleType::kF32, nullptr, values_q5_k},
    {"Q6_K", 256, 210, kInt8, ScaleType::kF32, nullptr, values_q6_k},
};

// A panel of a type that no scheme holds: each channel's values, quantised again.
void requantize_panel(const GgufType& type, const PackedHeader& header, uint8_t* packed, int64_t panel,
                      int64_t channels, const uint8_t* const rows[16], const int64_t* place) {
  const int64_t k = header.k, groups = k / kGgufGroup, block_groups = type.block_k / kGgufGroup;
  std::vector<float> values(static_cast<size_t>(k)), scales(size_t(channels * groups));
  std::vector<int8_t> codes(size_t(channels * k));
  float block[256];
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t b = 0; b < k / type.block_k; ++b) {
      type.values(rows[c] + b * type.block_bytes, block);
      for (int64_t g = 0; g < block_groups; ++g) {
        const int64_t group = b * block_groups + g;
        std::copy_n(block + g * kGgufGroup, kGgufGroup, values.data() + (place ? place[group] : group) * kGgufGroup);
      }
    }
    quantize_channel(header, values.data(), codes.data() + c * k, scales.data() + c * groups, nullptr);
  }
  pack_panel(header, packed, panel, codes.data(), k, scales.data(), nullptr);
}

}  // namespace

void GgufChannel::nibbles_split(int64_t group, const uint8_t* p) const {
  for (int64_t half = 0; half < 2; ++half) {
    const uint32_t a = word(p + 8 * half), b = word(p + 8 * half + 4);
    line4(group, half, (a & kLow) | (b & kLow) << 4);
    line4(group, 2 + half, (a & kHigh) >> 4 | (b & kHigh));
  }
}

void GgufChannel::nibbles_side(int64_t group, const uint8_t* p, int shift) const {
  for (int64_t l = 0; l < 4; ++l)
    line4(group, l, ((word(p + 8 * l) >> shift) & kLow) | ((word(p + 8 * l + 4) >> shift) & kLow) << 4);
}

std::span<const GgufType> gguf_types() { return kTypes; }

const GgufType& gguf_type(const std::string& name) {
  std::string known;
  for (const GgufType& t : kTypes) {
    if (name == t.name) return t;
    known += std::string(known.empty() ? "" : ", ") + t.name;
  }
  throw std::invalid_argument("GGUF type " + name + " cannot be packed; those that can are " + known);
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
                     const uint8_t* const rows[16], const int64_t* place) {
  const int64_t channels = std::min(kPanelChannels, header.n - panel * kPanelChannels);
  if (type.values) return requantize_panel(type, header, packed, panel, channels, rows, place);
  const PackedLayout layout = layout_of(header);
  uint8_t* out = packed + sizeof(PackedHeader) + panel * layout.panel_stride;
  if (channels < kPanelChannels || layout.groups % 2 == 1) {  // absent channels, or scales of a group that is not there
    memset(out, 0, size_t(layout.panel_stride));
    if (type.scheme.scheme == Scheme::kW4A8)
      for (int64_t line = 0; line < layout.lines; ++line) memset(out + layout.line(line), 0x88, 64);
  }
  const int64_t block_groups = type.block_k / kGgufGroup;
  for (int64_t c = 0; c < channels; ++c)
    for (int64_t b = 0; b < header.k / type.block_k; ++b)
      type.take({out, layout, c, place}, b * block_groups, rows[c] + b * type.block_bytes);
}

}  // namespace tle
