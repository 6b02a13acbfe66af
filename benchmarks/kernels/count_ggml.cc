// ggml's kernels in the windows of count.cc: same shapes, same units. benchmarks/peer_counts.py compiles this file
// together with the files of ggml that it names, from the sources inside the llama-cpp-python package.
//
// A weight of format Q8_0 or Q4_0 is blocks of 32 k: a half-precision scale and the codes. "repacked" kernels read four
// (eight) channels' blocks interleaved; "vec_dot" computes one channel.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

extern "C" {
typedef void Repacked(int k, float* out, size_t out_stride, const void* w, const void* x, int rows, int channels);
Repacked ggml_gemv_q8_0_4x4_q8_0, ggml_gemv_q8_0_4x8_q8_0, ggml_gemv_q4_0_4x4_q8_0, ggml_gemv_q4_0_4x8_q8_0;
Repacked ggml_gemm_q8_0_4x4_q8_0, ggml_gemm_q8_0_4x8_q8_0, ggml_gemm_q4_0_4x4_q8_0, ggml_gemm_q4_0_4x8_q8_0;
typedef void VecDot(int k, float* out, size_t out_stride, const void* w, size_t w_stride, const void* x,
                    size_t x_stride, int together);
VecDot ggml_vec_dot_q8_0_q8_0, ggml_vec_dot_q4_0_q8_0, ggml_vec_dot_q4_1_q8_1;
// Without SMMLA the 4x8 products of many rows are ggml's scalar code, in a file that is not compiled here.
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool kSmmla = true;
#else
constexpr bool kSmmla = false;
void ggml_gemm_q8_0_4x8_q8_0_generic() { abort(); }
void ggml_gemm_q4_0_4x8_q8_0_generic() { abort(); }
#endif
void ggml_abort(const char* file, int line, const char*, ...) {
  fprintf(stderr, "%s:%d: ggml aborts\n", file, line);
  abort();
}
}

namespace {

constexpr int kGemvRows = 1, kGemvK = 4096, kGemmRows = 128, kGemmK = 1024, kChannels = 128;
int window = 0;

void* zeros(size_t bytes) {
  void* p = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  memset(p, 0, bytes);
  return p;
}

// The window's own cost is a window without work, as in count.cc.
template <class Run>
void count_one(const char* kind, const char* format, const char* kernel, long units, Run run) {
  printf("window %d %s %s %s %ld\n", window, kind, format, kernel, units);
  fflush(stdout);
  prctl(0x544c4501);
  run();
  prctl(0x544c4502, window);
  ++window;
}

template <class Run>
void count(const char* kind, const char* format, const char* kernel, long units, Run run) {
  count_one(kind, format, kernel, 0, [] {});
  count_one(kind, format, kernel, units, run);
}

// block_bytes: of 32 k of one channel.
void repacked(const char* format, const char* kernel, long block_bytes, Repacked* gemv, Repacked* gemm) {
  float* out = static_cast<float*>(zeros(sizeof(float) * kGemmRows * kChannels));
  void* x = zeros(34 * kGemmRows * (kGemvK / 32));
  const long bytes = block_bytes * (kGemvK / 32) * kChannels;
  void* w = zeros(size_t(bytes));
  count("gemv", format, kernel, bytes, [&] { gemv(kGemvK, out, kChannels, w, x, kGemvRows, kChannels); });
  if (gemm != nullptr)
    count("gemm", format, kernel, long(kGemmRows) * kChannels * kGemmK,
          [&] { gemm(kGemmK, out, kChannels, w, x, kGemmRows, kChannels); });
}

void vec_dot(const char* format, long block_bytes, VecDot* dot) {
  float out;
  void* x = zeros(36 * (kGemvK / 32));
  const long bytes = block_bytes * (kGemvK / 32);
  void* w = zeros(size_t(bytes));
  count("gemv", format, "vec_dot", bytes, [&] { dot(kGemvK, &out, 0, w, 0, x, 0, 1); });
}

}  // namespace

int main() {
  printf("compiler GCC %d.%d\n", __GNUC__, __GNUC_MINOR__);
  repacked("Q8_0", "repacked-4x4", 34, ggml_gemv_q8_0_4x4_q8_0, ggml_gemm_q8_0_4x4_q8_0);
  repacked("Q8_0", "repacked-4x8", 34, ggml_gemv_q8_0_4x8_q8_0, kSmmla ? ggml_gemm_q8_0_4x8_q8_0 : nullptr);
  repacked("Q4_0", "repacked-4x4", 18, ggml_gemv_q4_0_4x4_q8_0, ggml_gemm_q4_0_4x4_q8_0);
  repacked("Q4_0", "repacked-4x8", 18, ggml_gemv_q4_0_4x8_q8_0, kSmmla ? ggml_gemm_q4_0_4x8_q8_0 : nullptr);
  vec_dot("Q8_0", 34, ggml_vec_dot_q8_0_q8_0);
  vec_dot("Q4_0", 18, ggml_vec_dot_q4_0_q8_0);
  vec_dot("Q4_1", 20, ggml_vec_dot_q4_1_q8_1);
}
