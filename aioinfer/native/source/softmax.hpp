// Softmax: of scores that arrive in stretches of SPAN positions, counted from the start of a sequence.
//
// The weights of a stretch are relative to the best score so far; a better one shrinks what was summed up before (Milakov
// and Gimelshein, 2018; Dao et al., 2022).
#pragma once

#include <algorithm>
#include <cmath>

#include "simd.hpp"

namespace aioinfer {

constexpr int SPAN = 128;

// Constants of a layer: the positions that a query sees, and the scale of scores.
struct AttentionParams {
  float scale;
  float soft_cap;  // 0: none
  int64_t window;  // positions up to a query's own; 0: all
  int64_t block;   // positions of a block; a query sees its own block to the end; 1: causal
  // [heads] of each query head the score of a position that all queries see and that has no value, or null: none (Xiao
  // et al., arXiv 2309.17453; learned in gpt-oss)
  const float* sinks = nullptr;
  bool spans = false;  // a query that is in a span sees that to the end

  int64_t first_visible(int64_t position) const { return window && position >= window ? position - window + 1 : 0; }
  // ``span``: the end of the query's span, or of any position before its own.
  int64_t behind_visible(int64_t position, int64_t span, int64_t length) const {
    return std::min(std::max((position / block + 1) * block, span), length);
  }
};

// What the result of a query over some positions is made of: the best score, and the sums of weights relative to it and of
// weighted values.
struct Weighted {
  float best, total;
  float* sums;

  // Add those over the positions behind them.
  void merge(const Weighted& other, int64_t size) {
    const float now = std::max(best, other.best);
    const float own = exponential(spread(best - now))[0], added = exponential(spread(other.best - now))[0];
    for (int64_t d = 0; d < size; d += LANES)
      store(sums + d, load<Floats>(sums + d) * own + load<Floats>(other.sums + d) * added);
    total = total * own + other.total * added, best = now;
  }
};

// The state of at most MOST queries.
template <int MOST>
class Softmax {
 public:
  explicit Softmax(const AttentionParams& params) : params_(params) {}

  // Query ``q`` of a head is at ``position`` of a sequence and sees it up to ``behind``.
  void begin(int q, int64_t head, int64_t position, int64_t behind) {
    from_[q] = params_.first_visible(position);
    to_[q] = behind;
    best_[q] = params_.sinks == nullptr ? -INFINITY : params_.sinks[head];
    total_[q] = best_[q] == -INFINITY ? 0 : 1;
  }

  void clip(int q, int64_t from, int64_t to) { from_[q] = std::max(from_[q], from), to_[q] = std::min(to_[q], to); }

  // The first position that one of the queries sees, and the end of those that one of them sees.
  int64_t first(int queries) const { return *std::min_element(from_, from_ + queries); }
  int64_t behind(int queries) const { return *std::max_element(to_, to_ + queries); }

  // Cap and mask the scores of a query at the positions from ``at`` on, and find the best.
  AIOINFER_INLINE void find_best(int q, float* scores, int64_t at, int vectors) {
    Floats best = spread(-INFINITY);
    if (at >= from_[q] && at + vectors * LANES <= to_[q] && params_.soft_cap == 0) {
      for (int v = 0; v < vectors; v++) best = larger(best, load<Floats>(scores + v * LANES));
    } else {
      for (int v = 0; v < vectors; v++) {
        const Floats value = visible(q, at + v * LANES, capped(load<Floats>(scores + v * LANES)));
        store(scores + v * LANES, value);
        best = larger(best, value);
      }
    }
    const float now = std::max(best_[q], largest(best));
    shrink_[q] = now == best_[q] ? 1.0f : exponential(spread(best_[q] - now))[0];
    best_[q] = now;
  }

  // put(offset, LANES weights): the exponentials of these scores.
  template <class Put>
  AIOINFER_INLINE void weigh(int q, const float* scores, int vectors, Put&& put) {
    // No position seen so far: every difference must be minus infinity, not NaN.
    const float base = best_[q] == -INFINITY ? 0.0f : best_[q];
    const float total = sum_over(vectors * LANES, [&](int64_t i, Floats sums) __attribute__((always_inline)) {
      const Floats weight = exponential(load<Floats>(scores + i) - base);
      put(static_cast<int>(i), weight);
      return sums + weight;
    });
    total_[q] = total_[q] * shrink_[q] + total;
  }

  // What sums of former stretches must be multiplied by.
  float shrink(int q) const { return shrink_[q]; }

  float best(int q) const { return best_[q]; }
  float total(int q) const { return total_[q]; }

  // What sums of all stretches must be multiplied by.
  float share(int q) const { return 1.0f / total_[q]; }

 private:
  AIOINFER_INLINE Floats capped(Floats score) const {
    return params_.soft_cap == 0 ? score : params_.soft_cap * hyperbolic_tangent(score / params_.soft_cap);
  }

  // Minus infinity for positions from ``at`` on that a query does not see, whatever their scores.
  AIOINFER_INLINE Floats visible(int q, int64_t at, Floats scores) const {
    if (at >= from_[q] && at + LANES <= to_[q]) return scores;
    Ints lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    const int32_t from = static_cast<int32_t>(std::clamp<int64_t>(from_[q] - at, 0, LANES));
    const int32_t to = static_cast<int32_t>(std::clamp<int64_t>(to_[q] - at, 0, LANES));
    scores = lane < from ? spread(-INFINITY) : scores;
    return lane >= to ? spread(-INFINITY) : scores;
  }

  const AttentionParams& params_;
  int64_t from_[MOST], to_[MOST];
  float best_[MOST], total_[MOST], shrink_[MOST];
};

}  // namespace aioinfer
