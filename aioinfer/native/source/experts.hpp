// Experts: the SwiGLUs of a layer, or parts without gates, of which each token uses a few, and a shared one that all
// tokens use.
//
//   tokens      2 0 1 3 ..        rows, by expert      gated, by row         outputs, by pair
//   ┌ normed ─► choose ─► gather ┌ expert 0: 0 4 7 ┐ ─► gate, up ┌──┐ ─► down ┌ token 0: best, .. ┐ ─► + ─► residual
//   │                            └ expert 2: 1 5   ┘             └──┘         └ token 1: best, .. ┘    ▲
//   └───────────────────────────────────────────────────────────────────────────────── shared ─────────┘
//
// A *pair* is a token and one of its experts; pairs are ordered by token, best expert first. The output of a pair is
// a function of the token's row, and the outputs of a token are added up in the order of its pairs: its result does
// not depend on other tokens. The weights of experts without tokens are not read.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "gates.hpp"
#include "linear.hpp"
#include "routing.hpp"

namespace aioinfer {

// The experts of a layer, which are made of two linear layers each; those are kept.
template <class T>
class Experts {
 public:
  // Throws InvalidArguments unless all have the same sizes, and their first layers can multiply the same inputs.
  Experts(int64_t count, const Linear<T>* const* gate_up, const Linear<T>* const* down) : count(count) {
    require(count > 0, "experts need a number");
    gate_up_.assign(gate_up, gate_up + count), down_.assign(down, down + count);
    hidden = down_[0]->outputs, middle = down_[0]->inner;
    require(hidden % SUM_LANES == 0 && middle % SUM_LANES == 0, "the sizes of experts are no multiples of a vector");
    for (int64_t e = 0; e < count; e++) {
      require_size(*gate_up_[e], middle, hidden, gated()), require_size(*down_[e], hidden, middle);
      require(gate_up_[e]->shares_inputs_with(*gate_up_[0]) && down_[e]->shares_inputs_with(*down_[0]),
              "experts have weights of several formats");
    }
  }

  bool gated() const { return gate_up_[0]->gated; }
  const Linear<T>& gate_up(int64_t expert) const { return *gate_up_[expert]; }
  const Linear<T>& down(int64_t expert) const { return *down_[expert]; }

  int64_t count, hidden, middle;

 private:
  std::vector<const Linear<T>*> gate_up_, down_;
};

// Pairs in the order of their experts, tokens ascending. Every worker computes its own: that takes less time than
// another barrier.
class Dispatch {
 public:
  // The pairs of one expert: their places in the order, and the first of their rows, padding of blocks included.
  struct Group {
    int64_t expert, first, rows, padded_first;
  };
  struct Placed {
    int64_t pair, group;
  };

  // An upper bound of the rows of all groups, padding of blocks included: a block of tiles may hold a single row, and
  // blocks of equal height lack less than one row each.
  template <class T>
  static int64_t padded(int64_t pairs, int64_t experts) {
    return pairs + (BY_TILES<T> ? (tiles::SIDE - 1) * std::min(pairs, experts) : pairs / MAX_ROWS);
  }

  void reserve(int64_t pairs, int64_t experts) {
    grow(placed_, pairs);
    grow(next_, experts);
    groups_.reserve(experts);
  }

  template <class T>
  void sort(const int64_t* chosen, int64_t pairs, int64_t experts) {
    std::fill_n(next_.begin(), experts, 0);
    for (int64_t pair = 0; pair < pairs; pair++) next_[chosen[pair]]++;
    groups_.clear();
    int64_t first = 0, padded_first = 0;
    for (int64_t e = 0; e < experts; e++) {
      const int64_t rows = next_[e];
      next_[e] = first;
      if (rows == 0) continue;
      std::for_each(&placed_[first], &placed_[first] + rows, [&](Placed& placed) { placed.group = used(); });
      groups_.push_back({e, first, rows, padded_first});
      first += rows, padded_first += Blocks::of<T>(rows).padded();
    }
    for (int64_t pair = 0; pair < pairs; pair++) placed_[next_[chosen[pair]]++].pair = pair;
  }

