// Routing: the experts of a token and their weights; see aioinfer.model.moe.routing.
#pragma once

#include <cmath>
#include <memory>
#include <type_traits>
#include <vector>

#include "weights.hpp"

namespace aioinfer {

// The best of the offered scores, best first; of equal scores the first one offered. NaN is better than any number.
class Best {
 public:
  explicit Best(int64_t most) : scores_(most), numbers_(most) {}

  void clear(int64_t size) { size_ = size, count_ = 0; }

  AIOINFER_INLINE void offer(float score, int64_t number) {
    if (score != score) score = INFINITY;
    if (count_ < size_)
      count_++;
    else if (!(score > scores_[size_ - 1]))
      return;
    int64_t at = count_ - 1;
    for (; at > 0 && score > scores_[at - 1]; at--) scores_[at] = scores_[at - 1], numbers_[at] = numbers_[at - 1];
    scores_[at] = score, numbers_[at] = number;
  }

  int64_t count() const { return count_; }
  int64_t number(int64_t at) const { return numbers_[at]; }

 private:
  std::vector<float> scores_;
  std::vector<int64_t> numbers_;
  int64_t size_ = 0, count_ = 0;
};

// The parameters of a router. Groups are consecutive experts of equal number; a token uses ``top_groups`` of them.
struct Rule {
  bool sigmoid;  // the score of each expert by itself; else a softmax over all of them
  bool rounds;   // scores and weights are rounded to T
  int64_t experts, top_k, groups, top_groups;
  bool normalize;
  float scale;
};

// Scratch memory of one worker, for one token at a time.
struct RoutingScratch {
  explicit RoutingScratch(int64_t experts) : wanted(experts), best(experts), groups(experts), open(experts) {}
  std::vector<float> wanted;
  Best best, groups;
  std::vector<char> open;
};

// Scores are computed in float whatever T is. Of most models with a softmax, weights are rounded to T, and scores, too,
// unless a bias affects the choice, as in the training of these models.
template <class T>
class Router {
 public:
  // ``bias`` [experts] or null affects the choice, not the weights; ``scales`` [experts] or null are factors of the
  // weights, which are not rounded then (Gemma 4).
  Router(const Weights<float>* weight, const float* bias, const Rule& rule, const float* scales = nullptr)
      : weight(weight), rule(rule) {
    if (bias != nullptr) bias_.assign(bias, bias + rule.experts);
    if (scales != nullptr) scales_.assign(scales, scales + rule.experts);
  }

  // Floats from the scores of one token to those of the next.
  int64_t stride() const { return (weight->panels * PANEL + SUM_LANES - 1) / SUM_LANES * SUM_LANES; }

  // Scores [tokens, stride()] of all tokens.
  void score(Worker& worker, const Activations<float>& tokens, float* scores) const {
    const bool exact = !rule.rounds || !bias_.empty();
    const auto put = [&](const Place& place, int64_t panel, Floats one, Floats other) {
      float* to = scores + place.row * stride() + panel * PANEL;
      store(to, exact ? one : rounded<T>(one));
      store(to + LANES, exact ? other : rounded<T>(other));
    };
    multiply(worker, tokens, *weight, Sink(put, tokens.blocks.height));
  }

  // From one token's scores, which are overwritten, to its ``top_k`` experts, best first, and their weights.
  void choose(float* scores, float* weights, int64_t* experts, RoutingScratch& scratch) const {
    if (rule.sigmoid)
      sigmoid(scores);
    else
      softmax(scores);
    const float* wanted = scores;
    if (!bias_.empty()) {
      for (int64_t e = 0; e < rule.experts; e++) scratch.wanted[e] = scores[e] + bias_[e];
      wanted = scratch.wanted.data();
    }
    offer(wanted, scratch);
    float total = 1e-20f;
    for (int64_t j = 0; j < rule.top_k; j++) {
      experts[j] = scratch.best.number(j);
      weights[j] = scores[experts[j]];
      total += weights[j];
    }
    for (int64_t j = 0; j < rule.top_k; j++) {
      const float weight = (rule.normalize ? weights[j] / total : weights[j]) * rule.scale;
      if (scales_.empty())
        weights[j] = rule.rounds ? Number<T>::read(Number<T>::make(weight)) : weight;
      else
        weights[j] = weight * scales_[experts[j]];
    }
  }

