// Decoder: all layers of a step as one program of a pool; see aioinfer.model.decoder.
//
//   embedding ─► ┌ norm ─► qkv ─► heads, cells ─► attention ─► out ─┐ + ─► ┌ norm ─► gate, up ─► down ─┐ + ─► norm ─► head
//                └──────────────── residual ────────────────────────┘      └───────── residual ────────┘
//
// Instead of attention a layer may have attention over latents, or a mixer which keeps a state: a short convolution, a
// delta rule or a state space, or the last one and attention side by side. A part may lack its norm, and it may have
// another one behind it, before the sum. Both parts may read the same residual, and there may be no second one. The
// second half of a layer with experts is described in experts.hpp and dual.hpp, what may follow it in per_layer.hpp. In
// the end the residual may be scaled.
//
// Each arrow is a phase: the pool divides it, and it ends with a barrier. Values stored between phases have the
// type of the model; a phase computes in float.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "adapters.hpp"
#include "layer.hpp"
#include "step.hpp"
#include "stopwatch.hpp"

namespace aioinfer {

template <class T>
class Decoder {
 public:
  // ``positions``: rows of every table by position; ``logit_scale``: a factor of logits; ``logit_cap``: then they become
  // cap * tanh(logit / cap); 0: none.
  Decoder(const Embedding<T>& embedding, Norm norm, const Linear<T>* head, int64_t positions, int64_t hidden, float eps,
          float logit_scale, float logit_cap, const PerLayerSource<T>& by_layer = {})
      : embedding_(embedding), norm_(norm), head_(head), positions_(positions), hidden_(hidden), eps_(eps),
        logit_scale_(logit_scale), logit_cap_(logit_cap), per_layer_(by_layer) {
    require(norm.weight != nullptr, "a decoder has a norm");
    require(hidden > 0 && hidden % SUM_LANES == 0, "the hidden size is no multiple of a vector");
    require_size(*head, head->outputs, hidden);
    const Linear<T>* words = embedding.words;
    require((embedding.vectors == nullptr) != (words == nullptr), "a decoder has an embedding or words");
    require(words == nullptr || words->quantised(), "words are not quantised");
    if (words != nullptr) require_size(*words, head->outputs, hidden);
    if (per_layer_.any()) by_layer.check(hidden);
  }

  // Throws InvalidArguments unless the layer's parts fit each other.
  void add(const Layer<T>& layer) {
    aioinfer::check(layer.gate, layer.gate_up != nullptr   ? layer.gate_up->gated
                                : layer.experts == nullptr || layer.experts->gated());
    if (layer.word_norm.weight != nullptr) {
      const auto* reader = std::get_if<SelfAttention<T>>(&layer.mixer);
      require(reader != nullptr, "this mixer does not read the vectors of tokens");
      reader->check(hidden_, true);
    } else {
      std::visit([&](const auto& mixer) { mixer.check(hidden_); }, layer.mixer);
    }
    if (const auto* attention = layer.attention()) check_shared(*attention);
    if (layer.gate_up != nullptr) {
      const int64_t middle = layer.gate_up->outputs;
      require(layer.down != nullptr, "a feed-forward part without down");
      const bool gated = layer.gate_up->gated;
      require(layer.experts == nullptr || gated == layer.experts->gated(), "experts and the shared one differ in gates");
      require(gated || middle % SUM_LANES == 0, "the inner size is no multiple of a vector");
      require_size(*layer.gate_up, middle, hidden_, gated);
      require_size(*layer.down, hidden_, middle);
    }
    require((layer.router == nullptr) == (layer.experts == nullptr), "experts without a router, or a router alone");
    if (layer.experts != nullptr) {
      require(layer.experts->hidden == hidden_ && layer.router->weight->inner == hidden_, "experts of another size");
      require(layer.router->rule.experts == layer.experts->count, "the router chooses among other experts");
    }
    require(layer.shared_gate == nullptr || (layer.experts != nullptr && layer.gate_up != nullptr),
            "a gate of a shared expert, and no such expert");
    layer.check_end();
    layer.per_layer.check(per_layer_.source(), layers_.size(), hidden_);
    layers_.push_back(layer);
    Layer<T>& added = layers_.back();
    if (const auto* attention = added.attention()) {
      const_cast<SelfAttention<T>*>(attention)->division = divisions_.of(attention->shape);
      kv_pools_ = std::max(kv_pools_, attention->kv + 1);
    }
    if (const auto* mamba = added.mamba()) {
      states_ = std::max(states_, mamba->state + 2);
    } else if (const auto* latent = std::get_if<LatentAttention<T>>(&added.mixer)) {
      for (const Layer<T>& other : layers_)
        if (const auto* own = std::get_if<LatentAttention<T>>(&other.mixer))
          require(own->same_heads(*latent), "latents of two shapes");
      latent_heads_ = *latent;
      kv_pools_ = std::max(kv_pools_, latent->kv + 1);
    } else if (const auto* conv = std::get_if<ShortConv<T>>(&added.mixer)) {
      states_ = std::max(states_, conv->state + 1);
    } else if (const auto* delta = std::get_if<DeltaRule<T>>(&added.mixer)) {
      states_ = std::max(states_, delta->state + 2);
    }
    each_mixer(added, [&](const auto& mixer) { width_ = std::max(width_, mixer.into->outputs); });
  }