  int64_t used() const { return static_cast<int64_t>(groups_.size()); }
  const Group& group(int64_t index) const { return groups_[index]; }
  const Placed& placed(int64_t place) const { return placed_[place]; }

 private:
  std::vector<Group> groups_;
  std::vector<Placed> placed_;
  std::vector<int64_t> next_;
};

// The shared expert.
template <class T>
struct Shared {
  const Linear<T>* gate_up;  // null: none
  const Linear<T>* down;
  const float* shares;  // [tokens] the factor of its output, or null: 1
};

// Computes the experts of a step's tokens. Holds the intermediate values of one layer at a time.
template <class T>
class Mixing {
 public:
  // Allocate for ``tokens`` with ``top_k`` experts each. May throw; so may products, in their phases.
  void reserve(int workers, int64_t tokens, int64_t top_k, const Experts<T>& experts, const Shared<T>& shared) {
    const int64_t pairs = tokens * top_k, padded = Dispatch::padded<T>(pairs, experts.count);
    rows_.reserve(experts.gate_up(0), pairs, padded, false);
    gated_.reserve(experts.down(0), pairs, padded, true);
    if (shared.gate_up != nullptr) shared_gated_.reserve(*shared.down, tokens);
    grow(outputs_, (pairs + (shared.gate_up == nullptr ? 0 : tokens)) * experts.hidden);
    while (static_cast<int>(dispatches_.size()) < workers) dispatches_.push_back(std::make_unique<Dispatch>());
    for (auto& dispatch : dispatches_) dispatch->reserve(pairs, experts.count);
  }

  // add(token, index, LANES results): the sum over a token's pairs and the shared expert. of_shared(): the tokens as inputs
  // of that one, asked for when others no longer read theirs.
  template <class OfShared, class Add>
  void mix(Worker& worker, const Experts<T>& experts, const Shared<T>& shared, Gate gate, const Inputs<T>& tokens,
           OfShared&& of_shared, int64_t top_k, const int64_t* chosen, const float* weights, Add&& add) {
    const int64_t count = tokens.rows(), pairs = count * top_k, hidden = experts.hidden;
    Dispatch& dispatch = *dispatches_[worker.index()];
    dispatch.sort<T>(chosen, pairs, experts.count);
    gather(worker, dispatch, tokens, top_k, experts.gate_up(0));
    const bool all = shared.gate_up != nullptr && count > 0;
    const Linear<T>&first = experts.gate_up(0), &second = experts.down(0);
    const Inputs<T> shared_gated = shared_gated_.inputs(all ? *shared.down : second, all ? count : 0);
    const Inputs<T> shared_tokens = all ? of_shared() : tokens;
    share_out(
        worker, dispatch, first, all ? shared.gate_up : nullptr,
        [&](int64_t from, int64_t to) { multiply_gated(gate, shared_tokens, *shared.gate_up, from, to, shared_gated); },
        [&](const Dispatch::Group& group, int64_t from, int64_t to) {
          multiply_gated(gate, part(rows_, first, group), experts.gate_up(group.expert), from, to,
                         part(gated_, second, group));
        });
    gated_.inputs(second, pairs).finish(worker);
    shared_gated.finish(worker);
    share_out(
        worker, dispatch, second, all ? shared.down : nullptr,
        [&](int64_t from, int64_t to) { put(shared_gated, *shared.down, from, to, nullptr, pairs); },
        [&](const Dispatch::Group& group, int64_t from, int64_t to) {
          put(part(gated_, second, group), experts.down(group.expert), from, to, &dispatch.placed(group.first), 0);
        });
    worker.parallel_in_runs(count, [&](int64_t token) {
      const T* outputs = outputs_.data() + token * top_k * hidden;
      for (int64_t i = 0; i < hidden; i += LANES) {
        Floats sum = all ? Number<T>::load_lanes(&outputs_[(pairs + token) * hidden + i]) : Floats{};
        if (all && shared.shares != nullptr) sum *= shared.shares[token];
        for (int64_t j = 0; j < top_k; j++)
          sum = multiply_add(sum, Number<T>::load_lanes(outputs + j * hidden + i), spread(weights[token * top_k + j]));
        add(token, i, sum);
      }
    });
  }

