// Weights of GGUF files taken over as they are: the same codes, scales and minima in another order.
//
//   Q4_0   w = d (q - 8)      32 k: fp16 d, 16 bytes of codes                 -> w4a8-g32
//   Q4_1   w = d q + m        32 k: fp16 d, fp16 m, 16 bytes of codes         -> w4a8-g32-asym
//   Q8_0   w = d q            32 k: fp16 d, 32 int8 codes                     -> w8a8-g32
//   Q4_K   w = (d s) q - (dmin m), 256 k: fp16 d, fp16 dmin, 12 bytes of 6-bit s and m for 8 groups of 32 k, 128 bytes
//                             of codes -> w4a8-g32-asym with fp32 scales and minima: d s and dmin m have at most 17
//                             bits and are exact
//
// In a block of 32 codes of 4 bits, byte i holds k = i (low nibble) and k = i + 16 (high nibble); Q4_K: 32 bytes hold
// two groups, byte i of them k = i of the first (low) and of the second (high).
// Source: the GGUF file format as the gguf Python package documents and implements it.
#pragma once

#include <stdint.h>

#include <string>

#include "csrc/runtime/packed_weight.h"

namespace tle {

struct GgufType {
  const char* name;
  int64_t block_k, block_bytes;
  SchemeSpec scheme;
  ScaleType scale_type;
};

// Throws std::invalid_argument, naming the known types.
const GgufType& gguf_type(const std::string& name);

// The header of a packed weight of that type. Throws std::invalid_argument when k is not a whole number of blocks.
PackedHeader gguf_header(const GgufType& type, int64_t n, int64_t k);

// Packs channels [16 * panel, 16 * panel + 16) of the header's weight; rows[c] points at the blocks of the c-th of them
// (fewer in the last panel).
void pack_gguf_panel(const GgufType& type, const PackedHeader& header, uint8_t* packed, int64_t panel,
                     const uint8_t* const rows[16]);

}  // namespace tle
