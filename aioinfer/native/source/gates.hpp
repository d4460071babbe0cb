// Gates: the functions between the two products of a feed-forward part; see aioinfer.model.gates.
#pragma once

#include "checks.hpp"
#include "simd.hpp"

namespace aioinfer {

// Their numbers are those of aioinfer.native.arguments.
enum class Gate : int64_t { NONE, SILU, GELU_TANH };

inline void check(Gate gate) {
  require(gate >= Gate::NONE && gate <= Gate::GELU_TANH, "there is no such gate");
}

// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), with 1 + tanh(u) = 2 / (1 + e^(-2u))
AIOINFER_INLINE Floats gelu_tanh(Floats x) {
  const Floats twice = 1.5957691216057308f * (x + 0.044715f * x * x * x);
  return x / (1.0f + exponential(-twice));
}

AIOINFER_INLINE Floats activated(Gate gate, Floats value) {
  switch (gate) {
    case Gate::SILU:
      return silu(value);
    case Gate::GELU_TANH:
      return gelu_tanh(value);
    default:
      return value;
  }
}

}  // namespace aioinfer
