#include "csrc/runtime/packed_weight.h"

#include <string.h>

#include <algorithm>
#include <stdexcept>

#include "csrc/kernels/common/scalar.h"

namespace tle {

namespace {

constexpr char kMagic[4] = {'T', 'L', 'E', 'W'};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument("packed weight: " + why); }

struct Named {
  const char* name;
  SchemeSpec spec;
};
constexpr Named kNamed[] = {
    {"w8a8", {Scheme::kW8A8, 0, 0}},          {"w8a8-a32", {Scheme::kW8A8, 0, 32}},
    {"w8a8-g32", {Scheme::kW8A8, 32, 32}},    {"w4a8-g32", {Scheme::kW4A8, 32, 32}},
    {"w4a8-g64", {Scheme::kW4A8, 64, 64}},    {"w4a8-g128", {Scheme::kW4A8, 128, 128}},
    {"w4a8-g32-asym", {Scheme::kW4A8Asym, 32, 32}}, {"w4a8-g64-asym", {Scheme::kW4A8Asym, 64, 64}},
    {"w4a8-g128-asym", {Scheme::kW4A8Asym, 128, 128}},
};

bool same(const SchemeSpec& a, const SchemeSpec& b) {
  return a.scheme == b.scheme && a.group == b.group && a.act_group == b.act_group;
}

int64_t size_of(ScaleType t) { return t == ScaleType::kNone ? 0 : t == ScaleType::kF32 ? 4 : 2; }
DType dtype_of(ScaleType t) {
  return t == ScaleType::kF32 ? DType::kF32 : t == ScaleType::kF16 ? DType::kF16 : DType::kBF16;
}

// Half to even for |x| < 2^22: adding 1.5 * 2^23 leaves no fraction bits. Unlike nearbyintf it is no library call on
// the baseline of x86-64, and the compiler makes vectors of it.
float round_half_even(float x) { return (x + 0x1.8p23f) - 0x1.8p23f; }

float rounded(ScaleType t, float x) { return scalar::round_to(dtype_of(t), x); }

}  // namespace

const std::vector<std::string>& scheme_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> found;
    for (const Named& n : kNamed) found.emplace_back(n.name);
    return found;
  }();
  return names;
}

SchemeSpec parse_scheme(const std::string& name, int64_t group_size) {
  std::string full = name;
  if (name == "w4a8" || name == "w4a8-asym")
    full = "w4a8-g" + std::to_string(group_size == 0 ? 32 : group_size) + name.substr(4);
  for (const Named& n : kNamed) {
    if (full != n.name) continue;
    if (group_size != 0 && group_size != n.spec.group)
      throw std::invalid_argument("scheme " + full + " has group size " + std::to_string(n.spec.group) +
                                  ", got group_size " + std::to_string(group_size));
    return n.spec;
  }
  if (full != name)
    throw std::invalid_argument("scheme " + name + ": group_size must be 32, 64 or 128, got " +
                                std::to_string(group_size));
  std::string known;
  for (const std::string& n : scheme_names()) known += (known.empty() ? "" : ", ") + n;
  throw std::invalid_argument("unknown scheme '" + name + "'; known are " + known);
}

std::string scheme_name(const PackedHeader& h) {
  for (const Named& n : kNamed)
    if (same(n.spec, {h.scheme, h.group, h.act_group})) return n.name;
  return "unknown";
}

PackedHeader make_header(const SchemeSpec& spec, int64_t n, int64_t k) {
  if (n < 0 || k < 0) refuse("negative size");
  if (spec.act_group == 0 && k > kMaxK)
    refuse("K = " + std::to_string(k) + " could overflow an int32 sum; the limit is " + std::to_string(kMaxK));
  PackedHeader h = {};
  memcpy(h.magic, kMagic, 4);
  h.version = kPackedVersion;
  h.scheme = spec.scheme;
  h.n = n;
  h.k = k;
  h.group = spec.group;
  h.act_group = spec.act_group;
  h.code_bits = spec.scheme == Scheme::kW8A8 ? 8 : 4;
  h.scale_type = spec.group == 0 ? ScaleType::kF32 : ScaleType::kF16;
  h.min_type = spec.scheme == Scheme::kW4A8Asym ? h.scale_type : ScaleType::kNone;
  h.multiplier = 1.0f;
  return h;
}

