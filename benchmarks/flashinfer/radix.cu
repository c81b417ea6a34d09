// FlashInfer's newest sampler, `flashinfer.cake_sampling`, as a C function. A cluster of programs per
// row selects the largest k by radix; for k up to 64 its first program then applies top-p and draws,
// so that one launch does it all. Its kernels are generated: benchmarks/flashinfer/library.py takes the
// two that FlashInfer's own choice (`_launch_plan`) falls on here, out of 126.
#include <cstdint>
#include <cuda_runtime.h>
#include "radix_kernels.cuh"

#define EXPORT extern "C" __attribute__((visibility("default"))) int

namespace {

struct Plan {
  const void* kernel;
  int cluster;
};

constexpr int THREADS_OF_A_PROGRAM = 512, SHARED_BYTES = 199168;
// k and p are arrays of rows; and draw in this launch.
constexpr int PER_ROW = 2, FUSED = 1;

// What `_launch_plan` returns for 132 multiprocessors of capability 9.0, V = 131072 and k = 50: a
// cluster of 8 for 8 rows, and of 2 for 64.
Plan plan_of(uint64_t b) {
  if (b <= 8) return {reinterpret_cast<const void*>(&kernel_cake_radix_topk_c8_e16s_cs_lp), 8};
  return {reinterpret_cast<const void*>(&kernel_cake_radix_topk_c2_e16s_sp_lp), 2};
}

}  // namespace

EXPORT radix_top_k_top_p(float* probs, int* k, float* p, int* tokens, float* values, int* ids,
                         int* counts, uint64_t b, uint64_t v, uint64_t offset,
                         cudaStream_t stream) {
  Plan plan = plan_of(b);
  cudaError_t status = cudaFuncSetAttribute(
      plan.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
  if (status != cudaSuccess) return status;
  int vocab = static_cast<int>(v), none = 0, per_row = PER_ROW, flags = FUSED;
  float whole = 0.0f;
  unsigned int zero = 0, low = static_cast<unsigned int>(offset);
  unsigned int high = static_cast<unsigned int>(offset >> 32);
  // The arguments of its kernels, in their order.
  void* arguments[] = {&probs,  &k,      &values, &ids,  &counts, &vocab, &none,
                       &per_row, &p,     &tokens, &values, &whole, &per_row, &zero,
                       &zero,   &low,    &high,   &none, &flags};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned int>(b * plan.cluster));
  config.blockDim = dim3(THREADS_OF_A_PROGRAM);
  config.dynamicSmemBytes = SHARED_BYTES;
  config.stream = stream;
  return cudaLaunchKernelExC(&config, plan.kernel, arguments);
}
