// Logprobs of one row; see aioinfer.sampling.logprobs.
#pragma once

#include "filters.hpp"

namespace aioinfer {

// The maximum of a row, and the logarithm of the sum of exp relative to it: subtracted from a logit in this order they
// give its logprob. Stretches are added up in order, each relative to its own maximum, in one pass over the row.
class Likelihoods {
 public:
  static int64_t groups(int64_t vocab) { return (vocab + STRETCH - 1) / STRETCH * LANES; }

  // ``maxima`` [groups]: scratch.
  Likelihoods(const float* logits, int64_t vocab, float* maxima) : logits_(logits), vocab_(vocab), maxima_(maxima) {
    double total = 0;
    for (int64_t from = 0; from < vocab; from += STRETCH) {
      const int64_t to = std::min(from + STRETCH, vocab);
      Floats most = Floats{} - INFINITY;
      for (int64_t at = from; at < to; at += LANES) most = larger(piece(logits, at, vocab), most);
      store(maxima + from / STRETCH * LANES, most);
      const float local = largest(most);
      // A stretch of -inf adds 0; NaN stays NaN.
      const Floats base = spread(local == -INFINITY ? 0.0f : local);
      const int64_t size = (to - from + SUM_LANES - 1) / SUM_LANES * SUM_LANES;
      const double part = sum_over(size, [&](int64_t at, Floats sums) __attribute__((always_inline)) {
        return sums + exponential(piece(logits, from + at, vocab) - base);
      });
      if (local > peak_) total *= std::exp(double{peak_} - local), peak_ = local;
      total += part * (local == -INFINITY ? 1.0 : std::exp(double{local} - peak_));
    }
    log_total_ = static_cast<float>(std::log(total));
  }

  float peak() const { return peak_; }
  float log_total() const { return log_total_; }

  // The ``top`` likeliest tokens, in order; of equals the lower id first. NaN ranks among them, so that it is seen.
  void likeliest(int64_t top, float* logprobs, int64_t* ids) {
    if (!top) return;
    float bound = -INFINITY;
    if (top <= groups(vocab_)) {
      // At least ``top`` logits are not below this maximum.
      std::nth_element(maxima_, maxima_ + (top - 1), maxima_ + groups(vocab_), std::greater<>());
      bound = maxima_[top - 1];
    }
    int64_t found = 0;
    for (int64_t at = 0; at < vocab_; at += LANES) {
      const Floats logit = piece(logits_, at, vocab_);
      for (uint32_t above = lanes_of(~(logit < bound)); above; above &= above - 1) {
        const int64_t id = at + std::countr_zero(above);
        if (id < vocab_ && (found < top || logits_[id] > logits_[ids[top - 1]])) insert(id, top, found, ids);
      }
    }
    for (int64_t i = 0; i < top; i++) logprobs[i] = logits_[ids[i]] - peak_ - log_total_;
  }

 private:
  // tokens
  static constexpr int64_t STRETCH = 1024;

  // Insert a token behind those that are at least as likely, and drop the last one if there are too many.
  void insert(int64_t id, int64_t top, int64_t& found, int64_t* ids) const {
    int64_t to = found < top ? found++ : top - 1;
    for (; to && logits_[id] > logits_[ids[to - 1]]; to--) ids[to] = ids[to - 1];
    ids[to] = id;
  }

  const float* logits_;
  int64_t vocab_;
  float* maxima_;
  float peak_ = -INFINITY, log_total_;
};

}  // namespace aioinfer
