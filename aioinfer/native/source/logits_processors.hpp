// LogitsProcessors: what callers ask of single tokens, and penalties; see aioinfer.sampling.logits_processors and .penalties.
//
// Most of a row is left as it is, so these look for the few tokens that are not.
#pragma once

#include "filters.hpp"

namespace aioinfer {

// Tokens of a row that are looked at in one go: a multiple of what a word of a mask has, and of LANES.
constexpr int64_t SPAN = 4096;

inline int64_t spans(int64_t vocab) { return (vocab + SPAN - 1) / SPAN; }

struct Penalties {
  float repetition, presence, frequency;

  // A logit of a token that was said ``said`` times, and possibly asked.
  float operator()(float logit, int32_t said) const {
    const float repeated = logit > 0 ? logit / repetition : logit * repetition;
    return repeated - frequency * static_cast<float>(said) - presence * (said > 0 ? 1.0f : 0.0f);
  }
};

// Penalised logits of a span of a row. ``counts``: how often each token was said, plus ``in_prompt`` if it was asked.
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

// Set to -inf what the bits of ``words`` do not allow, of tokens ``from`` to ``to`` of a row; what lies beyond the last
// word is not allowed.
inline void forbid(float* logits, int64_t from, int64_t to, const uint32_t* words, int64_t count) {
  for (int64_t at = from; at < to; at += 32) {
    const uint32_t forbidden = at / 32 < count ? ~words[at / 32] : ~0u;
    if (!forbidden) continue;
    for (int64_t i = at; i < std::min(at + 32, to); i++)
      logits[i] = forbidden >> (i - at) & 1 ? -INFINITY : logits[i];
  }
}

}  // namespace aioinfer
