// Inputs by layer: of each token a small vector for every layer, added to the residual behind it by way of a gate
// (Gemma 4); see aioinfer.model.per_layer.
//
//   embedding ─► projection ─► norm ─► + ─► values [tokens, layers, size]
//   ids ─► table ──────────────────────┘
//
//   residual ─► gate ─► function ─► * values of the layer ─► out
#pragma once

#include <vector>

#include "gates.hpp"
#include "linear.hpp"
#include "norms.hpp"

namespace aioinfer {

// Where the values of a model come from.
template <class T>
struct PerLayerSource {
  const T* table;               // [vocabulary, layers * size], or null
  const Linear<T>* words;       // the same as quantised weights; null, too: the model has no such inputs
  const Linear<T>* projection;  // of the vectors of tokens, to layers * size
  Norm norm;                    // of each of these parts, [size]
  int64_t layers, size;
  float table_scale, projection_scale, sum_scale;

  bool any() const { return table != nullptr || words != nullptr; }

  // Throws InvalidArguments unless the parts fit each other and a residual of size ``hidden``.
  void check(int64_t hidden) const {
    require(table == nullptr || words == nullptr, "inputs by layer from two tables");
    require(layers > 0 && size > 0 && size % SUM_LANES == 0, "the size of inputs by layer is no multiple of a vector");
    require(projection != nullptr && norm.weight != nullptr, "inputs by layer without a projection or its norm");
    require_size(*projection, layers * size, hidden);
    require(words == nullptr || (words->quantised() != nullptr && words->inner == layers * size),
            "a table of inputs by layer that is not quantised, or of another size");
  }
};

// What a layer does with them.
template <class T>
struct PerLayerPart {
  const Linear<T>* gate;  // to ``size``; null: nothing
  const Linear<T>* out;
  Gate function;
  Norm post_norm;  // of the result, before it is added

  void check(const PerLayerSource<T>& source, size_t index, int64_t hidden) const {
    if (gate == nullptr) return;
    require(source.any() && static_cast<int64_t>(index) < source.layers, "a layer has no inputs of its own");
    require(out != nullptr && post_norm.weight != nullptr, "inputs by layer without their product or its norm");
    aioinfer::check(function, false);
    require_size(*gate, source.size, hidden);
    require_size(*out, hidden, source.size);
  }
};

// Holds the values of a step.
template <class T>
class PerLayerInputs {
 public:
  explicit PerLayerInputs(const PerLayerSource<T>& source) : source_(source) {}

  const PerLayerSource<T>& source() const { return source_; }
  bool any() const { return source_.any(); }
  void set_table(const T* table) {
    require(source_.table != nullptr && table != nullptr, "the model has no such table");
    source_.table = table;
  }
  int64_t width() const { return source_.layers * source_.size; }

  void reserve(int64_t tokens, InputBuffer<T>& inputs) {
    if (!any()) return;
    grow(values_, tokens * width());
    if (source_.words != nullptr) grow(rows_, tokens * width());
    inputs.reserve(*source_.projection, tokens);
  }

  // From the ids of tokens, which are below the vocabulary, and their vectors.
  void compute(Worker& worker, InputBuffer<T>& buffer, const int64_t* ids, const T* vectors, int64_t tokens,
               float eps) {
    const Linear<T>& projection = *source_.projection;
    const Inputs<T> inputs = set(worker, buffer, projection, vectors, tokens);
    multiply(worker, inputs, projection, [&](const Place& place, int64_t panel, Floats one, Floats other) {
      const float scale = source_.projection_scale;
      T* to = values_.data() + place.row * width();
      put_pair(to, panel, width(), rounded<T>(one) * scale, rounded<T>(other) * scale);
    });
    if (source_.words != nullptr)
      worker.parallel_in_runs(
          tokens, [&](int64_t token) { source_.words->quantised()->read(ids[token], rows_.data() + token * width()); });
    worker.parallel_in_runs(tokens * source_.layers, [&](int64_t i) {
      T* to = values_.data() + i * source_.size;
      const int64_t token = i / source_.layers;
      const T* row = source_.words == nullptr ? source_.table + ids[token] * width() : rows_.data() + token * width();
      const T* word = row + i % source_.layers * source_.size;
      normed(source_.norm, to, source_.size, eps, [&](int64_t at, Floats value) {
        const Floats other = rounded<T>(Number<T>::load_lanes(word + at) * source_.table_scale);
        Number<T>::store_lanes(to + at, rounded<T>(rounded<T>(value) + other) * source_.sum_scale);
      });
    });
  }

  // The product of layer ``index``, to ``store`` as that of a linear layer.
  template <class Store>
  void apply(Worker& worker, InputBuffer<T>& narrow, InputBuffer<T>& wide, const PerLayerPart<T>& part, size_t index,
             const T* residual, int64_t tokens, Store&& store) {
    const Inputs<T> inputs = set(worker, narrow, *part.gate, residual, tokens);
    const Inputs<T> rows = wide.inputs(*part.out, tokens);
    multiply(worker, inputs, *part.gate, [&](const Place& place, int64_t panel, Floats one, Floats other) {
      const int64_t at = panel * PANEL, size = source_.size;
      const T* values = values_.data() + (place.row * source_.layers + static_cast<int64_t>(index)) * size;
      const auto row = rows.row(place);
      rows.put(row, at, activated(part.function, one) * Number<T>::load_lanes(values + at));
      if (at + LANES < size)
        rows.put(row, at + LANES, activated(part.function, other) * Number<T>::load_lanes(values + at + LANES));
    });
    rows.finish(worker);
    multiply(worker, rows, *part.out, store);
  }

 private:
  static Inputs<T> set(Worker& worker, InputBuffer<T>& buffer, const Linear<T>& layer, const T* from, int64_t tokens) {
    const Inputs<T> inputs = buffer.inputs(layer, tokens);
    worker.parallel_in_runs(tokens, [&](int64_t token) { inputs.set(token, from + token * layer.inner); });
    return inputs;
  }

  PerLayerSource<T> source_;
  std::vector<T> values_;
  std::vector<T> rows_;  // [tokens, layers * size] of a quantised table
};

}  // namespace aioinfer
