// The entry points that do not depend on the type of a model.
#include <sys/mman.h>

#include "interface.hpp"
#include "layout.hpp"
#include "simd.hpp"
#include "thread_pool.hpp"

namespace aioinfer {

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
#else
  return "plain";
#endif
}

void* aioinfer_thread_pool(int threads) {
  return guarded<void*>(nullptr, [&] { return new ThreadPool(threads); });
}

void aioinfer_free_thread_pool(void* pool) { delete static_cast<ThreadPool*>(pool); }

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
