#include "csrc/runtime/packed_weight.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "tests/cpp/harness.h"

namespace tle::test {
namespace {

// codes and scales of one weight, packed.
struct Packed {
  Packed(Random& random, const std::string& scheme, int64_t n, int64_t k, ScaleType scale_type = ScaleType::kNone)
      : header(make_header(parse_scheme(scheme), n, k)) {
    if (scale_type != ScaleType::kNone) {
      header.scale_type = scale_type;
      if (header.min_type != ScaleType::kNone) header.min_type = scale_type;
    }
    layout = layout_of(header);
    const bool eight = header.code_bits == 8;
    codes.resize(size_t(n * k));
    for (int8_t& c : codes) c = eight ? int8_t(int(random() % 256) - 128) : int8_t(random() % 16);
    for (auto* v : {&scales, &mins})
      for (int64_t i = 0; i < n * layout.groups; ++i)
        v->push_back(std::ldexp(float(1 + random() % 200), -12));  // exact in every type
    bytes.assign(size_t(layout.total_bytes), 0xFF);
    memcpy(bytes.data(), &header, sizeof header);
    for (int64_t p = 0; p < layout.panels; ++p) {
      const int64_t first = p * kPanelChannels;
      pack_panel(header, bytes.data(), p, codes.data() + first * k, k, scales.data() + first * layout.groups,
                 header.min_type == ScaleType::kNone ? nullptr : mins.data() + first * layout.groups);
    }
  }

