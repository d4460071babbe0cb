// DeltaRule: linear attention by the gated delta rule; see aioinfer.model.mixers.delta_rule.
//
// The state of a head is a matrix [key_dim, value_dim]. Its columns do not depend on each other, so a task is a row, a
// head, and some of its columns. It goes through the row's tokens in stretches: what the columns of a head share
// (queries, keys, decays) is computed once for a stretch, and then a pair of vectors of columns goes through it.
//
// A token decays the state S, adds a multiple of its key, and reads by its query:
//
//   S' = d S + k c^T    c = beta (v - d S^T k)    result = S'^T q = d S^T q + (k . q) c
//
// Both products are of the state in front of the token. So the pass over the state that makes S' also sums what the
// next token asks of it, and a stretch of n tokens takes n + 1 passes. The sums are in the order of the keys'
// dimensions, and each operation is the same in the first, a middle and the last pass: results have the same bits
// wherever chunks and stretches end.
#pragma once

#include <cmath>
#include <memory>

#include "gates.hpp"
#include "short_conv.hpp"

namespace aioinfer {

struct DeltaShape {
  int64_t key_heads, value_heads, key_dim, value_dim;

  int64_t keys() const { return key_heads * key_dim; }
  int64_t values() const { return value_heads * value_dim; }
  int64_t channels() const { return 2 * keys() + values(); }  // queries, keys, values
  int64_t width() const { return channels() + values(); }     // and the gates of the result
  int64_t head_size() const { return key_dim * value_dim; }
  int64_t state_size() const { return value_heads * head_size(); }

  void check() const {
    const bool whole = key_heads > 0 && value_heads > 0 && value_heads % key_heads == 0;
    require(whole, "value_heads is no multiple of key_heads");
    require(key_dim > 0 && key_dim % SUM_LANES == 0, "key_dim is no multiple of a vector");
    require(value_dim > 0 && value_dim % SUM_LANES == 0, "value_dim is no multiple of a vector");
  }
};

// Scratch memory of one worker.
struct DeltaScratch {
  // Tokens of a stretch.
  static constexpr int STRETCH = 32;

  void reserve(const DeltaShape& shape) {
    grow(queries, STRETCH * shape.key_dim);
    grow(keys, STRETCH * shape.key_dim);
    grow(state, shape.head_size());
  }

  Buffer<float> queries, keys;  // [STRETCH, key_dim] normed
  Buffer<float> state;          // of the task's columns, between its first pass and its last; pair by pair
  float decays[STRETCH], strengths[STRETCH], products[STRETCH];  // products: of key and query
};

// Some columns of a head's state in memory, rows ``stride`` apart; without memory they are 0.
struct StateColumns {
  float* data;
  int64_t stride;
};

// COUNT vectors of columns go through the first ``tokens`` tokens of a stretch. ``behind`` may be ``before``, or
// without memory: not kept. take(token, v) gives LANES values, put(token, v, results) takes as many.
template <int COUNT, class Take, class Put>
void apply_to_columns(const DeltaScratch& scratch, int64_t key_dim, int tokens, StateColumns before, float* between,
                      StateColumns behind, Take&& take, Put&& put) {
  alignas(64) static const float zeros[COUNT * LANES] = {};
  const float* from = before.data == nullptr ? zeros : before.data;
  int64_t stride = before.data == nullptr ? 0 : before.stride;
  Floats known[COUNT], read[COUNT];  // S^T k and S^T q
  for (int v = 0; v < COUNT; v++) known[v] = read[v] = Floats{};
  const auto ask = [&](Floats state, int v, float key, float query) {
    known[v] = multiply_add(known[v], state, spread(key));
    read[v] = multiply_add(read[v], state, spread(query));
  };
  for (int64_t i = 0; i < key_dim; i++)
    AIOINFER_UNROLL
    for (int v = 0; v < COUNT; v++)
      ask(load<Floats>(from + i * stride + v * LANES), v, scratch.keys[i], scratch.queries[i]);
  for (int t = 0; t < tokens; t++) {
    const Floats decay = spread(scratch.decays[t]), strength = spread(scratch.strengths[t]);
    const float* key = &scratch.keys[t * key_dim];
    Floats change[COUNT];
    for (int v = 0; v < COUNT; v++) {
      change[v] = strength * multiply_add(take(t, v), -decay, known[v]);
      put(t, v, multiply_add(decay * read[v], change[v], spread(scratch.products[t])));
      known[v] = read[v] = Floats{};
    }
    const auto changed = [&](int64_t i, int v) {
      return multiply_add(spread(key[i]) * change[v], decay, load<Floats>(from + i * stride + v * LANES));
    };
    if (t + 1 < tokens) {
      const float *next_key = key + key_dim, *next_query = &scratch.queries[(t + 1) * key_dim];
      for (int64_t i = 0; i < key_dim; i++)
        AIOINFER_UNROLL
        for (int v = 0; v < COUNT; v++) {
          const Floats state = changed(i, v);
          store(between + (i * COUNT + v) * LANES, state);
          ask(state, v, next_key[i], next_query[i]);
        }
      from = between, stride = COUNT * LANES;
    } else if (behind.data != nullptr) {
      for (int64_t i = 0; i < key_dim; i++)
        AIOINFER_UNROLL
        for (int v = 0; v < COUNT; v++) store(behind.data + i * behind.stride + v * LANES, changed(i, v));
    }
  }
}

// The first half of a layer. Of a token, ``into`` makes queries, keys, values and the gates of the result, and
// ``gates`` strengths and then decays, before their functions.
template <class T>
struct DeltaRule {
  DeltaShape shape;
  const Linear<T>* into;   // hidden to shape.width()
  const Linear<T>* gates;  // hidden to 2 * value_heads
  CausalConv conv;         // of queries, keys and values, followed by SiLU
  const float* rate;       // [value_heads], see decay()
  const float* bias;       // [value_heads]
  const float* norm;       // [value_dim]
  float eps;
  const Linear<T>* out;
  int64_t state;  // which pool has the inputs of the convolution; the next one has the states of the heads

