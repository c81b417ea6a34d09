// FlashInfer's launchers of its sampling kernels as C functions, so that ctypes can call them.
// Every function takes its arrays first, then sizes and numbers, then the stream, and returns a
// cudaError_t. Built by benchmarks/flashinfer/library.py, which also lists what stands here.
#include <cstdint>
#include <flashinfer/air_top_p.cuh>
#include <flashinfer/sampling.cuh>

#define EXPORT extern "C" __attribute__((visibility("default"))) int
#define STRING(x) #x
#define TEXT(x) STRING(x)

namespace fi = flashinfer::sampling;

namespace {

// What FlashInfer's Python allocates for sums and states between programs.
constexpr size_t WORKSPACE = 1 << 20;
// The defaults of its Python: samplers sum in a fixed order, renormalisation need not, and the kernels
// of the softmax may start early.
constexpr bool DETERMINISTIC = true, RENORM_DETERMINISTIC = false, EARLY = true;
constexpr uint64_t SEED = 0;

int launched(cudaError_t status) { return status == cudaSuccess ? cudaGetLastError() : status; }

}  // namespace

extern "C" __attribute__((visibility("default"))) const char* built_of() {
  return "flashinfer " TEXT(FLASHINFER_VERSION) ", nvcc " TEXT(__CUDACC_VER_MAJOR__) "." TEXT(
      __CUDACC_VER_MINOR__);
}

EXPORT softmax(float* logits, float* probs, float* temperature, void* workspace, uint64_t b,
               uint64_t v, cudaStream_t stream) {
  return launched(fi::OnlineSoftmax<float>(logits, probs, b, v, temperature, 0.0f, workspace,
                                           WORKSPACE, EARLY, stream));
}

EXPORT top_k_sampling_from_probs(float* probs, int* tokens, bool* valid, void* k, uint64_t b,
                                 uint64_t v, uint64_t offset, cudaStream_t stream) {
  // The launcher says float*, and its kernel reads int32.
  return launched(fi::TopKSamplingFromProb<float, int>(
      probs, tokens, valid, nullptr, static_cast<float*>(k), b, 0, v, DETERMINISTIC, nullptr, SEED,
      nullptr, offset, stream));
}

EXPORT top_p_sampling_from_probs(float* probs, int* tokens, bool* valid, float* p, uint64_t b,
                                 uint64_t v, uint64_t offset, cudaStream_t stream) {
  return launched(fi::TopPSamplingFromProb<float, int>(probs, tokens, valid, nullptr, p, b, 0.0f, v,
                                                       DETERMINISTIC, nullptr, SEED, nullptr,
                                                       offset, stream));
}

EXPORT min_p_sampling_from_probs(float* probs, int* tokens, bool* valid, float* p, uint64_t b,
                                 uint64_t v, uint64_t offset, cudaStream_t stream) {
  return launched(fi::MinPSamplingFromProb<float, int>(probs, p, tokens, valid, nullptr, b, 0.0f, v,
                                                       DETERMINISTIC, nullptr, SEED, nullptr,
                                                       offset, stream));
}

EXPORT top_k_top_p_sampling_from_probs(float* probs, int* tokens, bool* valid, int* k, float* p,
                                       uint64_t b, uint64_t v, uint64_t offset,
                                       cudaStream_t stream) {
  return launched(fi::TopKTopPSamplingFromProb<float, int>(
      probs, k, p, tokens, valid, nullptr, b, 0, 0.0f, v, DETERMINISTIC, nullptr, SEED, nullptr,
      offset, stream));
}

EXPORT top_k_mask_logits(__nv_bfloat16* logits, __nv_bfloat16* masked, int* k,
                         fi::RadixRowState* states, uint64_t b, uint64_t v, cudaStream_t stream) {
  return launched(fi::RadixTopKMaskLogitsMultiCTA<__nv_bfloat16, int>(logits, masked, k, b, 0, v,
                                                                      states, stream));
}

EXPORT top_k_renorm_probs(float* probs, float* kept, int* k, fi::RadixRowState* states, uint64_t b,
                          uint64_t v, cudaStream_t stream) {
  return launched(fi::RadixTopKRenormProbMultiCTA<float, int>(probs, kept, k, b, 0, v, states,
                                                              RENORM_DETERMINISTIC, stream));
}

EXPORT top_p_renorm_probs(float* probs, float* kept, float* p, void* workspace, uint64_t b,
                          uint64_t v, cudaStream_t stream) {
  return launched(fi::air_top_p::AirTopPRenormProb<RENORM_DETERMINISTIC, float>(
      probs, kept, p, b, 0.0f, v, workspace, stream));
}

EXPORT top_k(__nv_bfloat16* logits, int* token_ids, __nv_bfloat16* values,
             fi::RadixRowState* states, uint64_t b, uint64_t v, uint64_t k, cudaStream_t stream) {
  return launched(fi::TopKDispatch<__nv_bfloat16, int>(logits, token_ids, values, b, k, v, states,
                                                       true, DETERMINISTIC,
                                                       fi::TopKTieBreak::None, stream));
}