  std::vector<Layer<T>>& layers() { return layers_; }
  PerLayerInputs<T>& per_layer() { return per_layer_; }
  int64_t num_layers() const { return layers_.size(); }

  // The layer that an adapter changes, the head behind the last one; null if it has none that can be adapted.
  const Linear<T>* adapted(int64_t index, AdaptedPart part) const {
    if (index == num_layers()) return part == INTO ? head_ : nullptr;
    const Layer<T>& layer = layers_[index];
    const bool dense = layer.experts == nullptr || layer.dual.any();
    if (part == GATE_UP) return dense ? layer.gate_up : nullptr;
    if (part == DOWN) return dense ? layer.down : nullptr;
    if (part == GATES) {
      const auto* delta = std::get_if<DeltaRule<T>>(&layer.mixer);
      const auto* latent = std::get_if<LatentAttention<T>>(&layer.mixer);
      return delta != nullptr ? delta->gates : latent != nullptr ? latent->queries : nullptr;
    }
    const Linear<T>* found = nullptr;
    const bool beside = part == BESIDE_INTO || part == BESIDE_OUT;
    const auto take = [&](const auto& mixer) { found = part == INTO || part == BESIDE_INTO ? mixer.into : mixer.out; };
    if (const auto* both = std::get_if<SideBySide<T>>(&layer.mixer))
      beside ? take(both->mamba) : take(both->attention);
    else if (!beside)
      each_mixer(layer, take);
    return found;
  }

  // Between two steps; the adapter is kept.
  void set_adapter(int64_t slot, const Adapter<T>* adapter) {
    require(adapter == nullptr || adapter->layers.size() == layers_.size() + 1, "an adapter of another decoder");
    adapting_.set(slot, adapter);
  }

  // Throws InvalidArguments, before anything is computed, for indices that lie beyond their memory.
  void forward(ThreadPool& pool, const StepInput<T>& step, double* seconds) {
    check(step);
    adapting_.begin(step.adapters, step.attention.rows, step.attention.tokens, layers_.size());
    adapting_head_.begin(adapting_, step.logits_rows, step.num_logits, layers_.size());
    reserve(step, pool.size());
    const int64_t tokens = step.attention.tokens;
    pool.run_model([&](Worker& worker) {
      double unused[PARTS] = {};
      Stopwatch watch(worker.index() == 0 ? seconds : unused);
      worker.parallel_in_runs(tokens, [&](int64_t t) {
        embedding_.read(step.ids[t], step.attention.positions[t], hidden_, residual(t));
      });
      if (step.features.count != 0)
        worker.parallel_in_runs(step.features.count, [&](int64_t i) {
          std::copy_n(step.features.vectors + i * hidden_, hidden_, residual(step.features.rows[i]));
        });
      if (per_layer_.any()) per_layer_.compute(worker, narrow_, step.ids, residual_.data(), tokens, eps_);
      for (size_t index = 0; index < layers_.size(); index++) {
        const Layer<T>& layer = layers_[index];
        if (step.capture.count != 0) capture(worker, step, index, watch);
        mixer_part(worker, index, step, watch);
        if (layer.dual.any())
          dual_part(worker, index, tokens, watch);
        else if (layer.experts == nullptr && layer.has_mlp())
          dense_part(worker, index, tokens, watch);
        else if (layer.has_mlp())
          sparse_part(worker, layer, tokens, watch);
        if (layer.per_layer.gate != nullptr) per_layer_part(worker, index, tokens, watch);
        if (static_cast<int64_t>(index) < step.features.deep) add_deep(worker, step.features, index, watch);
      }
      for (int64_t behind = 0; behind < 2 && step.capture.count != 0; behind++)
        capture(worker, step, num_layers() + behind, watch);
      hidden_states(worker, step, watch);
      logits(worker, step, watch);
    });
  }

