// SelfAttention: the first half of a layer with keys and values; see aioinfer.model.mixers.self_attention.
//
// Layers may differ in their heads. A *division* is what those with heads of one shape have in common: the tasks of a
// step and the scratch memory of the workers.
#pragma once

#include <cmath>
#include <memory>
#include <vector>

#include "attention.hpp"
#include "linear.hpp"

namespace aioinfer {

// Queries grow by the logarithm of how many ``length`` their position is; see aioinfer.model.mixers.self_attention.
struct Growth {
  float rate;  // 0: they do not
  int64_t length;

  float of(int64_t position) const {
    return rate == 0 ? 1.0f : 1.0f + rate * std::log(1.0f + static_cast<float>(position / length));
  }
};

template <class T>
struct SelfAttention {
  HeadShape<T> shape;  // its norm: of each head by itself
  const float* whole_norm;  // [heads + kv_heads, head_dim], of all queries and of all keys of a token; or null
  const Linear<T>* into;    // hidden to queries, keys and values; gated, and to the gates of the results behind them
  bool gated;               // results are multiplied by the sigmoids of their gates
  Rotary<T> rotary;
  const Linear<T>* out;
  AttentionParams params;
  Growth growth;
  int64_t kv;             // which pool has its keys and values, or those that it shares
  int64_t division = -1;  // of the decoder's; it knows

  // Throws InvalidArguments unless the parts fit each other and a residual of size ``hidden``; ``words``: it reads the
  // vectors of tokens beside that.
  void check(int64_t hidden, bool words = false) const {
    aioinfer::check(params);
    shape.check(rotary.size);
    require(kv >= 0, "the index of a KV pool is negative");
    require(whole_norm == nullptr || shape.norm == nullptr, "queries are normed by head and as a whole");
    require(whole_norm == nullptr || !shape.shared, "shared keys are normed");
    require(growth.rate == 0 || (shape.norm == nullptr && growth.length > 0), "queries cannot grow so");
    require_size(*into, width(), words ? 2 * hidden : hidden);
    require_size(*out, hidden, results());
  }

  // Elements of the results of a token, and of its projection.
  int64_t results() const { return shape.heads * shape.head_dim; }
  int64_t width() const { return shape.width() + (gated ? results() : 0); }

  // Whether this layer stores what another one with heads of a shape shares.
  bool stores_for(const SelfAttention& other) const {
    return kv == other.kv && !shape.shared && shape.kv_heads == other.shape.kv_heads &&
           shape.head_dim == other.shape.head_dim;
  }

  // Norm all queries of a token as one vector, and all keys as another; and scale the queries.
  void prepare(T* token, int64_t position) const {
    const int64_t queries = shape.heads * shape.head_dim;
    if (whole_norm != nullptr) {
      norm_in_place(token, queries, whole_norm, shape.eps);
      norm_in_place(token + queries, shape.kv_heads * shape.head_dim, whole_norm + queries, shape.eps);
    }
    const float scale = growth.of(position);
    if (scale == 1.0f) return;
    for (int64_t i = 0; i < queries; i += LANES)
      Number<T>::store_lanes(token + i, Number<T>::load_lanes(token + i) * scale);
  }
};

template <class T>
class Divisions {
 public:
  // Which division layers with such heads belong to.
  int64_t of(const HeadShape<T>& shape) {
    for (size_t i = 0; i < all_.size(); i++)
      if (shape.same_heads(all_[i].shape)) return i;
    all_.push_back({shape, {}, {}});
    return all_.size() - 1;
  }

  void divide(const Rows& rows, int workers) {
    for (Division& division : all_) {
      division.tasks = aioinfer::divide<T>(rows, division.shape, workers);
      while (static_cast<int>(division.scratch.size()) < workers)
        division.scratch.push_back(std::make_unique<AttentionScratch<T>>(division.shape.head_dim));
    }
  }

  const std::vector<AttentionTask>& tasks(int64_t index) const { return all_[index].tasks; }
  AttentionScratch<T>& scratch(int64_t index, int worker) const { return *all_[index].scratch[worker]; }

 private:
  struct Division {
    HeadShape<T> shape;
    std::vector<AttentionTask> tasks;
    std::vector<std::unique_ptr<AttentionScratch<T>>> scratch;
  };
  std::vector<Division> all_;
};

}  // namespace aioinfer