  PackedHeader header;
  PackedLayout layout;
  std::vector<int8_t> codes;
  std::vector<float> scales, mins;
  std::vector<uint8_t> bytes;
};

std::string refusal(const std::vector<uint8_t>& bytes) {
  try {
    read_header(bytes.data(), int64_t(bytes.size()));
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return "";
}

TEST(PackedWeight, TheLayoutIsTheDocumentedOne) {
  Random random(1);
  const int64_t n = 35, k = 21;
  Packed w(random, "w8a8", n, k);
  EXPECT_EQ(w.layout.lines, 6);
  EXPECT_EQ(w.layout.scale_offset, 6 * 64);
  EXPECT_EQ(w.layout.panel_stride, 7 * 64);
  EXPECT_EQ(w.layout.panels, 3);
  EXPECT_EQ(w.layout.total_bytes, 64 + 3 * 7 * 64);
  for (int64_t channel = 0; channel < 48; ++channel) {
    const uint8_t* panel = w.bytes.data() + 64 + channel / 16 * w.layout.panel_stride;
    for (int64_t i = 0; i < 24; ++i)
      EXPECT_EQ(int8_t(panel[i / 4 * 64 + channel % 16 * 4 + i % 4]),
                channel < n && i < k ? w.codes[size_t(channel * k + i)] : 0);
    float scale;
    memcpy(&scale, panel + w.layout.scale_offset + channel % 16 * 4, 4);
    EXPECT_EQ(scale, channel < n ? w.scales[size_t(channel)] : 0.0f);
  }
}

// By hand for groups of 32: a pair of groups is [2][16] scales, [2][16] minima and eight lines of 16 channels x 8 k.
TEST(PackedWeight, FourBitCodesFollowTheScalesOfTwoGroups) {
  Random random(2);
  const int64_t n = 18;
  for (const char* scheme : {"w4a8-g32", "w4a8-g32-asym"})
    for (int64_t k : {45, 140}) {
      SCOPED_TRACE(std::string(scheme) + " k=" + std::to_string(k));
      Packed w(random, scheme, n, k);
      const bool asymmetric = w.header.scheme == Scheme::kW4A8Asym;
      const int64_t head = asymmetric ? 128 : 64, pair = head + 8 * 64, lines = (k + 7) / 8, groups = (k + 31) / 32;
      EXPECT_EQ(w.layout.lines, lines);
      EXPECT_EQ(w.layout.groups, groups);
      EXPECT_EQ(w.layout.panel_stride, (groups + 1) / 2 * head + lines * 64);
      for (int64_t channel = 0; channel < 32; ++channel) {
        const uint8_t* panel = w.bytes.data() + 64 + channel / 16 * w.layout.panel_stride;
        for (int64_t i = 0; i < lines * 8; ++i) {
          const uint8_t byte = panel[i / 64 * pair + head + i / 8 % 8 * 64 + channel % 16 * 4 + i % 4];
          const int empty = asymmetric ? 0 : 8;  // the code whose value is 0
          EXPECT_EQ(i % 8 < 4 ? byte & 15 : byte >> 4, channel < n && i < k ? w.codes[size_t(channel * k + i)] : empty)
              << channel << " " << i;
        }
        for (int64_t g = 0; g < groups; ++g) {
          const uint8_t* scales = panel + g / 2 * pair + g % 2 * 32;
          EXPECT_EQ(scalar::load(DType::kF16, scales, channel % 16),
                    channel < n ? w.scales[size_t(channel * groups + g)] : 0.0f);
          if (asymmetric) {
            EXPECT_EQ(scalar::load(DType::kF16, scales + 64, channel % 16),
                      channel < n ? w.mins[size_t(channel * groups + g)] : 0.0f);
          }
        }
      }
    }
}

TEST(PackedWeight, UnpackingGivesTheValues) {
  Random random(3);
  for (const std::string& scheme : scheme_names())
    for (ScaleType t : {ScaleType::kF32, ScaleType::kF16, ScaleType::kBF16})
      for (auto [n, k] : {std::pair<int64_t, int64_t>{1, 1}, {16, 64}, {17, 40}, {33, 300}}) {
        SCOPED_TRACE(scheme + " n=" + std::to_string(n) + " k=" + std::to_string(k));
        Packed w(random, scheme, n, k, parse_scheme(scheme).group == 0 ? ScaleType::kNone : t);
        std::vector<float> out(size_t(k), NAN);
        for (int64_t channel = 0; channel < n; ++channel) {
          unpack_channel(w.header, w.bytes.data(), channel, out.data());
          for (int64_t i = 0; i < k; ++i) {
            const size_t g = size_t(channel * w.layout.groups + (w.header.group ? i / w.header.group : 0));
            const int q = w.codes[size_t(channel * k + i)];
            const float want = w.header.scheme == Scheme::kW4A8Asym ? std::fmaf(w.scales[g], float(q), w.mins[g])
                               : w.header.scheme == Scheme::kW4A8   ? w.scales[g] * float(q - 8)
                                                                    : w.scales[g] * float(q);
            EXPECT_EQ(out[size_t(i)], want) << channel << " " << i;
          }
        }
      }
}

TEST(PackedWeight, AReaderTakesWhatAWriterMakes) {
  Random random(4);
  for (const std::string& scheme : scheme_names()) {
    Packed w(random, scheme, 20, 50);
    const PackedHeader h = read_header(w.bytes.data(), int64_t(w.bytes.size()));
    EXPECT_EQ(memcmp(&h, &w.header, sizeof h), 0);
    EXPECT_EQ(scheme_name(h), scheme);
  }
  for (auto [n, k] : {std::pair<int64_t, int64_t>{0, 8}, {8, 0}, {0, 0}}) {
    Packed w(random, "w8a8", n, k);
    EXPECT_EQ(read_header(w.bytes.data(), int64_t(w.bytes.size())).n, n);
  }
}

TEST(PackedWeight, AReaderRefusesWhatItDoesNotKnow) {
  Random random(5);
  const Packed w(random, "w4a8-g32-asym", 20, 50);
  EXPECT_EQ(refusal(w.bytes), "");
  EXPECT_NE(refusal({w.bytes.begin(), w.bytes.begin() + 63}).find("only 63 bytes"), std::string::npos);
  EXPECT_NE(refusal({w.bytes.begin(), w.bytes.end() - 1}).find("needs"), std::string::npos);
  std::vector<uint8_t> longer = w.bytes;
  longer.push_back(0);
  EXPECT_NE(refusal(longer).find("needs"), std::string::npos);

  auto changed = [&](auto change) {
    std::vector<uint8_t> bytes = w.bytes;
    PackedHeader h = w.header;
    change(h);
    memcpy(bytes.data(), &h, sizeof h);
    return refusal(bytes);
  };
  EXPECT_NE(changed([](auto& h) { h.magic[0] = 'X'; }).find("magic"), std::string::npos);
  EXPECT_NE(changed([](auto& h) { h.version = 7; }).find("version 7"), std::string::npos);
  EXPECT_NE(changed([](auto& h) { h.scheme = Scheme(9); }).find("unknown scheme 9"), std::string::npos);
  EXPECT_NE(changed([](auto& h) { h.group = 48; }).find("groups of 48"), std::string::npos);
  EXPECT_NE(changed([](auto& h) { h.act_group = 0; }).find("unknown scheme"), std::string::npos);
  EXPECT_NE(changed([](auto& h) { h.code_bits = 8; }).find("code bits"), std::string::npos);
  EXPECT_NE(changed([](auto& h) { h.scale_type = ScaleType(9); }).find("scale type"), std::string::npos);
  EXPECT_NE(changed([](auto& h) { h.min_type = ScaleType::kNone; }).find("minima"), std::string::npos);
  EXPECT_NE(changed([](auto& h) { h.multiplier = 2.0f; }).find("multiplier"), std::string::npos);
  EXPECT_NE(changed([](auto& h) { h.reserved0 = 1; }).find("reserved"), std::string::npos);
  EXPECT_NE(changed([](auto& h) { h.reserved[23] = 1; }).find("reserved"), std::string::npos);
  EXPECT_NE(changed([](auto& h) { h.n = -1; }).find("sizes"), std::string::npos);
  EXPECT_NE(changed([](auto& h) { h.k = int64_t(1) << 40; }).find("sizes"), std::string::npos);
  EXPECT_NE(changed([](auto& h) { h.n = 21 + 16; }).find("needs"), std::string::npos);
}

TEST(PackedWeight, SizesThatCannotBePacked) {
  const SchemeSpec w8a8 = parse_scheme("w8a8");
  EXPECT_NO_THROW(make_header(w8a8, 1, kMaxK));
  EXPECT_THROW(make_header(w8a8, 1, kMaxK + 1), std::invalid_argument);
  EXPECT_NO_THROW(make_header(parse_scheme("w8a8-a32"), 1, kMaxK + 1));  // sums of 32 products only
  EXPECT_THROW(make_header(w8a8, -1, 4), std::invalid_argument);
  // What the limits stand for: the largest sum is within int32, and one more product is not.
  EXPECT_LE(kMaxK * 127 * 127, int64_t(INT32_MAX));
  EXPECT_GT((kMaxK + 1) * 127 * 127, int64_t(INT32_MAX));
  EXPECT_LE(kMaxKFullRange * 127 * 128, int64_t(INT32_MAX));
  EXPECT_GT((kMaxKFullRange + 1) * 127 * 128, int64_t(INT32_MAX));
}

TEST(PackedWeight, SchemeNames) {
  EXPECT_EQ(parse_scheme("w4a8").group, 32);
  EXPECT_EQ(parse_scheme("w4a8", 128).group, 128);
  EXPECT_EQ(parse_scheme("w4a8-asym", 64).act_group, 64);
  EXPECT_EQ(parse_scheme("w8a8-a32").group, 0);
  EXPECT_THROW(parse_scheme("w4a8", 48), std::invalid_argument);
  EXPECT_THROW(parse_scheme("w4a8-g32", 64), std::invalid_argument);
  EXPECT_THROW(parse_scheme("w8a8", 32), std::invalid_argument);
  try {
    parse_scheme("w3a8");
    FAIL();
  } catch (const std::invalid_argument& e) {
    for (const std::string& name : scheme_names()) EXPECT_NE(std::string(e.what()).find(name), std::string::npos);
  }
}

// Half a step of the scale, at most; a group of zeros is exact; a NaN makes its group NaN and leaves the next one
// alone.
TEST(PackedWeight, QuantizationError) {
  Random random(6);
  for (const std::string& scheme : scheme_names()) {
    SCOPED_TRACE(scheme);
    const int64_t k = 300;
    const PackedHeader h = make_header(parse_scheme(scheme), 1, k);
    const PackedLayout l = layout_of(h);
    const int64_t group = h.group ? h.group : k;
    std::vector<float> w(size_t(k), 0.0f), out(size_t(k), 0.0f), scales(size_t(l.groups)), mins(size_t(l.groups));
    std::vector<int8_t> codes(size_t(k), 0);
    fill_normal(random, DType::kF32, w.data(), k, 0.05f);
    if (l.groups > 2) std::fill(w.begin() + group, w.begin() + 2 * group, 0.0f);
    auto through = [&] {
      std::vector<uint8_t> bytes(size_t(l.total_bytes));
      quantize_channel(h, w.data(), codes.data(), scales.data(), mins.data());
      pack_panel(h, bytes.data(), 0, codes.data(), k, scales.data(),
                 h.min_type == ScaleType::kNone ? nullptr : mins.data());
      unpack_channel(h, bytes.data(), 0, out.data());
    };
    through();
    for (int64_t i = 0; i < k; ++i) {
      // fp16 scales are off by 2^-11: up to 8 (or 15) of that beside half a step, and the one end that 4 bits lack
      // takes a whole step.
      const double step = std::fabs(double(scales[size_t(i / group)]));
      const double bound = h.scheme == Scheme::kW4A8 ? 1.01 : 0.52;
      EXPECT_LE(std::fabs(double(out[size_t(i)]) - double(w[size_t(i)])), bound * step + 1e-12) << i;
    }
    for (int64_t i = group; l.groups > 2 && i < 2 * group; ++i) EXPECT_EQ(out[size_t(i)], 0.0f);

    w[0] = NAN;
    through();
    EXPECT_TRUE(std::isnan(scales[0]));
    for (int64_t g = 1; g < l.groups; ++g) EXPECT_FALSE(std::isnan(scales[size_t(g)]));
  }
}

}  // namespace
}  // namespace tle::test