  // The vectors of tokens without positions, [count, hidden]. Throws InvalidArguments for ids that no token has.
  void embed(const int64_t* ids, int64_t count, T* out) const {
    require_below("ids", ids, count, head_->outputs);
    for (int64_t i = 0; i < count; i++) embedding_.read_word(ids[i], hidden_, out + i * hidden_);
  }

 private:
  void check_shared(const SelfAttention<T>& attention) const {
    require(!attention.shape.shared || std::any_of(layers_.begin(), layers_.end(),
                                                   [&](const Layer<T>& other) {
                                                     const auto* stores = other.attention();
                                                     return stores != nullptr && stores->stores_for(attention);
                                                   }),
            "no layer before it stores the keys and values that a layer shares");
  }

  void check(const StepInput<T>& step) const {
    const AttentionInput& input = step.attention;
    require(step.num_kv_pools >= kv_pools_, "a layer has no KV pool");
    require(step.num_states >= states_, "a layer has no cells for its state");
    aioinfer::check(input.rows, input.tokens, step.page_size, step.num_pages);
    if (states_ != 0) aioinfer::check(step.states, input.rows);
    require_below("input_ids", step.ids, input.tokens, head_->outputs);
    require_below("positions", input.positions, input.tokens, positions_);
    require_below("slot_mapping", input.cells, input.tokens, step.num_pages * step.page_size);
    require_below("logits_rows", step.logits_rows, step.num_logits, input.tokens);
    require_below("hidden_rows", step.hidden_rows, step.num_hidden, input.tokens);
    require_below("feature_rows", step.features.rows, step.features.count, input.tokens);
    require(step.features.deep >= 0, "num_deep is not a number of layers");
    require_below("captured", step.capture.places, step.capture.count, num_layers() + 2);
  }

  T* residual(int64_t token) { return residual_.data() + token * hidden_; }
  T* result(int64_t token) { return results_.data() + token * hidden_; }
  T* mixed(int64_t token) { return mixed_.data() + token * hidden_; }

  // Calls what for each mixer of a layer.
  template <class What>
  static void each_mixer(const Layer<T>& layer, What&& what) {
    std::visit(
        [&](const auto& mixer) {
          if constexpr (std::is_same_v<std::decay_t<decltype(mixer)>, SideBySide<T>>)
            what(mixer.mamba), what(mixer.attention);
          else
            what(mixer);
        },
        layer.mixer);
  }

  void mixer_part(Worker& worker, size_t index, const StepInput<T>& step, Stopwatch& watch) {
    const Layer<T>& layer = layers_[index];
    if (const auto* both = std::get_if<SideBySide<T>>(&layer.mixer)) return both_mixers(worker, *both, index, step, watch);
    each_mixer(layer, [&](const auto& mixer) {
      const Inputs<T> mixed = mixer_inputs(worker, mixer, index, INTO, step, watch);
      adapting_.shrink(worker, index, OUT, mixed);
      multiply(worker, mixed, *mixer.out,
               adapting_.expanding(index, OUT, *mixer.out,
                                   put_result(layer, layer.parallel || layer.mixer_post_norm.weight != nullptr)));
      watch.add(LINEAR);
      add_result(worker, layer, layer.mixer_post_norm, step.attention.tokens, watch);
    });
  }

  // The results of one mixer wait for those of the other, which reads the residual as it was.
  void both_mixers(Worker& worker, const SideBySide<T>& both, size_t index, const StepInput<T>& step, Stopwatch& watch) {
    const Inputs<T> scanned = mixer_inputs(worker, both.mamba, index, BESIDE_INTO, step, watch);
    adapting_.shrink(worker, index, BESIDE_OUT, scanned);
    auto keep = [&](const Place& place, int64_t panel, Floats one, Floats other) {
      put_pair(result(place.row), panel, hidden_, both.mamba_scale * one, both.mamba_scale * other);
    };
    multiply(worker, scanned, *both.mamba.out, adapting_.expanding(index, BESIDE_OUT, *both.mamba.out, keep));
    watch.add(LINEAR);
    const Inputs<T> attended = mixer_inputs(worker, both.attention, index, INTO, step, watch);
    adapting_.shrink(worker, index, OUT, attended);
    const auto add = [&](int64_t token, int64_t at, Floats value) __attribute__((always_inline)) {
      value = multiply_add(Number<T>::load_lanes(result(token) + at), value, spread(both.attention_scale));
      add_lanes(layers_[index], token, at, value);
    };
    auto put = [&](const Place& place, int64_t panel, Floats one, Floats other) {
      add(place.row, panel * PANEL, one);
      if (panel * PANEL + LANES < hidden_) add(place.row, panel * PANEL + LANES, other);
    };
    multiply(worker, attended, *both.attention.out, adapting_.expanding(index, OUT, *both.attention.out, put));
    watch.add(LINEAR);
  }