PackedLayout layout_of(const PackedHeader& h) {
  PackedLayout l = {};
  l.lines = ceil_div(h.k, h.code_bits == 8 ? 4 : 8);
  l.groups = h.group == 0 ? 1 : ceil_div(h.k, h.group);
  l.scale_size = size_of(h.scale_type);
  if (h.group == 0) {
    l.pair_shift = 62;
    l.scale_offset = l.lines * 64;
    l.panel_stride = l.pair_stride = l.scale_offset + kPanelChannels * l.scale_size;
  } else {
    while ((int64_t(32) << l.pair_shift) < 2 * h.group * h.code_bits) ++l.pair_shift;
    l.code_offset = 2 * kPanelChannels * (size_of(h.scale_type) + size_of(h.min_type));
    l.pair_stride = l.code_offset + (int64_t(64) << l.pair_shift);
    l.panel_stride = ceil_div(l.groups, 2) * l.code_offset + l.lines * 64;
  }
  l.panels = ceil_div(h.n, kPanelChannels);
  l.total_bytes = int64_t(sizeof(PackedHeader)) + l.panels * l.panel_stride;
  return l;
}

PackedHeader read_header(const void* data, int64_t bytes) {
  if (bytes < int64_t(sizeof(PackedHeader))) refuse("only " + std::to_string(bytes) + " bytes, no header");
  PackedHeader h;
  memcpy(&h, data, sizeof h);
  if (memcmp(h.magic, kMagic, 4) != 0) refuse("the bytes do not start with the magic TLEW");
  if (h.version != kPackedVersion)
    refuse("format version " + std::to_string(h.version) + "; this build reads version " +
           std::to_string(kPackedVersion));
  const auto known = [&](const Named& n) { return same(n.spec, {h.scheme, h.group, h.act_group}); };
  if (std::none_of(std::begin(kNamed), std::end(kNamed), known))
    refuse("unknown scheme " + std::to_string(int(h.scheme)) + " with groups of " + std::to_string(h.group) + " and " +
           std::to_string(h.act_group));
  if (h.n < 0 || h.k < 0 || h.k > (int64_t(1) << 31) || h.n > (int64_t(1) << 40)) refuse("sizes out of range");
  const PackedHeader expected = make_header({h.scheme, h.group, h.act_group}, h.n, h.k);
  const bool scale_known = h.group == 0 ? h.scale_type == ScaleType::kF32
                                        : h.scale_type >= ScaleType::kF32 && h.scale_type <= ScaleType::kBF16;
  if (h.code_bits != expected.code_bits || !scale_known ||
      h.min_type != (expected.min_type == ScaleType::kNone ? ScaleType::kNone : h.scale_type) || h.multiplier != 1.0f)
    refuse("code bits, scale type, minima or multiplier that this build does not know");
  bool reserved = h.reserved0 != 0;
  for (uint8_t r : h.reserved) reserved = reserved || r != 0;
  if (reserved) refuse("a reserved field is in use; a newer version wrote it");
  if (layout_of(h).total_bytes != bytes)
    refuse("[" + std::to_string(h.n) + ", " + std::to_string(h.k) + "] needs " +
           std::to_string(layout_of(h).total_bytes) + " bytes, got " + std::to_string(bytes));
  return h;
}

