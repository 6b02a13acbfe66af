// The self-describing packed weight: a plain byte tensor that means the same on every machine (little-endian).
//
//   header   64 bytes, below
//   body     ceil(N / 16) panels of panel_stride bytes, one after another. A panel is
//              codes    lines of 64 bytes: 16 output channels x 4 consecutive k (8-bit codes, signed), or x 8 k (4-bit
//                       codes, unsigned: the low nibble of byte i is k + i, the high nibble k + 4 + i); K padded to
//                       whole lines
//              scales   [16] fp32
//            or, by groups, for every two of them (the last may stand alone, and be short)
//              scales   [2][16] of scale_type
//              minima   [2][16] of min_type, when the scheme has them
//              codes    the lines of both groups
//
// Scales stand right before their codes because a kernel that computes with both then reads memory from the panel's
// beginning to its end. In a section of their own they are a second stream, and leaving out as little as 512 bytes of
// the first one costs half of the bandwidth (Zen 4). Two groups, so that all lines begin on 64-byte boundaries of the
// body.
//
// Channels past N have scales 0; 8-bit codes past K or N are 0, 4-bit ones the code whose value is 0 times a scale.
// Readers refuse what they do not know.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <string>
#include <vector>

namespace tle {

// What a weight w is made of, and how the activations it meets are quantised (group 0: one scale a row or channel):
enum class Scheme : uint16_t {
  kW8A8 = 1,      // w = scale q, -128 <= q <= 127
  kW4A8 = 2,      // w = scale (q - 8), 0 <= q <= 15, by groups
  kW4A8Asym = 3,  // w = scale q + min, by groups
};

enum class ScaleType : uint8_t { kNone = 0, kF32 = 1, kF16 = 2, kBF16 = 3 };

struct PackedHeader {
  char magic[4];     // "TLEW"
  uint16_t version;  // kPackedVersion
  Scheme scheme;
  int64_t n, k;        // out and in features, unpadded
  int32_t group;       // k per scale of a channel; 0: one scale a channel. The last group may be short
  int32_t act_group;   // k per scale of an activation row; 0: one scale a row
  uint8_t code_bits;
  ScaleType scale_type, min_type;
  uint8_t reserved0;
  float multiplier;  // of every scale; 1 for the schemes of today
  uint8_t reserved[24];
};
static_assert(sizeof(PackedHeader) == 64);

inline constexpr uint16_t kPackedVersion = 1;
inline constexpr int64_t kPanelChannels = 16;

// Sums of K products of codes within +-127 stay below 2^31 up to this K, and so do those with weight codes of -128.
inline constexpr int64_t kMaxK = 133144, kMaxKFullRange = 132104;

// Where things lie for a header. Offsets in bytes from the start of a panel.
struct PackedLayout {
  int64_t lines;         // of 64 bytes per panel
  int64_t groups;        // scales of a channel
  int64_t scale_offset;  // of the first scales
  int64_t panel_stride;
  int64_t panels;
  int64_t total_bytes;  // header and body

  int64_t line(int64_t i) const {
    return (i >> pair_shift) * pair_stride + code_offset + (i & ((int64_t(1) << pair_shift) - 1)) * 64;
  }
  int64_t scales(int64_t group) const {
    return scale_offset + group / 2 * pair_stride + group % 2 * kPanelChannels * scale_size;
  }
  int64_t mins(int64_t group) const { return group / 2 * pair_stride + (2 + group % 2) * kPanelChannels * scale_size; }

  // Two groups have 2^pair_shift lines in pair_stride bytes, the first one at code_offset. Without groups the pair is
  // the whole panel.
  int64_t pair_shift, pair_stride, code_offset;
  int64_t scale_size;  // bytes of a scale, and of a minimum
};

// A scheme with its group sizes, as users name it.
struct SchemeSpec {
  Scheme scheme;
  int32_t group, act_group;
};

// "w8a8", "w8a8-a32", "w8a8-g32", "w4a8-g32", "w4a8-g64", "w4a8-g128", the last three also with "-asym".
const std::vector<std::string>& scheme_names();
// Throws std::invalid_argument with the known names. "w4a8" and "w4a8-asym" take the group from group_size (0: 32);
// otherwise group_size must be 0 or what the name says.
SchemeSpec parse_scheme(const std::string& name, int64_t group_size = 0);
std::string scheme_name(const PackedHeader& header);

// Throws std::invalid_argument for sizes that cannot be packed. Grouped scales are fp16 unless changed before packing.
PackedHeader make_header(const SchemeSpec& spec, int64_t n, int64_t k);
PackedLayout layout_of(const PackedHeader& header);

// Checks magic, version, scheme and size; throws std::invalid_argument naming what is wrong.
PackedHeader read_header(const void* data, int64_t bytes);

// Packs channels [16 * panel, 16 * panel + 16). codes: [those channels, code_stride]; scales, mins: [those channels,
// groups] (mins null without minima), representable in the header's types.
void pack_panel(const PackedHeader& header, uint8_t* packed, int64_t panel, const int8_t* codes, int64_t code_stride,
                const float* scales, const float* mins);

// The inverse, for one channel: its value at every k, `scale q`, `scale (q - 8)` or `fma(scale, q, min)` in fp32.
void unpack_channel(const PackedHeader& header, const uint8_t* packed, int64_t channel, float* out);

// Quantises one channel of k weights by groups; codes are computed against the scale (and minimum) as stored in
// scale_type.
//   8 bits:       scale = max |w| / 127, q = round_half_even(w (127 / max |w|)) for a channel, w (1 / scale) by groups
//   4 bits:       scale = (the w of largest magnitude) / -8, q = round_half_even(w (1 / scale)) + 8 (llama.cpp's Q4_0)
//   asymmetric:   min = min w, scale = (max w - min w) / 15, q = round_half_even((w - min) (1 / scale))
// A group that holds a NaN or an infinity gets scale NaN.
void quantize_channel(const PackedHeader& header, const float* w, int8_t* codes, float* scales, float* mins);

}  // namespace tle