  // From the residual to the inputs of the product behind a mixer.
  template <class Mixer>
  Inputs<T> mixer_inputs(Worker& worker, const Mixer& mixer, size_t index, AdaptedPart into, const StepInput<T>& step,
                         Stopwatch& watch) {
    const int64_t tokens = step.attention.tokens;
    const Inputs<T> normed = layers_[index].word_norm.weight != nullptr
                                 ? words_and_rows(worker, layers_[index], *mixer.into, step)
                                 : norm_rows(worker, layers_[index].mixer_norm, *mixer.into, tokens, nullptr);
    watch.add(REST);
    adapting_.shrink(worker, index, into, normed);
    multiply(worker, normed, *mixer.into,
             adapting_.expanding(index, into, *mixer.into, put_projection(*mixer.into, projected_.data())));
    watch.add(LINEAR);
    const Inputs<T> mixed = wide_.inputs(*mixer.out, tokens);
    mix(worker, mixer, index, step, normed, mixed);
    mixed.finish(worker);
    watch.add(ATTENTION);
    return mixed;
  }

  static auto put_projection(const Linear<T>& layer, T* to) {
    return [to, width = layer.outputs](const Place& place, int64_t panel, Floats one, Floats other) {
      put_pair(to + place.row * width, panel, width, one, other);
    };
  }

  // From the projections of all tokens to the inputs of the product behind the mixer.
  void mix(Worker& worker, const SelfAttention<T>& self, size_t, const StepInput<T>& step, const Inputs<T>&,
           const Inputs<T>& mixed) {
    const HeadShape<T>& shape = self.shape;
    const KVPool<T> kv{step.kv_pools[self.kv], step.page_size, shape.kv_heads, shape.head_dim};
    const int64_t width = self.width();
    T* projected = projected_.data();
    const int64_t* positions = step.attention.positions;
    if (self.whole_norm != nullptr || self.growth.rate != 0)
      worker.parallel_in_runs(mixed.rows(),
                              [&](int64_t token) { self.prepare(projected + token * width, positions[token]); });
    const auto start = [&](int64_t token) {
      const T* gates = self.gated ? projected + token * width + shape.width() : nullptr;
      return [&mixed, gates, to = mixed.row(token)](int64_t at, Floats values) {
        if (gates != nullptr) values = rounded<T>(values) * sigmoid(Number<T>::load_lanes(gates + at));
        mixed.put(to, at, values);
      };
    };
    AttentionInput input = step.attention;
    Rotary<T> rotary = self.rotary;
    if (step.cos != nullptr) input.positions = nullptr, rotary.cos = step.cos, rotary.sin = step.sin;
    attend(worker, divisions_.tasks(self.division), input, Projected<T>::of(projected, shape, width), shape, rotary, kv,
           self.params, divisions_.scratch(self.division, worker.index()), HeadSink(start));
  }

  static T* stash(const StepInput<T>& step, int64_t state) {
    return step.states.replays == nullptr ? nullptr : static_cast<T*>(step.stash_pools[state]);
  }

  void mix(Worker& worker, const LatentAttention<T>& self, size_t index, const StepInput<T>& step, const Inputs<T>&,
           const Inputs<T>& mixed) {
    T* projected = projected_.data();
    if (self.queries != nullptr) {
      const Inputs<T> normed_rows = latent_.narrow().inputs(*self.queries, mixed.rows());
      worker.parallel_in_runs(mixed.rows(), [&](int64_t token) {
        const auto row = normed_rows.row(token);
        const T* from = projected + token * self.into->outputs;
        normed({self.query_norm, nullptr}, from, self.queries->inner, self.eps,
               [&](int64_t i, Floats value) { normed_rows.put(row, i, value); });
        normed_rows.finish(token);
      });
      adapting_.shrink(worker, index, GATES, normed_rows);
      multiply(worker, normed_rows, *self.queries,
               adapting_.expanding(index, GATES, *self.queries, put_projection(*self.queries, latent_.queries())));
    }
    const KVPool<T> kv{step.kv_pools[self.kv], step.page_size, 1, self.width(), self.rank};
    latent_.mix(worker, self, projected, step.attention, kv,
                [&](const Place& place, int64_t at, Floats values) { mixed.put(mixed.row(place), at, values); });
  }