  const Weights<float>* weight;
  Rule rule;

 private:
  void sigmoid(float* scores) const {
    for (int64_t e = 0; e < stride(); e += LANES)
      store(scores + e, 1.0f / (1.0f + exponential(-load<Floats>(scores + e))));
  }

  // NaN in one score makes all of them NaN.
  void softmax(float* scores) const {
    std::fill(scores + rule.experts, scores + stride(), -INFINITY);
    Floats most = spread(-INFINITY);
    for (int64_t e = 0; e < stride(); e += LANES) most = larger(most, load<Floats>(scores + e));
    const float peak = largest(most);
    const float all = sum_over(stride(), [&](int64_t e, Floats sums) __attribute__((always_inline)) {
      const Floats share = exponential(load<Floats>(scores + e) - peak);
      store(scores + e, share);
      return sums + share;
    });
    for (int64_t e = 0; e < stride(); e += LANES) store(scores + e, load<Floats>(scores + e) / all);
  }

  // Offer the experts of the best groups; the score of a group is the sum of its two best experts, with a softmax that of
  // its best one.
  void offer(const float* wanted, RoutingScratch& scratch) const {
    const int64_t size = rule.experts / rule.groups;
    std::fill_n(scratch.open.begin(), rule.groups, rule.top_groups == rule.groups);
    if (rule.top_groups < rule.groups) {
      scratch.groups.clear(rule.top_groups);
      for (int64_t group = 0; group < rule.groups; group++) {
        scratch.best.clear(std::min<int64_t>(rule.sigmoid ? 2 : 1, size));
        for (int64_t e = group * size; e < (group + 1) * size; e++) scratch.best.offer(wanted[e], e);
        float goodness = 0;
        for (int64_t at = 0; at < scratch.best.count(); at++) goodness += wanted[scratch.best.number(at)];
        scratch.groups.offer(goodness, group);
      }
      for (int64_t at = 0; at < rule.top_groups; at++) scratch.open[scratch.groups.number(at)] = true;
    }
    scratch.best.clear(rule.top_k);
    for (int64_t group = 0; group < rule.groups; group++)
      if (scratch.open[group])
        for (int64_t e = group * size; e < (group + 1) * size; e++) scratch.best.offer(wanted[e], e);
  }

  std::vector<float> bias_, scales_;
};

// Chooses the experts of a step's tokens. Holds the results of one layer at a time.
template <class T>
class Routing {
 public:
  // The only function here that throws.
  void reserve(int workers, int64_t tokens, const Router<T>& router) {
    const int64_t experts = router.rule.experts;
    grow(floats_, Activations<float>::units(tokens, router.weight->inner));
    grow(scores_, tokens * router.stride());
    grow(weights_, tokens * router.rule.top_k);
    grow(experts_, tokens * router.rule.top_k);
    scratch_.resize(workers);
    for (auto& scratch : scratch_)
      if (scratch == nullptr || static_cast<int64_t>(scratch->open.size()) < experts)
        scratch = std::make_unique<RoutingScratch>(experts);
  }

  // Room for tokens as float, for route().
  Activations<float> floats(int64_t tokens, int64_t inner) { return {floats_.data(), tokens, inner}; }

  void route(Worker& worker, const Router<T>& router, const Activations<float>& tokens) {
    router.score(worker, tokens, scores_.data());
    const int64_t top_k = router.rule.top_k;
    worker.parallel_in_runs(tokens.blocks.rows, [&](int64_t token) {
      router.choose(&scores_[token * router.stride()], &weights_[token * top_k], &experts_[token * top_k],
                    *scratch_[worker.index()]);
    });
  }

  // [tokens, top_k]
  const float* weights() const { return weights_.data(); }
  const int64_t* experts() const { return experts_.data(); }

 private:
  Buffer<uint32_t> floats_;
  std::vector<float> scores_, weights_;
  std::vector<int64_t> experts_;
  std::vector<std::unique_ptr<RoutingScratch>> scratch_;
};

}  // namespace aioinfer