void pack_panel(const PackedHeader& h, uint8_t* packed, int64_t panel, const int8_t* codes, int64_t code_stride,
                const float* scales, const float* mins) {
  const PackedLayout l = layout_of(h);
  uint8_t* out = packed + sizeof(PackedHeader) + panel * l.panel_stride;
  const int64_t channels = std::min(kPanelChannels, h.n - panel * kPanelChannels);
  memset(out, 0, size_t(l.panel_stride));
  if (h.scheme == Scheme::kW4A8)
    for (int64_t line = 0; line < l.lines; ++line) memset(out + l.line(line), 0x88, 64);
  for (int64_t c = 0; c < channels; ++c) {
    const int8_t* row = codes + c * code_stride;
    if (h.code_bits == 8) {
      for (int64_t line = 0; line < l.lines; ++line)
        memcpy(out + l.line(line) + c * 4, row + line * 4, size_t(std::min<int64_t>(4, h.k - line * 4)));
    } else {
      for (int64_t k = 0; k < h.k; ++k) {
        uint8_t& byte = out[l.line(k / 8) + c * 4 + k % 4];
        byte = k % 8 < 4 ? uint8_t((byte & 0xF0) | row[k]) : uint8_t((byte & 0x0F) | row[k] << 4);
      }
    }
    for (int64_t g = 0; g < l.groups; ++g) {
      scalar::store(dtype_of(h.scale_type), out + l.scales(g), c, scales[c * l.groups + g]);
      if (mins) scalar::store(dtype_of(h.min_type), out + l.mins(g), c, mins[c * l.groups + g]);
    }
  }
}

void unpack_channel(const PackedHeader& h, const uint8_t* packed, int64_t channel, float* out) {
  const PackedLayout l = layout_of(h);
  const uint8_t* panel = packed + sizeof(PackedHeader) + channel / kPanelChannels * l.panel_stride;
  const int64_t c = channel % kPanelChannels;
  for (int64_t k = 0; k < h.k; ++k) {
    const int64_t group = h.group == 0 ? 0 : k / h.group;
    const float scale = scalar::load(dtype_of(h.scale_type), panel + l.scales(group), c);
    if (h.code_bits == 8) {
      out[k] = scale * float(int8_t(panel[l.line(k / 4) + c * 4 + k % 4]));
      continue;
    }
    const uint8_t byte = panel[l.line(k / 8) + c * 4 + k % 4];
    const int q = k % 8 < 4 ? byte & 15 : byte >> 4;
    out[k] = h.scheme == Scheme::kW4A8
                 ? scale * float(q - 8)
                 : fmaf(scale, float(q), scalar::load(dtype_of(h.min_type), panel + l.mins(group), c));
  }
}

void quantize_channel(const PackedHeader& h, const float* w, int8_t* codes, float* scales, float* mins) {
  const int64_t group = h.group == 0 ? std::max<int64_t>(1, h.k) : h.group;
  for (int64_t g = 0; g * group < h.k; ++g) {
    const int64_t first = g * group, last = std::min(h.k, first + group);
    float low = w[first], high = w[first], extreme = 0.0f;
    bool finite = true;
    for (int64_t k = first; k < last; ++k) {
      finite = finite && fabsf(w[k]) <= 0x1.fffffep127f;
      low = w[k] < low ? w[k] : low;
      high = w[k] > high ? w[k] : high;
      extreme = fabsf(w[k]) > fabsf(extreme) ? w[k] : extreme;
    }
    float scale, min = 0.0f, largest, shift = 0.0f, smallest = 0.0f;
    if (h.scheme == Scheme::kW8A8) {
      scale = fabsf(extreme) / 127.0f;
      largest = 127.0f;
      smallest = -127.0f;
    } else if (h.scheme == Scheme::kW4A8) {
      scale = extreme / -8.0f;
      shift = 8.0f;
      largest = 15.0f;
    } else {
      min = rounded(h.min_type, low);
      scale = (high - min) / 15.0f;
      largest = 15.0f;
    }
    scale = rounded(h.scale_type, finite ? scale : scalar::float_of(0x7FC00000u));
    scales[g] = scale;
    if (h.min_type != ScaleType::kNone) mins[g] = min;
    float inv = h.group == 0 ? 127.0f / fabsf(extreme) : 1.0f / scale;
    if (!finite || !(fabsf(inv) <= 0x1.fffffep127f)) inv = 0.0f;
    for (int64_t k = first; k < last; ++k) {
      float q = (w[k] - min) * inv;
      q = q < -128.0f ? -128.0f : q > 128.0f ? 128.0f : q;  // a NaN or an infinity that is about to be dropped, too
      q = round_half_even(q) + shift;
      q = q < smallest ? smallest : q > largest ? largest : q;
      codes[k] = finite ? int8_t(q) : int8_t(0);
    }
  }
}

}  // namespace tle
