// Mamba2: a state space with one decay for each head; see aioinfer.model.mixers.mamba2.
//
// The state of a head is a matrix [state_size, head_dim]. Its columns do not depend on each other, so a task is a row,
// a head, and some of its columns. It goes through the row's tokens in stretches: what the columns of a head share
// (steps, decays, b, c) is read once for a stretch. Then a tile of the state, a few rows by a few vectors of columns,
// stays in registers while it goes through the stretch: a token costs three operations for each vector of the state,
// and no access to memory.
//
//   S' = d S + b (dt x)^T    result = S'^T c + skip x
//
// A result is summed in the order of the rows of the state, and every state is made from the one before it: results
// have the same bits wherever chunks and stretches end. A scan over chunks would take two operations instead of three,
// and its bits would depend on where chunks begin.
#pragma once

#include <cmath>

#include "gates.hpp"
#include "short_conv.hpp"

namespace aioinfer {

struct MambaShape {
  int64_t heads, head_dim, groups, state_size;

  int64_t values() const { return heads * head_dim; }
  int64_t shared() const { return groups * state_size; }           // elements of b of a token, and of c
  int64_t channels() const { return values() + 2 * shared(); }     // x, b, c
  int64_t width() const { return values() + channels() + heads; }  // gates of the result, channels, steps
  int64_t head_size() const { return state_size * head_dim; }
  int64_t cell_size() const { return heads * head_size(); }

  void check() const {
    require(heads > 0 && groups > 0 && heads % groups == 0, "the heads do not divide into so many groups");
    require(head_dim > 0 && head_dim % SUM_LANES == 0, "head_dim is no multiple of a vector");
    require(state_size > 0 && state_size % SUM_LANES == 0, "state_size is no multiple of a vector");
  }
};

// Scratch memory of one worker.
struct MambaScratch {
  // Tokens of a stretch: what they have fits the smallest cache.
  static constexpr int STRETCH = 16;

  void reserve(const MambaShape& shape) {
    grow(b, STRETCH * shape.state_size), grow(c, STRETCH * shape.state_size);
    grow(x, STRETCH * shape.head_dim), grow(results, STRETCH * shape.head_dim);
    grow(state, shape.head_size());
    grow(gated, shape.values());
  }

  Buffer<float> b, c;        // [STRETCH, state_size]
  Buffer<float> x, results;  // [STRETCH, head_dim], x times its steps
  Buffer<float> state;       // of a task, between its stretches
  Buffer<float> gated;       // [values] of a token
  float decays[STRETCH];
};

// COUNT vectors of columns, from ``column`` on, go through the first ``tokens`` tokens of a stretch. A state without
// memory is 0, or not wanted: ``before`` the tokens, ``kept`` behind ``keep`` of them, ``behind`` all of them. Each of
// these may be ``before``.
template <int COUNT>
void scan_columns(MambaScratch& scratch, const MambaShape& shape, int64_t column, int tokens, const float* before,
                  int keep, float* kept, float* behind) {
  constexpr int ROWS = 4;
  const int64_t width = shape.head_dim, size = shape.state_size;
  for (int64_t row = 0; row < size; row += ROWS) {
    Floats state[ROWS][COUNT];
    const auto at = [&](int i, int v) { return (row + i) * width + column + v * LANES; };
    const auto put = [&](float* to) __attribute__((always_inline)) {
      if (to == nullptr) return;
      AIOINFER_UNROLL
      for (int i = 0; i < ROWS; i++)
        AIOINFER_UNROLL
        for (int v = 0; v < COUNT; v++) store(to + at(i, v), state[i][v]);
    };
    AIOINFER_UNROLL
    for (int i = 0; i < ROWS; i++)
      AIOINFER_UNROLL
      for (int v = 0; v < COUNT; v++) state[i][v] = before == nullptr ? Floats{} : load<Floats>(before + at(i, v));
    const auto go = [&](int from, int to) __attribute__((always_inline)) {
      for (int t = from; t < to; t++) {
        const float *b = &scratch.b[t * size + row], *c = &scratch.c[t * size + row], *x = &scratch.x[t * width + column];
        float* results = &scratch.results[t * width + column];
        const Floats decay = spread(scratch.decays[t]);
        Floats inputs[COUNT], sums[COUNT];
        AIOINFER_UNROLL
        for (int v = 0; v < COUNT; v++) inputs[v] = load<Floats>(x + v * LANES), sums[v] = load<Floats>(results + v * LANES);
        AIOINFER_UNROLL
        for (int i = 0; i < ROWS; i++) {
          const Floats input = spread(b[i]), output = spread(c[i]);
          AIOINFER_UNROLL
          for (int v = 0; v < COUNT; v++) {
            state[i][v] = multiply_add(inputs[v] * input, state[i][v], decay);
            sums[v] = multiply_add(sums[v], state[i][v], output);
          }
        }
        AIOINFER_UNROLL
        for (int v = 0; v < COUNT; v++) store(results + v * LANES, sums[v]);
      }
    };
    go(0, keep);
    put(kept);
    go(keep, tokens);
    put(behind);
  }
}

// The first half of a layer. Of a token, ``into`` makes gates of the result, x, b and c of all groups, and steps before
// their function.
template <class T>
struct Mamba2 {
  MambaShape shape;
  const Linear<T>* into;  // hidden to shape.width()
  CausalConv conv;        // of x, b and c, followed by SiLU
  const float* bias;      // [heads], of steps
  const float* rate;      // [heads]
  const float* skip;      // [heads]
  const float* norm;      // [values], of gated results by group; or null
  float eps, gate_scale, step_scale;
  const Linear<T>* out;
  int64_t state;  // which pool has the inputs of the convolution; the next one has the states of the heads