  // Throws InvalidArguments unless the parts fit each other and a residual of size ``hidden``.
  void check(int64_t hidden) const {
    require(state >= 0, "the index of a state is negative");
    require(rate != nullptr && bias != nullptr && norm != nullptr, "a delta rule without decays or a norm");
    shape.check();
    conv.check();
    require(conv.channels == shape.channels(), "a convolution of other channels");
    require_size(*into, shape.width(), hidden);
    require_size(*gates, 2 * shape.value_heads, hidden);
    require_size(*out, hidden, shape.values());
  }

  // From projections [tokens, width] and gates [tokens, 2 * value_heads] to the inputs of ``out``, in three phases of a
  // program. Changes the projections.
  // ``inputs_stash`` and ``gates_stash``: of the inputs of the convolution and of gates.
  void mix(Worker& worker, T* projected, T* gated, const Rows& rows, const RowStates& states, T* inputs,
           T* inputs_stash, float* pool, T* gates_stash, DeltaScratch& scratch, const Inputs<T>& mixed) const {
    const int64_t width = shape.width(), gates_width = 2 * shape.value_heads;
    if (states.replays != nullptr)
      worker.parallel(rows.count, [&](int64_t row) {
        exchange(states.tokens(rows, row), states.stash(gates_stash, row, gates_width), gates_width, gated,
                 gates_width);
      });
    convolve(
        worker, conv, rows, states, inputs, inputs_stash,
        [&](int64_t token, int64_t at) { return Number<T>::load_lanes(projected + token * width + at); },
        [&](int64_t token, int64_t at, Floats result) {
          Number<T>::store_lanes(projected + token * width + at, silu(rounded<T>(result)));
        });
    const int64_t parts = parts_of(rows.count, worker.workers());
    worker.parallel(rows.count * shape.value_heads * parts, [&](int64_t task) {
      // Chunks are behind decodes: the long tasks come first.
      const int64_t row = rows.count - 1 - task / (shape.value_heads * parts);
      const int64_t head = task / parts % shape.value_heads, part = task % parts;
      const int64_t vectors = shape.value_dim / LANES;
      const int64_t first = vectors * part / parts, last = vectors * (part + 1) / parts;
      apply(states.tokens(rows, row), head, first * LANES, last * LANES,
            state_of<const float>(pool, states.read[row], shape.state_size()),
            state_of(pool, states.write[row], shape.state_size()), projected, gated, scratch);
    });
    worker.parallel_in_runs(mixed.rows(), [&](int64_t token) { finish(token, projected + token * width, mixed); });
  }

 private:
  // Vectors of columns that go through a stretch together.
  static constexpr int AT_ONCE = LANES == 4 ? 4 : 2;

  // Into how many tasks the columns of a head are divided, so that all workers have some.
  int64_t parts_of(int64_t rows, int workers) const {
    const int64_t wanted = 4 * workers / std::max<int64_t>(1, rows * shape.value_heads);
    return std::clamp<int64_t>(wanted, 1, (shape.value_dim / LANES + AT_ONCE - 1) / AT_ONCE);
  }

