// For the build of llama.cpp (peers.py) by GCC 12 on a CPU with AMX: that compiler's intrinsics do not say what memory
// they read, so it moves the stores of a tile configuration behind the instruction that loads it, and the first
// product of several rows ends in an illegal instruction. The same instructions, with their operands.
#pragma once

#include <immintrin.h>

#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg\t%0" ::"m"(*(const char(*)[64])(config)) : "memory")
#define _tile_storeconfig(config) __asm__ volatile("sttilecfg\t%0" : "=m"(*(char(*)[64])(config))::"memory")
#undef _tile_loadd_internal
#define _tile_loadd_internal(dst, base, stride) \
  __asm__ volatile("tileloadd\t(%0,%1,1), %%tmm" #dst ::"r"((const void*)(base)), "r"((long)(stride)) : "memory")
#endif
