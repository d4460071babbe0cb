// Gates: the functions between the two products of a feed-forward part; see aioinfer.model.gates.
#pragma once

#include "checks.hpp"
#include "simd.hpp"

namespace aioinfer {

// Their numbers are those of aioinfer.native.arguments.
enum class Gate : int64_t { NONE, SILU, GELU_TANH, CLAMPED_SILU, GELU, RELU, RELU_SQUARED };

// ``gated``: of weights with gates.
inline void check(Gate gate, bool gated) {
  require(gate >= Gate::NONE && gate <= Gate::RELU_SQUARED, "there is no such gate");
  require(gated || gate != Gate::CLAMPED_SILU, "a clamped gate clamps what it gates, too");
}

// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), with 1 + tanh(u) = 2 / (1 + e^(-2u))
AIOINFER_INLINE Floats gelu_tanh(Floats x) {
  const Floats twice = 1.5957691216057308f * multiply_add(x, 0.044715f * x * x, x);
  return x / (1.0f + exponential(-twice));
}

// x / 2 * (1 + erf(x / sqrt(2))). With u = |x| / sqrt(2), erfc(u) is a polynomial of t = 1 / (1 + 0.3275911 u) times
// e^(-u^2), of which the error is below 1.5e-7 (Abramowitz and Stegun, 7.1.26).
AIOINFER_INLINE Floats gelu(Floats x) {
  const Floats u = 0.70710678f * (x < 0.0f ? -x : x), t = 1.0f / (1.0f + 0.3275911f * u);
  Floats sum = multiply_add(spread(-1.453152027f), spread(1.061405429f), t);
  sum = multiply_add(spread(1.421413741f), sum, t);
  sum = multiply_add(spread(-0.284496736f), sum, t);
  sum = multiply_add(spread(0.254829592f), sum, t);
  const Floats tail = 0.5f * sum * t * exponential(-u * u);  // of the normal distribution, beyond |x|
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

// NaN stays NaN.
AIOINFER_INLINE Floats relu(Floats x) { return x < 0.0f ? Floats{} : x; }

AIOINFER_INLINE Floats activated(Gate gate, Floats value) {
  switch (gate) {
    case Gate::SILU:
      return silu(value);
    case Gate::GELU_TANH:
      return gelu_tanh(value);
    case Gate::GELU:
      return gelu(value);
    case Gate::RELU:
      return relu(value);
    case Gate::RELU_SQUARED:
      return relu(value) * relu(value);
    default:
      return value;
  }
}

AIOINFER_INLINE Floats sigmoid(Floats x) { return 1.0f / (1.0f + exponential(-x)); }

// The gate of gpt-oss: x * sigmoid(1.702 x) * (up + 1), with x at most 7 and up between -7 and 7; NaN stays NaN.
AIOINFER_INLINE Floats clamped_silu(Floats x, Floats up) {
  constexpr float LIMIT = 7.0f;
  x = x > LIMIT ? spread(LIMIT) : x;
  up = up > LIMIT ? spread(LIMIT) : up;
  up = up < -LIMIT ? spread(-LIMIT) : up;
  return x / (1.0f + exponential(-1.702f * x)) * (up + 1.0f);
}

AIOINFER_INLINE Floats gated(Gate gate, Floats value, Floats up) {
  return gate == Gate::CLAMPED_SILU ? clamped_silu(value, up) : activated(gate, value) * up;
}

}  // namespace aioinfer