  void mix(Worker& worker, const ShortConv<T>& self, size_t, const StepInput<T>& step, const Inputs<T>&,
           const Inputs<T>& mixed) {
    self.mix(worker, projected_.data(), step.attention.rows, step.states,
             static_cast<T*>(step.state_pools[self.state]), stash(step, self.state), mixed);
  }

  void mix(Worker& worker, const DeltaRule<T>& self, size_t index, const StepInput<T>& step,
           const Inputs<T>& normed, const Inputs<T>& mixed) {
    const Linear<T>& gates = *self.gates;
    const bool shared = gates.shares_inputs_with(*self.into);
    const int64_t tokens = mixed.rows();
    const Inputs<T> own = shared ? normed : norm_rows(worker, layers_[index].mixer_norm, gates, tokens, nullptr);
    adapting_.shrink(worker, index, GATES, own);
    multiply(worker, own, gates, adapting_.expanding(index, GATES, gates, put_projection(gates, gates_.data())));
    self.mix(worker, projected_.data(), gates_.data(), step.attention.rows, step.states,
             static_cast<T*>(step.state_pools[self.state]), stash(step, self.state),
             static_cast<float*>(step.state_pools[self.state + 1]), stash(step, self.state + 1),
             delta_scratch_[worker.index()], mixed);
  }

  void mix(Worker& worker, const Mamba2<T>& self, size_t, const StepInput<T>& step, const Inputs<T>&,
           const Inputs<T>& mixed) {
    self.mix(worker, projected_.data(), step.attention.rows, step.states,
             static_cast<T*>(step.state_pools[self.state]), stash(step, self.state),
             static_cast<float*>(step.state_pools[self.state + 1]), stash(step, self.state + 1),
             mamba_scratch_[worker.index()], mixed);
  }

  void dense_part(Worker& worker, size_t index, int64_t tokens, Stopwatch& watch) {
    const Layer<T>& layer = layers_[index];
    dense_product(worker, index, tokens, watch);
    add_result(worker, layer, layer.mlp_post_norm, tokens, watch, layer.mlp_scale());
  }

  void dense_product(Worker& worker, size_t index, int64_t tokens, Stopwatch& watch) {
    const Layer<T>& layer = layers_[index];
    const Linear<T>& gate_up = *layer.gate_up;
    const Inputs<T> normed = norm_rows(worker, layer.mlp_norm, *layer.gate_up, tokens, nullptr);
    watch.add(REST);
    const Inputs<T> rows = wide_.inputs(*layer.down, tokens);
    const int64_t middle = gate_up.outputs;
    adapting_.shrink(worker, index, GATE_UP, normed);
    auto put_gated = [&](const Place& place, int64_t panel, Floats gate, Floats up) {
      rows.put(rows.row(place), panel * LANES, gated(layer.gate, gate, up));
    };
    auto put_plain = [&](const Place& place, int64_t panel, Floats one, Floats other) {
      const auto row = rows.row(place);
      rows.put(row, panel * PANEL, activated(layer.gate, one));
      if (panel * PANEL + LANES < middle) rows.put(row, panel * PANEL + LANES, activated(layer.gate, other));
    };
    if (gate_up.gated)
      multiply(worker, normed, gate_up, adapting_.expanding(index, GATE_UP, gate_up, put_gated));
    else
      multiply(worker, normed, gate_up, adapting_.expanding(index, GATE_UP, gate_up, put_plain));
    rows.finish(worker);
    adapting_.shrink(worker, index, DOWN, rows);
    multiply(worker, rows, *layer.down,
             adapting_.expanding(index, DOWN, *layer.down, put_result(layer, layer.mlp_post_norm.weight != nullptr)));
    watch.add(LINEAR);
  }