  // Throws InvalidArguments unless the parts fit each other and a residual of size ``hidden``.
  void check(int64_t hidden) const {
    require(state >= 0, "the index of a state is negative");
    require(bias != nullptr && rate != nullptr && skip != nullptr, "a state space without steps, decays or a skip");
    shape.check();
    conv.check();
    require(conv.channels == shape.channels(), "a convolution of other channels");
    require(norm == nullptr || shape.values() / shape.groups % SUM_LANES == 0, "a group is no multiple of a vector");
    require_size(*into, shape.width(), hidden);
    require_size(*out, hidden, shape.values());
  }

  // From projections [tokens, width] to the inputs of ``out``, in three phases of a program. Changes the projections.
  // ``inputs_stash`` and ``steps_stash``: of the inputs of the convolution and of steps.
  void mix(Worker& worker, T* projected, const Rows& rows, const RowStates& states, T* inputs, T* inputs_stash,
           float* pool, T* steps_stash, MambaScratch& scratch, const Inputs<T>& mixed) const {
    const int64_t width = shape.width(), values = shape.values();
    if (states.replays != nullptr)
      worker.parallel(rows.count, [&](int64_t row) {
        exchange(states.tokens(rows, row), states.stash(steps_stash, row, shape.heads), shape.heads,
                 projected + values + shape.channels(), width);
      });
    convolve(
        worker, conv, rows, states, inputs, inputs_stash,
        [&](int64_t token, int64_t at) { return Number<T>::load_lanes(projected + token * width + values + at); },
        [&](int64_t token, int64_t at, Floats result) {
          Number<T>::store_lanes(projected + token * width + values + at, silu(rounded<T>(result)));
        });
    const int64_t parts = parts_of(rows.count, worker.workers());
    worker.parallel(rows.count * shape.heads * parts, [&](int64_t task) {
      // Chunks are behind decodes: the long tasks come first.
      const int64_t row = rows.count - 1 - task / (shape.heads * parts);
      const int64_t head = task / parts % shape.heads, part = task % parts;
      const int64_t vectors = shape.head_dim / LANES;
      const int64_t first = vectors * part / parts * LANES, last = vectors * (part + 1) / parts * LANES;
      scan(states.tokens(rows, row), head, first, last,
           state_of<const float>(pool, states.read[row], shape.cell_size()),
           state_of(pool, states.write[row], shape.cell_size()), projected, scratch);
    });
    worker.parallel_in_runs(mixed.rows(), [&](int64_t token) { finish(token, projected + token * width, scratch, mixed); });
  }

 private:
  // Vectors of columns of a tile.
  static constexpr int AT_ONCE = MANY_REGISTERS ? 4 : 2;

  // Into how many tasks the columns of a head are divided, so that all workers have some.
  int64_t parts_of(int64_t rows, int workers) const {
    const int64_t wanted = 4 * workers / std::max<int64_t>(1, rows * shape.heads);
    return std::clamp<int64_t>(wanted, 1, (shape.head_dim / LANES + AT_ONCE - 1) / AT_ONCE);
  }

