// Weights of GGUF files. Taken over as they are, the same codes, scales and minima in another order:
//
//   Q4_0   w = d (q - 8)       32 k: fp16 d, 16 bytes of codes                          -> w4a8-g32
//   Q4_1   w = d q + m         32 k: fp16 d, fp16 m, 16 bytes of codes                  -> w4a8-g32-asym
//   Q5_0   w = d (q - 16)      32 k: fp16 d, 4 bytes of fifth bits, 16 bytes of codes   -> w8a8-g32, q - 16 as the code
//   Q8_0   w = d q             32 k: fp16 d, 32 int8 codes                              -> w8a8-g32
//   IQ4_NL w = d t[q]          32 k: fp16 d, 16 bytes of codes; t: 16 int8 levels       -> w8a8-g32, t[q] as the code
//   Q4_K   w = (d s) q - (dmin m)   256 k: fp16 d, fp16 dmin, 12 bytes of 6-bit s and m for 8 groups of 32 k, 128 bytes
//                              of codes -> w4a8-g32-asym with fp32 scales and minima: d s and dmin m have at most 17
//                              bits and are exact
//   IQ4_XS w = (d (s - 32)) t[q]    256 k: fp16 d, 2 bytes with the high two and 4 with the low four bits of 8 s, 128
//                              bytes of codes -> w8a8-g32 with fp32 scales, which are exact too
//
// Quantised again to w8a8-g32 with fp32 scales, because no scheme holds them: 8-bit codes have no minimum, and one
// scale per 32 k. A value moves by at most half a step of 1/127 of its group's largest weight; Q6_K's own steps are
// 1/32 of that or, where its two scales differ, less:
//
//   Q5_1   w = d q + m         32 k: fp16 d, fp16 m, 4 bytes of fifth bits, 16 bytes of codes
//   Q5_K   w = (d s) q - (dmin m)   256 k: as Q4_K, with 32 bytes of fifth bits before the codes
//   Q6_K   w = (d s) (q - 32)  256 k: 128 bytes of low nibbles, 64 of high two bits, 16 int8 s for 16 k each, fp16 d
//
// In a block of 32 codes of 4 bits, byte i holds k = i (low nibble) and k = i + 16 (high nibble), and bit k of the
// fifth bits belongs to k. Q4_K, Q5_K: 32 bytes hold two groups, byte i of them k = i of the first (low) and of the
// second (high); bit g of fifth byte i belongs to group g. Q6_K: by halves of 128 k; byte i of 64 holds k = i (low)
// and k = i + 64 (high), byte i of 32 the high bits of k = i + 32 j at 2 j.
// Source: the GGUF file format as the gguf Python package documents and implements it.
#pragma once

#include <stdint.h>

#include <span>
#include <string>

#include "csrc/runtime/packed_weight.h"

namespace tle {

// All types have groups of 32 k, as packed here.
inline constexpr int64_t kGgufGroup = 32;

struct GgufChannel;  // where the codes, scales and minima of one channel go

struct GgufType {
  const char* name;
  int64_t block_k, block_bytes;
  SchemeSpec scheme;
  ScaleType scale_type;
  // One of two: takes a block over, whose first group is `group` of its row, or writes the block's values.
  void (*take)(const GgufChannel& out, int64_t group, const uint8_t* block);
  void (*values)(const uint8_t* block, float* out);
};

std::span<const GgufType> gguf_types();
// Throws std::invalid_argument, naming the known types.
const GgufType& gguf_type(const std::string& name);

// The header of a packed weight of that type. Throws std::invalid_argument when k is not a whole number of blocks.
PackedHeader gguf_header(const GgufType& type, int64_t n, int64_t k);

// Packs channels [16 * panel, 16 * panel + 16) of the header's weight; rows[c] points at the blocks of the c-th of them
// (fewer in the last panel). Group g of a row becomes group place[g] of the channel (null: g).
void pack_gguf_panel(const GgufType& type, const PackedHeader& header, uint8_t* packed, int64_t panel,
                     const uint8_t* const rows[16], const int64_t* place);

}  // namespace tle
