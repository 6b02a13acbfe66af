// The self-describing packed weight: a plain byte tensor that means the same on every machine (little-endian).
//
//   header   64 bytes, below
//   body     ceil(N / 16) panels of panel_stride bytes, one after another; a panel is
//              codes    lines of 64 bytes: 16 output channels x 4 consecutive k (8-bit codes); K padded with code 0
//              scales   [groups][16] of scale_type, from a 64-byte boundary of the body, padded to one
//
// Channels past N have codes and scales 0. Readers refuse what they do not know.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <string>
#include <vector>

namespace tle {

enum class Scheme : uint16_t { kW8A8 = 1 };

enum class ScaleType : uint8_t { kNone = 0, kF32 = 1 };

struct PackedHeader {
  char magic[4];     // "TLEW"
  uint16_t version;  // kPackedVersion
  Scheme scheme;
  int64_t n, k;    // out and in features, unpadded
  int32_t group;   // k per scale of a channel; 0: one scale a channel
  uint8_t code_bits;
  ScaleType scale_type, min_type;
  uint8_t reserved0;
  float multiplier;  // of every scale; 1 for the schemes of today
  uint8_t reserved[28];
};
static_assert(sizeof(PackedHeader) == 64);

inline constexpr uint16_t kPackedVersion = 1;
inline constexpr int64_t kPanelChannels = 16;

// Sums of K products of codes within +-127 stay below 2^31 up to this K, and so do those with weight codes of -128.
inline constexpr int64_t kMaxK = 133144, kMaxKFullRange = 132104;

// Where things lie for a header.
struct PackedLayout {
  int64_t lines;         // of 64 bytes per panel
  int64_t scale_offset;  // bytes from the start of a panel
  int64_t panel_stride;  // bytes
  int64_t panels;
  int64_t total_bytes;  // header and body
};

struct SchemeInfo {
  Scheme scheme;
  const char* name;
  uint8_t code_bits;
};
const std::vector<SchemeInfo>& schemes();
// Throws std::invalid_argument with the known names.
const SchemeInfo& scheme_of(const std::string& name);

// Throws std::invalid_argument for sizes that cannot be packed.
PackedHeader make_header(Scheme scheme, int64_t n, int64_t k);
PackedLayout layout_of(const PackedHeader& header);

// Checks magic, version, scheme and size; throws std::invalid_argument naming what is wrong.
PackedHeader read_header(const void* data, int64_t bytes);

// Packs rows [16 * panel, 16 * panel + 16) of int8 codes [N, K] with fp32 scales [N] into that panel.
void pack_panel_w8(const PackedHeader& header, uint8_t* packed, int64_t panel, const int8_t* codes, int64_t code_stride,
                   const float* scales);

}  // namespace tle
