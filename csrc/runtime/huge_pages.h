// Memory for what a token reads from end to end: weights, keys and values. In pages of 4 KiB every second reading costs
// a walk through the page tables (in a virtual machine through two), and the prefetchers stop at each page's end: on
// such a machine a product with weights of 1 MB ran a third slower than in huge pages.
#pragma once

#include <stdint.h>

namespace tle {

// What is allocated together is read together and mostly freed together: one arena each.
enum class Arena { kWeights, kCache };

// A block of `bytes` on a 64-byte boundary, zeroed by the system. Blocks of up to some megabytes stand side by side in
// one region that asks for huge pages, larger ones have their own. A huge page goes back to the system with the last
// block on it, a region's addresses with its last block. Throws std::bad_alloc. Any thread, and a forked child.
struct HugeBlock {
  void* data = nullptr;
  int64_t bytes = 0;
  void* region = nullptr;
};
HugeBlock allocate_huge(int64_t bytes, Arena arena);
void free_huge(const HugeBlock& block);

// Asks the system to put memory that is in use already into huge pages, where it lies on whole ones. A hint: where the
// system cannot, nothing happens.
void advise_huge(void* data, int64_t bytes);

}  // namespace tle
