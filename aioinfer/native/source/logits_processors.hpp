// LogitsProcessors: masks and penalties; see aioinfer.sampling.logits_processors and .penalties.
//
// Most of a row does not change: these search for the few tokens that do.
#pragma once

#include "filters.hpp"

namespace aioinfer {

// Tokens of a row per task: a multiple of LANES and of the bits of a mask's word.
constexpr int64_t SPAN = 4096;

inline int64_t spans(int64_t vocab) { return (vocab + SPAN - 1) / SPAN; }

struct Penalties {
  float repetition, presence, frequency;

  // The logit of a token that was generated ``said`` times, or is in the prompt.
  float operator()(float logit, int32_t said) const {
    const float repeated = logit > 0 ? logit / repetition : logit * repetition;
    return repeated - frequency * static_cast<float>(said) - presence * (said > 0 ? 1.0f : 0.0f);
  }
};

// Penalised logits of a span of a row. ``counts``: how often each token was generated, plus ``in_prompt`` if it
// is in the prompt.
inline void penalise(const float* logits, const int32_t* counts, int64_t size, const Penalties& penalties,
                     int32_t in_prompt, float* out) {
  std::memcpy(out, logits, sizeof(float) * size);
  const auto one = [&](int64_t i) {
    if (counts[i]) out[i] = penalties(logits[i], counts[i] & (in_prompt - 1));
  };
  int64_t at = 0;
  for (; at + LANES <= size; at += LANES)
    for (uint32_t seen = lanes_of(load<Ints>(counts + at) != 0); seen; seen &= seen - 1) one(at + std::countr_zero(seen));
  for (; at < size; at++) one(at);
}

// Set tokens ``from`` to ``to`` of a row to -inf where ``words`` have no bit; tokens beyond the last word have none.
inline void forbid(float* logits, int64_t from, int64_t to, const uint32_t* words, int64_t count) {
  for (int64_t at = from; at < to; at += 32) {
    const uint32_t forbidden = at / 32 < count ? ~words[at / 32] : ~0u;
    if (!forbidden) continue;
    for (int64_t i = at; i < std::min(at + 32, to); i++)
      logits[i] = forbidden >> (i - at) & 1 ? -INFINITY : logits[i];
  }
}

}  // namespace aioinfer
