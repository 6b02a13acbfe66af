#include "csrc/runtime/packed_weight.h"

#include <string.h>

#include <algorithm>
#include <stdexcept>

namespace tle {

namespace {

constexpr char kMagic[4] = {'T', 'L', 'E', 'W'};

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument("packed weight: " + why); }

}  // namespace

const std::vector<SchemeInfo>& schemes() {
  static const std::vector<SchemeInfo> all = {{Scheme::kW8A8, "w8a8", 8}};
  return all;
}

const SchemeInfo& scheme_of(const std::string& name) {
  std::string known;
  for (const SchemeInfo& s : schemes()) {
    if (name == s.name) return s;
    known += std::string(known.empty() ? "" : ", ") + s.name;
  }
  throw std::invalid_argument("unknown scheme '" + name + "'; known are " + known);
}

PackedHeader make_header(Scheme scheme, int64_t n, int64_t k) {
  if (n < 0 || k < 0) refuse("negative size");
  if (k > kMaxK)
    refuse("K = " + std::to_string(k) + " could overflow an int32 sum; the limit is " + std::to_string(kMaxK));
  PackedHeader h = {};
  memcpy(h.magic, kMagic, 4);
  h.version = kPackedVersion;
  h.scheme = scheme;
  h.n = n;
  h.k = k;
  h.code_bits = 8;
  h.scale_type = ScaleType::kF32;
  h.multiplier = 1.0f;
  return h;
}

PackedLayout layout_of(const PackedHeader& h) {
  PackedLayout l = {};
  l.lines = round_up(h.k, 4) / 4;
  l.scale_offset = l.lines * 64;
  l.panel_stride = l.scale_offset + 64;
  l.panels = round_up(h.n, kPanelChannels) / kPanelChannels;
  l.total_bytes = int64_t(sizeof(PackedHeader)) + l.panels * l.panel_stride;
  return l;
}

PackedHeader read_header(const void* data, int64_t bytes) {
  if (bytes < int64_t(sizeof(PackedHeader))) refuse("only " + std::to_string(bytes) + " bytes, no header");
  PackedHeader h;
  memcpy(&h, data, sizeof h);
  if (memcmp(h.magic, kMagic, 4) != 0) refuse("the bytes do not start with the magic TLEW");
  if (h.version != kPackedVersion)
    refuse("format version " + std::to_string(h.version) + "; this build reads version " + std::to_string(kPackedVersion));
  const auto known = [&](const SchemeInfo& s) { return s.scheme == h.scheme && s.code_bits == h.code_bits; };
  if (!std::any_of(schemes().begin(), schemes().end(), known))
    refuse("unknown scheme " + std::to_string(int(h.scheme)) + " with " + std::to_string(h.code_bits) + "-bit codes");
  if (h.scale_type != ScaleType::kF32 || h.min_type != ScaleType::kNone || h.group != 0 || h.multiplier != 1.0f)
    refuse("scale type, minima, group or multiplier that this build does not know");
  for (uint8_t r : h.reserved)
    if (r != 0) refuse("a reserved field is in use; a newer version wrote it");
  if (h.n < 0 || h.k < 0 || h.k > kMaxK || h.n > (int64_t(1) << 40)) refuse("sizes out of range");
  if (layout_of(h).total_bytes != bytes)
    refuse("[" + std::to_string(h.n) + ", " + std::to_string(h.k) + "] needs " + std::to_string(layout_of(h).total_bytes) +
           " bytes, got " + std::to_string(bytes));
  return h;
}

void pack_panel_w8(const PackedHeader& h, uint8_t* packed, int64_t panel, const int8_t* codes, int64_t code_stride,
                   const float* scales) {
  const PackedLayout l = layout_of(h);
  uint8_t* out = packed + sizeof(PackedHeader) + panel * l.panel_stride;
  memset(out, 0, size_t(l.panel_stride));
  const int64_t first = panel * kPanelChannels, channels = std::min(kPanelChannels, h.n - first);
  for (int64_t c = 0; c < channels; ++c) {
    const int8_t* row = codes + (first + c) * code_stride;
    for (int64_t line = 0; line < l.lines; ++line)
      memcpy(out + line * 64 + c * 4, row + line * 4, size_t(std::min<int64_t>(4, h.k - line * 4)));
  }
  memcpy(out + l.scale_offset, scales + first, size_t(channels) * sizeof(float));
}

}  // namespace tle