  // See dual.hpp.
  void dual_part(Worker& worker, size_t index, int64_t tokens, Stopwatch& watch) {
    const Layer<T>& layer = layers_[index];
    const Activations<float> floats = routing_.floats(tokens, hidden_);
    const Inputs<T> inputs = narrow_.inputs(layer.experts->gate_up(0), tokens);
    worker.parallel_in_runs(tokens, [&](int64_t token) {
      const T* from = residual(token);
      const auto read = floats.row(token);
      norm(layer.dual.router, from, [&](int64_t i, Floats value) { floats.put(read, i, rounded<T>(value)); });
      const auto to = inputs.row(token);
      norm(layer.dual.experts, from, [&](int64_t i, Floats value) { inputs.put(to, i, value); });
      inputs.finish(token);
    });
    watch.add(REST);
    routing_.route(worker, *layer.router, floats);
    mixing_.mix(worker, *layer.experts, layer.shared(), layer.gate, inputs, [&] { return inputs; },
                layer.router->rule.top_k, routing_.experts(), routing_.weights(), [&](int64_t token, int64_t at, Floats values) {
                  Number<T>::store_lanes(mixed(token) + at, values);
                });
    watch.add(LINEAR);
    dense_product(worker, index, tokens, watch);
    worker.parallel_in_runs(tokens, [&](int64_t token) {
      layer.dual.add(result(token), mixed(token), hidden_, eps_);
      add_normed(layer, layer.mlp_post_norm, token, layer.mlp_scale());
    });
    watch.add(REST);
  }

  void per_layer_part(Worker& worker, size_t index, int64_t tokens, Stopwatch& watch) {
    const Layer<T>& layer = layers_[index];
    const Norm& post_norm = layer.per_layer.post_norm;
    per_layer_.apply(worker, narrow_, wide_, layer.per_layer, index, residual_.data(), tokens, put_result(layer, true));
    watch.add(LINEAR);
    add_result(worker, layer, post_norm, tokens, watch, layer.scale);
  }

  void sparse_part(Worker& worker, const Layer<T>& layer, int64_t tokens, Stopwatch& watch) {
    const Activations<float> floats = routing_.floats(tokens, hidden_);
    const Inputs<T> normed =
        norm_rows(worker, layer.mlp_norm, layer.experts->gate_up(0), tokens, nullptr, &floats, layer.shared_gate);
    watch.add(REST);
    routing_.route(worker, *layer.router, floats);
    const bool later = layer.mlp_post_norm.weight != nullptr;
    const float* shares = layer.shared_gate == nullptr ? nullptr : shares_.data();
    // The shared expert may read inputs of another format, which take the place of the others'.
    auto of_shared = [&] {
      if (layer.gate_up->shares_inputs_with(layer.experts->gate_up(0))) return normed;
      return norm_rows(worker, layer.mlp_norm, *layer.gate_up, tokens, nullptr);
    };
    mixing_.mix(worker, *layer.experts, layer.shared(shares), layer.gate, normed, of_shared,
                layer.router->rule.top_k, routing_.experts(), routing_.weights(), [&](int64_t token, int64_t at, Floats values) {
                  if (later) return Number<T>::store_lanes(result(token) + at, values);
                  add_lanes(layer, token, at, values);
                });
    watch.add(LINEAR);
    add_result(worker, layer, layer.mlp_post_norm, tokens, watch, layer.mlp_scale());
  }

  void add_deep(Worker& worker, const ImageFeatures<T>& features, size_t index, Stopwatch& watch) {
    const T* vectors = features.vectors + static_cast<int64_t>(index + 1) * features.count * hidden_;
    worker.parallel_in_runs(features.count, [&](int64_t row) {
      T* to = residual(features.rows[row]);
      for (int64_t i = 0; i < hidden_; i += LANES)
        Number<T>::store_lanes(to + i, Number<T>::load_lanes(to + i) + Number<T>::load_lanes(vectors + row * hidden_ + i));
    });
    watch.add(REST);
  }

  void capture(Worker& worker, const StepInput<T>& step, int64_t place, Stopwatch& watch) {
    const Capture<T>& wanted = step.capture;
    for (int64_t at = 0; at < wanted.count; at++) {
      if (wanted.places[at] != place) continue;
      worker.parallel_in_runs(step.attention.tokens, [&](int64_t token) {
        T* to = wanted.out + (token * wanted.count + at) * hidden_;
        if (place <= num_layers()) return void(std::copy_n(residual(token), hidden_, to));
        norm(norm_, residual(token), [&](int64_t i, Floats value) { Number<T>::store_lanes(to + i, value); });
      });
      watch.add(REST);
    }
  }

  void hidden_states(Worker& worker, const StepInput<T>& step, Stopwatch& watch) {
    if (step.num_hidden == 0) return;
    worker.parallel_in_runs(step.num_hidden, [&](int64_t row) {
      float* to = step.hidden + row * hidden_;
      norm(norm_, residual(step.hidden_rows[row]), [&](int64_t i, Floats value) { store(to + i, value); });
    });
    watch.add(REST);
  }