  // The tokens of a row, and columns [first, last) of a head. A row without tokens keeps its state.
  void scan(const RowTokens& row, int64_t head, int64_t first, int64_t last, const float* before, float* behind,
            T* projected, MambaScratch& scratch) const {
    const int64_t at = head * shape.head_size();
    const float* start = before == nullptr ? nullptr : before + at;
    float* const left = behind == nullptr ? nullptr : behind + at;
    for (int64_t begin = 0; begin < row.count || begin == 0; begin += MambaScratch::STRETCH) {
      const int tokens = static_cast<int>(std::min<int64_t>(MambaScratch::STRETCH, row.count - begin));
      for (int t = 0; t < tokens; t++)
        prepare(t, projected + row[begin + t] * shape.width(), head, first, last, scratch);
      // The stretch with the last token that is kept leaves the state; so does the first one, if there is none.
      const int64_t keep = row.kept - begin;
      const bool leaves = keep <= tokens && (keep > 0 || begin == 0);
      const bool ends = begin + tokens >= row.count;
      const auto go = [&](auto count, int64_t column) {
        scan_columns<decltype(count)::value>(scratch, shape, column, tokens, start, leaves ? static_cast<int>(keep) : tokens,
                                             leaves ? left : nullptr, ends ? nullptr : scratch.state.data());
      };
      int64_t column = first;
      for (; column + AT_ONCE * LANES <= last; column += AT_ONCE * LANES) go(std::integral_constant<int, AT_ONCE>(), column);
      for (; column + 2 * LANES <= last; column += 2 * LANES) go(std::integral_constant<int, 2>(), column);
      for (; column < last; column += LANES) go(std::integral_constant<int, 1>(), column);
      for (int t = 0; t < tokens; t++) {
        T* result = projected + row[begin + t] * shape.width() + shape.values() + head * shape.head_dim;
        for (int64_t i = first; i < last; i += LANES)
          Number<T>::store_lanes(result + i, load<Floats>(&scratch.results[t * shape.head_dim + i]));
      }
      start = scratch.state.data();
    }
  }

  // What a task reads of token ``t`` of a stretch.
  void prepare(int t, const T* token, int64_t head, int64_t first, int64_t last, MambaScratch& scratch) const {
    const T *x = token + shape.values() + head * shape.head_dim, *steps = token + shape.values() + shape.channels();
    const T* b = token + 2 * shape.values() + head / (shape.heads / shape.groups) * shape.state_size;
    const T* c = b + shape.shared();
    const float step = softplus(step_scale * Number<T>::read(steps[head]) + bias[head]);
    // In double precision, so that libraries whose last bits differ agree once it is rounded.
    scratch.decays[t] = static_cast<float>(std::exp(-double{rate[head]} * step));
    for (int64_t i = first; i < last; i += LANES) {
      const Floats value = Number<T>::load_lanes(x + i);
      store(&scratch.x[t * shape.head_dim + i], value * step);
      store(&scratch.results[t * shape.head_dim + i], value * skip[head]);
    }
    for (int64_t i = 0; i < shape.state_size; i += LANES) {
      store(&scratch.b[t * shape.state_size + i], Number<T>::load_lanes(b + i));
      store(&scratch.c[t * shape.state_size + i], Number<T>::load_lanes(c + i));
    }
  }

  static float softplus(float x) { return x > 20.0f ? x : static_cast<float>(std::log1p(std::exp(double{x}))); }

  // Gate the results of a token, and norm those of each group.
  void finish(int64_t index, const T* token, MambaScratch& scratch, const Inputs<T>& mixed) const {
    const auto to = mixed.row(index);
    const int64_t values = shape.values(), size = values / shape.groups;
    const T* results = token + values;
    float* gated = scratch.gated.data();
    for (int64_t i = 0; i < values; i += LANES) {
      const Floats gate = silu(gate_scale * Number<T>::load_lanes(token + i));
      store(gated + i, Number<T>::load_lanes(results + i) * gate);
    }
    for (int64_t group = 0; group < values; group += size) {
      const float factor = norm == nullptr ? 1.0f : inverse_rms(gated + group, size, eps);
      for (int64_t i = group; i < group + size; i += LANES) {
        const Floats value = load<Floats>(gated + i);
        mixed.put(to, i, norm == nullptr ? value : value * factor * load<Floats>(norm + i));
      }
    }
  }
};

}  // namespace aioinfer