  // The tokens of a row, and columns [first, last) of a head.
  void apply(const RowTokens& row, int64_t head, int64_t first, int64_t last, const float* before, float* behind,
             T* projected, const T* gated, DeltaScratch& scratch) const {
    const int64_t values = 2 * shape.keys() + head * shape.value_dim, at = head * shape.head_size();
    // A row without tokens keeps its state.
    if (row.count == 0) return keep(at, first, last, before, behind);
    for (int64_t begin = 0, end; begin < row.count; begin = end) {
      end = std::min<int64_t>(begin + DeltaScratch::STRETCH, begin < row.kept ? row.kept : row.count);
      const int tokens = static_cast<int>(end - begin);
      for (int t = 0; t < tokens; t++)
        prepare(t, projected + row[begin + t] * shape.width(), gated + row[begin + t] * 2 * shape.value_heads, head,
                scratch);
      const auto go = [&](auto count, int64_t column) {
        constexpr int COUNT = decltype(count)::value;
        const StateColumns between{scratch.state.data() + (column - first) * shape.key_dim, COUNT * LANES};
        const StateColumns old{before == nullptr ? nullptr : const_cast<float*>(before) + at + column, shape.value_dim};
        const StateColumns kept{behind == nullptr ? nullptr : behind + at + column, shape.value_dim};
        // Drafts go on from what is kept, and leave nothing.
        const StateColumns from = begin == 0 ? old : begin == row.kept ? kept : between;
        const StateColumns to = end == row.kept ? kept : end == row.count ? StateColumns{} : between;
        T* value_of = projected + values + column;
        const auto value = [&](int t, int v) { return value_of + row[begin + t] * shape.width() + v * LANES; };
        apply_to_columns<COUNT>(
            scratch, shape.key_dim, tokens, from, between.data, to,
            [&](int t, int v) { return Number<T>::load_lanes(value(t, v)); },
            [&](int t, int v, Floats result) { Number<T>::store_lanes(value(t, v), result); });
      };
      int64_t column = first;
      for (; column + AT_ONCE * LANES <= last; column += AT_ONCE * LANES) go(std::integral_constant<int, AT_ONCE>(), column);
      for (; column < last; column += LANES) go(std::integral_constant<int, 1>(), column);
    }
  }

  void keep(int64_t at, int64_t first, int64_t last, const float* before, float* behind) const {
    if (behind == nullptr || before == behind) return;
    for (int64_t i = 0; i < shape.key_dim; i++)
      for (int64_t column = first; column < last; column++) {
        const int64_t where = at + i * shape.value_dim + column;
        behind[where] = before == nullptr ? 0.0f : before[where];
      }
  }

  // What the columns of a head share, of token ``t`` of a stretch.
  void prepare(int t, const T* token, const T* gated, int64_t head, DeltaScratch& scratch) const {
    const int64_t size = shape.key_dim, at = head / (shape.value_heads / shape.key_heads) * size;
    float *query = &scratch.queries[t * size], *key = &scratch.keys[t * size];
    const T *from_query = token + at, *from_key = token + shape.keys() + at;
    const float scale = 1.0f / std::sqrt(static_cast<float>(size));
    const float query_factor = inverse_length(from_query, size) * scale, key_factor = inverse_length(from_key, size);
    scratch.products[t] = sum_over(size, [&](int64_t i, Floats sums) __attribute__((always_inline)) {
      const Floats q = Number<T>::load_lanes(from_query + i) * query_factor;
      const Floats k = Number<T>::load_lanes(from_key + i) * key_factor;
      store(query + i, q), store(key + i, k);
      return multiply_add(sums, q, k);
    });
    scratch.strengths[t] = sigmoid(spread(Number<T>::read(gated[head])))[0];
    scratch.decays[t] = decay(Number<T>::read(gated[shape.value_heads + head]) + bias[head], rate[head]);
  }

  static float inverse_length(const T* from, int64_t size) {
    constexpr float EPS = 1e-6f;
    return 1.0f / std::sqrt(sum_of_squares(from, size) + EPS);
  }

  // e^(-rate * softplus(x)). In double precision, so that libraries whose last bits differ agree once it is rounded.
  static float decay(float x, float rate) {
    const float softplus = x > 20.0f ? x : static_cast<float>(std::log1p(std::exp(double{x})));
    return static_cast<float>(std::exp(-double{rate} * softplus));
  }

  // Norm the results of a token's heads, and gate them.
  void finish(int64_t index, const T* token, const Inputs<T>& mixed) const {
    const auto to = mixed.row(index);
    for (int64_t head = 0; head < shape.value_heads; head++) {
      const int64_t at = head * shape.value_dim;
      const T *result = token + 2 * shape.keys() + at, *gate = token + shape.channels() + at;
      const float factor = inverse_rms(result, shape.value_dim, eps);
      for (int64_t i = 0; i < shape.value_dim; i += LANES) {
        const Floats normed = Number<T>::load_lanes(result + i) * factor * load<Floats>(norm + i);
        mixed.put(to, at + i, normed * silu(Number<T>::load_lanes(gate + i)));
      }
    }
  }
};

}  // namespace aioinfer