  void logits(Worker& worker, const StepInput<T>& step, Stopwatch& watch) {
    if (step.num_logits == 0) return;
    const int64_t vocabulary = head_->outputs;
    const Inputs<T> normed = norm_rows(worker, norm_, *head_, step.num_logits, step.logits_rows);
    watch.add(REST);
    adapting_head_.shrink(worker, layers_.size(), INTO, normed);
    auto put = [&](const Place& place, int64_t panel, Floats one, Floats other) {
      one *= logit_scale_, other *= logit_scale_;
      if (logit_cap_ != 0) {
        one = logit_cap_ * hyperbolic_tangent(one / logit_cap_);
        other = logit_cap_ * hyperbolic_tangent(other / logit_cap_);
      }
      put_pair(step.logits + place.row * vocabulary, panel, vocabulary, one, other);
    };
    multiply(worker, normed, *head_, adapting_head_.expanding(layers_.size(), INTO, *head_, put));
    watch.add(LINEAR);
  }

  // put(index, LANES values): a vector of the residual's size, normed.
  template <class Put>
  AIOINFER_INLINE void norm(const Norm& norm, const T* from, Put&& put) const {
    normed(norm, from, hidden_, eps_, put);
  }

  // The normed residual of all tokens, or of the tokens ``chosen``, as inputs of a layer. The result is also written to
  // ``floats`` if it is given, and its product with ``gate`` makes a token's share of the shared expert.
  Inputs<T> norm_rows(Worker& worker, const Norm& weights, const Linear<T>& layer, int64_t count, const int64_t* chosen,
                      const Activations<float>* floats = nullptr, const float* gate = nullptr) {
    const Inputs<T> normed = narrow_.inputs(layer, count);
    worker.parallel_in_runs(count, [&](int64_t row) {
      const auto to = normed.row(row);
      Floats products[SUM_VECTORS] = {};
      norm(weights, residual(chosen == nullptr ? row : chosen[row]), [&](int64_t i, Floats value) {
        normed.put(to, i, value);
        if (floats != nullptr) floats->put(floats->row(row), i, rounded<T>(value));
        Floats& product = products[i / LANES % SUM_VECTORS];
        if (gate != nullptr) product = multiply_add(product, rounded<T>(value), load<Floats>(gate + i));
      });
      if (gate != nullptr) shares_[row] = sigmoid(spread(sum(products)))[0];
      normed.finish(row);
    });
    return normed;
  }

  // The normed vectors of all tokens, and the normed residual behind each, as inputs of a layer (EAGLE-3).
  Inputs<T> words_and_rows(Worker& worker, const Layer<T>& layer, const Linear<T>& reader, const StepInput<T>& step) {
    const Inputs<T> both = narrow_.inputs(reader, step.attention.tokens);
    worker.parallel_in_runs(step.attention.tokens, [&](int64_t t) {
      const auto to = both.row(t);
      embedding_.read_word(step.ids[t], hidden_, result(t));
      norm(layer.word_norm, result(t), [&](int64_t i, Floats value) { both.put(to, i, value); });
      norm(layer.mixer_norm, residual(t), [&](int64_t i, Floats value) { both.put(to, hidden_ + i, value); });
      both.finish(t);
    });
    return both;
  }

  // Of the last product of a part: it is added to the residual at once, or ``later``, once it is normed, by
  // add_result(), or with the part that reads the same residual.
  auto put_result(const Layer<T>& layer, bool later) {
    return [this, &layer, later](const Place& place, int64_t panel, Floats one, Floats other) {
      if (later) return put_pair(result(place.row), panel, hidden_, one, other);
      add_lanes(layer, place.row, panel * PANEL, one);
      if (panel * PANEL + LANES < hidden_) add_lanes(layer, place.row, panel * PANEL + LANES, other);
    };
  }

  AIOINFER_INLINE void add_lanes(const Layer<T>& layer, int64_t token, int64_t at, Floats value) {
    T* to = residual(token) + at;
    if (layer.parallel) value += Number<T>::load_lanes(result(token) + at);
    Number<T>::store_lanes(to, Number<T>::load_lanes(to) + layer.part_scale * value);
  }

  // ``scale``: of the residual, then.
  void add_result(Worker& worker, const Layer<T>& layer, const Norm& post_norm, int64_t tokens, Stopwatch& watch,
                  float scale = 1.0f) {
    if (post_norm.weight == nullptr) return;
    worker.parallel_in_runs(tokens, [&](int64_t token) { add_normed(layer, post_norm, token, scale); });
    watch.add(REST);
  }

