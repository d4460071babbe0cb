// The part of the interface that does not depend on the type of a model.
#include <sys/mman.h>

#include <cmath>

#include "interface.hpp"
#include "simd.hpp"
#include "team.hpp"

namespace aioinfer {

std::string& last_error() {
  thread_local std::string error;
  return error;
}

namespace {

// The first of the largest of a row, in stretches of which most need no second look. A NaN is largest.
int64_t argmax(const float* values, int64_t width) {
  constexpr int64_t STRETCH = 1024;
  float best = -INFINITY;
  int64_t found = 0;
  for (int64_t from = 0; from < width; from += STRETCH) {
    const int64_t to = std::min(width, from + STRETCH), whole = from + (to - from) / LANES * LANES;
    Ints look{};
    for (int64_t i = from; i < whole; i += LANES) look |= ~(load<Floats>(values + i) <= best);
    int any = 0;
    for (int lane = 0; lane < LANES; lane++) any |= look[lane];
    for (int64_t i = whole; i < to; i++) any |= !(values[i] <= best);
    if (!any) continue;
    for (int64_t i = from; i < to; i++) {
      if (values[i] != values[i]) return i;
      if (values[i] > best) best = values[i], found = i;
    }
  }
  return found;
}

}  // namespace
}  // namespace aioinfer

using namespace aioinfer;

extern "C" {

const char* aioinfer_error() { return last_error().c_str(); }

// Lanes of a vector: what the processor was compiled for.
int aioinfer_lanes() { return LANES; }

void* aioinfer_team(int threads) {
  return guarded<void*>(nullptr, [&] { return new Team(threads); });
}

void aioinfer_free_team(void* team) { delete static_cast<Team*>(team); }

// Have memory lie on huge pages where the system has any; what is there already stays as it is.
bool aioinfer_huge_pages(void* from, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t huge = uintptr_t{1} << 21;
  const uintptr_t at = reinterpret_cast<uintptr_t>(from), begin = (at + huge - 1) / huge * huge;
  const uintptr_t end = (at + static_cast<uintptr_t>(bytes)) / huge * huge;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
  return true;
}

// ``out`` [rows]: the first of the largest of each row of ``values`` [rows, width]; a NaN is largest.
bool aioinfer_argmax(void* team, const float* values, int64_t rows, int64_t width, int64_t* out) {
  return guarded(false, [&] {
    static_cast<Team*>(team)->run([&](Member& member) {
      member.parallel(rows, [&](int64_t row) { out[row] = argmax(values + row * width, width); });
    });
    return true;
  });
}
}
