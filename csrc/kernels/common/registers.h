// Helps for a tile of accumulators that has to stay in registers (GCC 12 gives it memory otherwise).
//
// TLE_UNROLL          before a loop of few, constant rounds: unrolls it before the compiler decides what lives in
//                     registers. An array of vectors that only such loops index stays in registers; hand a copy to code
//                     that indexes it otherwise.
// TLE_IN_REGISTER(v)  v is in a register at this point. After an accumulation by two intrinsics of different element
//                     types, whose copies the compiler otherwise moves to the loop's end, so that twice the registers
//                     are in use.
// TLE_KEEP_ORDER      the compiler moves nothing across: where its scheduler would start so many products that
//                     registers run out.
// TLE_KEEP_IN_MEMORY  the compiler reads again what it knows of memory: where it would carry an array from round to
//                     round in registers that it does not have.
#pragma once

#define TLE_UNROLL _Pragma("GCC unroll 64")
#define TLE_KEEP_ORDER __asm__ volatile("")
#define TLE_KEEP_IN_MEMORY __asm__ volatile("" : : : "memory")

#if defined(SIMDE_ENABLE_NATIVE_ALIASES)
#define TLE_IN_REGISTER(v)  // an emulated vector is no register
#elif defined(__AVX512F__)
#define TLE_IN_REGISTER(v) __asm__("" : "+v"(v))
#elif defined(__x86_64__)
#define TLE_IN_REGISTER(v) __asm__("" : "+x"(v))
#else
#define TLE_IN_REGISTER(v) __asm__("" : "+w"(v))
#endif