  void add_normed(const Layer<T>& layer, const Norm& post_norm, int64_t token, float scale) {
    norm(post_norm, result(token), [to = residual(token), scale, factor = layer.part_scale](int64_t i, Floats value) {
      const Floats sum = Number<T>::load_lanes(to + i) + factor * rounded<T>(value);
      Number<T>::store_lanes(to + i, scale == 1.0f ? sum : rounded<T>(sum) * scale);
    });
  }

  void reserve(const StepInput<T>& step, int workers) {
    const int64_t tokens = step.attention.tokens, all = tokens + step.states.replayed(step.attention.rows);
    grow(residual_, tokens * hidden_);
    grow(results_, tokens * hidden_);
    grow(shares_, tokens);
    grow(projected_, all * width_);
    narrow_.reserve(*head_, step.num_logits);
    per_layer_.reserve(tokens, narrow_);
    for (const Layer<T>& layer : layers_) {
      each_mixer(layer, [&](const auto& mixer) { reserve(mixer, tokens, all, workers); });
      if (layer.per_layer.gate != nullptr) {
        narrow_.reserve(*layer.per_layer.gate, tokens);
        wide_.reserve(*layer.per_layer.out, tokens);
      }
      if (layer.gate_up != nullptr && (layer.experts == nullptr || layer.dual.any())) {
        narrow_.reserve(*layer.gate_up, tokens);
        wide_.reserve(*layer.down, tokens);
      }
      if (layer.experts == nullptr) continue;
      if (layer.dual.any()) grow(mixed_, tokens * hidden_);
      narrow_.reserve(layer.experts->gate_up(0), tokens);
      if (layer.gate_up != nullptr) narrow_.reserve(*layer.gate_up, tokens);
      routing_.reserve(workers, tokens, *layer.router);
      mixing_.reserve(workers, tokens, layer.router->rule.top_k, *layer.experts, layer.shared());
    }
    divisions_.divide(step.attention.rows, workers);
    if (latent_heads_) latent_.divide(step.attention.rows, *latent_heads_, workers);
  }

  // ``all``: the tokens of the step, and those that rows replay.
  template <class Mixer>
  void reserve(const Mixer& mixer, int64_t tokens, int64_t all, int workers) {
    narrow_.reserve(*mixer.into, tokens);
    wide_.reserve(*mixer.out, tokens);
    if constexpr (std::is_same_v<Mixer, LatentAttention<T>>) latent_.reserve(mixer, tokens);
    if constexpr (std::is_same_v<Mixer, DeltaRule<T>>) {
      narrow_.reserve(*mixer.gates, tokens);
      grow(gates_, all * mixer.gates->outputs);
      if (static_cast<int>(delta_scratch_.size()) < workers) delta_scratch_.resize(workers);
      for (DeltaScratch& scratch : delta_scratch_) scratch.reserve(mixer.shape);
    }
    if constexpr (std::is_same_v<Mixer, Mamba2<T>>) {
      if (static_cast<int>(mamba_scratch_.size()) < workers) mamba_scratch_.resize(workers);
      for (MambaScratch& scratch : mamba_scratch_) scratch.reserve(mixer.shape);
    }
  }

  Embedding<T> embedding_;
  Norm norm_;
  const Linear<T>* head_;
  int64_t positions_, hidden_;
  float eps_, logit_scale_, logit_cap_;
  std::vector<Layer<T>> layers_;
  Divisions<T> divisions_;
  std::optional<LatentAttention<T>> latent_heads_;  // one of the layers with latents, which have the same heads
  LatentWork<T> latent_;
  int64_t kv_pools_ = 0, states_ = 0, width_ = 0;  // what layers need: pools of both kinds, and the widest projection
  std::vector<T> residual_, results_, projected_;  // results_: of a part, before they are normed
  std::vector<T> gates_;                           // of a delta rule
  std::vector<float> shares_;                      // of the shared expert, by token
  std::vector<DeltaScratch> delta_scratch_;        // of each worker
  std::vector<MambaScratch> mamba_scratch_;        // of each worker
  std::vector<T> mixed_;                           // of experts beside a dense part
  InputBuffer<T> narrow_, wide_;
  Routing<T> routing_;
  Mixing<T> mixing_;
  PerLayerInputs<T> per_layer_;
  Adapting<T> adapting_, adapting_head_;  // of all tokens, and of the rows of logits
};

}  // namespace aioinfer