 private:
  static Inputs<T> part(InputBuffer<T>& buffer, const Linear<T>& layer, const Dispatch::Group& group) {
    return buffer.inputs(layer, group.rows, group.first, group.padded_first);
  }

  // Copy the row of each pair's token to its place among the rows of its expert.
  void gather(Worker& worker, const Dispatch& dispatch, const Inputs<T>& tokens, int64_t top_k, const Linear<T>& layer) {
    worker.parallel_in_runs(tokens.rows() * top_k, [&](int64_t place) {
      const Dispatch::Placed& placed = dispatch.placed(place);
      const Dispatch::Group& group = dispatch.group(placed.group);
      part(rows_, layer, group).copy(place - group.first, tokens, placed.pair / top_k);
    });
  }

  // Divide the products with the weights of ``all``, which may be null, and of every group, which have the shape of
  // ``one``, into tasks over runs of panels: whole(from, to) and part(group, from, to).
  template <class Whole, class Part>
  static void share_out(Worker& worker, const Dispatch& dispatch, const Linear<T>& one, const Linear<T>* all,
                        Whole&& whole, Part&& part) {
    const int64_t each = one.panels(), shared = all == nullptr ? 0 : all->panels();
    const int64_t panels = dispatch.used() * each + shared;
    const int64_t run = run_of(one, panels, worker), runs = (each + run - 1) / run;
    const int64_t shared_run = all == nullptr ? 1 : run_of(*all, panels, worker);
    const int64_t first = (shared + shared_run - 1) / shared_run;
    worker.parallel(first + dispatch.used() * runs, [&](int64_t task) {
      if (task < first) return whole(task * shared_run, std::min(shared, (task + 1) * shared_run));
      const int64_t from = (task - first) % runs * run;
      part(dispatch.group((task - first) / runs), from, std::min(each, from + run));
    });
  }

  // The panels of a task: at most what fits a cache, and few enough that there are tasks for every worker.
  static int64_t run_of(const Linear<T>& w, int64_t panels, const Worker& worker) {
    constexpr int64_t RUN = 256 << 10, AT_ONCE = BY_TILES<T> ? 2 : panels_at_once(1);
    const int64_t wanted = std::max<int64_t>(1, std::min(RUN / w.panel_bytes(), panels / (4 * worker.workers())));
    return (wanted + AT_ONCE - 1) / AT_ONCE * AT_ONCE;
  }

  static void multiply_gated(Gate gate, const Inputs<T>& a, const Linear<T>& w, int64_t from, int64_t to,
                             const Inputs<T>& to_rows) {
    if (w.gated)
      return multiply_panels(a, w, from, to, [&](const Place& place, int64_t panel, Floats one, Floats up) {
        to_rows.put(to_rows.row(place), panel * LANES, gated(gate, one, up));
      });
    multiply_panels(a, w, from, to, [&](const Place& place, int64_t panel, Floats one, Floats other) {
      const auto row = to_rows.row(place);
      to_rows.put(row, panel * PANEL, activated(gate, one));
      if (panel * PANEL + LANES < w.outputs) to_rows.put(row, panel * PANEL + LANES, activated(gate, other));
    });
  }

  // Row i to the outputs of pair ``placed[i]``, or, where that is null, to the i-th behind ``first``.
  void put(const Inputs<T>& a, const Linear<T>& w, int64_t from, int64_t to, const Dispatch::Placed* placed,
           int64_t first) {
    multiply_panels(a, w, from, to, [&](const Place& place, int64_t panel, Floats one, Floats other) {
      const int64_t row = placed == nullptr ? first + place.row : placed[place.row].pair;
      put_pair(outputs_.data() + row * w.outputs, panel, w.outputs, one, other);
    });
  }

  InputBuffer<T> rows_, gated_, shared_gated_;
  std::vector<T> outputs_;
  std::vector<std::unique_ptr<Dispatch>> dispatches_;
};

}  // namespace aioinfer
