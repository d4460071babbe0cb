// The entry points that do not depend on the type of a model.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "interface.hpp"
#include "layout.hpp"
#include "simd.hpp"
#include "thread_pool.hpp"
#include "weights.hpp"

namespace aioinfer {

template void multiply_by_vectors(const Activations<float>&, const Weights<float>&, int64_t, int64_t, int64_t, int64_t,
                                  const Sink&);

Error& last_error() {
  thread_local Error error;
  return error;
}

}  // namespace aioinfer

using namespace aioinfer;

extern "C" {

const char* aioinfer_error() { return last_error().text.c_str(); }

int aioinfer_error_kind() { return static_cast<int>(last_error().kind); }

// The argument structures as they were compiled; see layout.hpp.
const char* aioinfer_layout() {
  return guarded<const char*>(nullptr, [] {
    static const std::string text = layout();
    return text.c_str();
  });
}

// Lanes of a vector: what the processor was compiled for.
int aioinfer_lanes() { return LANES; }

// The instruction sets that products were compiled for, in words.
const char* aioinfer_instructions() {
  if constexpr (tiles::KIND == tiles::Kind::PROCESSOR) return "AMX tiles";
  if constexpr (tiles::KIND == tiles::Kind::MODEL) return "modelled tiles";
#if defined(__AVX512BF16__)
  return "AVX-512 bf16";
#elif defined(__AVX512F__)
  return "AVX-512";
#elif defined(__AVX2__)
  return "AVX2";
#elif defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return "NEON i8mm bf16";
#elif defined(__ARM_FEATURE_DOTPROD)
  return "NEON dotprod";
#elif defined(__aarch64__)
  return "NEON";
#else
  return "plain";
#endif
}

// The class of float arithmetic: results of equal ones have the same bits. Numbers of models that are not bfloat16, and
// products of quantised weights, are "fused" wherever others of the library are not "unfused": tiles and BFDOT multiply
// packed bfloat16 only, and, with tiles, attention is theirs, too.
const char* aioinfer_arithmetic() {
#if !(defined(__FMA__) || defined(__AVX512F__) || defined(__aarch64__))
  return "unfused";
#elif defined(AIOINFER_ARM_BFLOAT16)
  return "bf16 dot";
#else
  return tiles::ENABLED ? "tiles" : "fused";
#endif
}

void* aioinfer_thread_pool(int threads) {
  return guarded<void*>(nullptr, [&] { return new ThreadPool(threads); });
}

void aioinfer_free_thread_pool(void* pool) { delete static_cast<ThreadPool*>(pool); }

// A number that almost surely differs if a byte of the memory does: to recognise damage, not malice.
bool aioinfer_checksum(ThreadPool* pool, const char* from, int64_t bytes, uint64_t* out) {
  return guarded(false, [&] {
    constexpr int64_t PART = 1 << 20, WORDS = 8;
    constexpr uint64_t FACTOR = 0x9e3779b97f4a7c15u;  // odd: no information is lost
    std::vector<uint64_t> parts((bytes + PART - 1) / PART);
    pool->run([&](Worker& worker) {
      worker.parallel(static_cast<int64_t>(parts.size()), [&](int64_t part) {
        uint64_t sums[WORDS] = {};
        const char *at = from + part * PART, *end = from + std::min(bytes, (part + 1) * PART);
        for (; end - at >= static_cast<int64_t>(sizeof(sums)); at += sizeof(sums)) {
          uint64_t words[WORDS];
          std::memcpy(words, at, sizeof(words));
          for (int i = 0; i < WORDS; i++) {
            sums[i] = (sums[i] ^ words[i]) * FACTOR;
            sums[i] ^= sums[i] >> 32;
          }
        }
        for (; at < end; at++) sums[0] = (sums[0] ^ static_cast<unsigned char>(*at)) * FACTOR;
        for (const uint64_t sum : sums) parts[part] = (parts[part] ^ sum) * FACTOR;
      });
    });
    *out = static_cast<uint64_t>(bytes);
    for (const uint64_t part : parts) *out = (*out ^ part) * FACTOR;
    return true;
  });
}

// Ask for huge pages where the system has any; the contents of the memory stay.
bool aioinfer_huge_pages(void* from, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t huge = uintptr_t{1} << 21;
  const uintptr_t at = reinterpret_cast<uintptr_t>(from), begin = (at + huge - 1) / huge * huge;
  const uintptr_t end = (at + static_cast<uintptr_t>(bytes)) / huge * huge;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
  return true;
}
}
