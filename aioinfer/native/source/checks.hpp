// Checks of what a caller passes. Kernels trust sizes and indices: entry points compare these, once per call, with the
// memory that they refer to, and a call that is refused has computed nothing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace aioinfer {

// The caller's mistake, not a lack of anything.
struct InvalidArguments : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

inline void require(bool holds, const char* otherwise) {
  if (!holds) throw InvalidArguments(otherwise);
}

// Every one of ``count`` indices is at least 0 and less than ``end``.
inline void require_below(const char* name, const int64_t* indices, int64_t count, int64_t end) {
  // Without a sign, negative indices are large: one maximum is enough, and the loop is vectorised.
  uint64_t most = 0;
  for (int64_t i = 0; i < count; i++) most = std::max(most, static_cast<uint64_t>(indices[i]));
  if (count <= 0 || most < static_cast<uint64_t>(std::max<int64_t>(end, 0))) return;
  const int64_t* bad = std::find_if(indices, indices + count, [&](int64_t index) { return index < 0 || index >= end; });
  throw InvalidArguments(std::string(name) + "[" + std::to_string(bad - indices) + "] is " + std::to_string(*bad) +
                         ", not in [0, " + std::to_string(end) + ")");
}

}  // namespace aioinfer
