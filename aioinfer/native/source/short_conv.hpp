// ShortConv: a causal convolution of each channel by itself; see aioinfer.model.mixers.short_conv.
//
// A task is a stretch of channels of one row. It keeps the last inputs while it goes through the row's tokens, so that
// results may take the place of inputs. The result of a token is a function of its own input and those in front of it,
// to the bit, wherever chunks end.
#pragma once

#include "linear.hpp"
#include "states.hpp"

namespace aioinfer {

// Sums in the order of the inputs, oldest first.
struct CausalConv {
  static constexpr int64_t MOST = 8;

  const float* weight;  // [size, channels], the oldest input's first
  const float* bias;    // [channels], or null
  int64_t channels, size;

  void check() const {
    require(channels > 0 && channels % SUM_LANES == 0, "the channels of a convolution are no multiple of a vector");
    require(size >= 2 && size <= MOST, "a convolution is over 2 to 8 positions");
  }

  // Elements of a state: the last size - 1 inputs.
  int64_t state_size() const { return (size - 1) * channels; }
};

// Vectors of channels of a task.
constexpr int CONV_VECTORS = LANES == 4 ? 16 : 8;

// One task: ``count`` vectors of channels from ``channel`` on, of the tokens of a row. ``before`` and ``behind``: the
// row's states, or null; ``stash``: [drafts, channels]. input(token, channel) gives LANES numbers as T has them, of
// tokens of the step, and put(token, channel, results) takes as many, of replayed ones, too.
template <class T, class Input, class Put>
void convolve_task(const CausalConv& conv, int64_t channel, int count, const RowTokens& tokens, const T* before,
                   T* behind, T* stash, Input& input, Put& put) {
  const int past = static_cast<int>(conv.size - 1);
  Floats inputs[CausalConv::MOST - 1][CONV_VECTORS];
  for (int i = 0; i < past; i++)
    for (int v = 0; v < count; v++) {
      const int64_t at = i * conv.channels + channel + v * LANES;
      inputs[i][v] = before == nullptr ? Floats{} : Number<T>::load_lanes(before + at);
    }
  const auto keep = [&] {
    if (behind == nullptr) return;
    for (int i = 0; i < past; i++)
      for (int v = 0; v < count; v++)
        Number<T>::store_lanes(behind + i * conv.channels + channel + v * LANES, inputs[i][v]);
  };
  for (int64_t i = 0; i < tokens.count; i++) {
    if (i == tokens.kept) keep();
    const int64_t token = tokens[i];
    for (int v = 0; v < count; v++) {
      const int64_t at = channel + v * LANES;
      const Floats newest =
          i < tokens.replayed ? Number<T>::load_lanes(stash + i * conv.channels + at) : input(token, at);
      if (i >= tokens.kept) Number<T>::store_lanes(stash + (i - tokens.kept) * conv.channels + at, newest);
      Floats sum{};
      for (int p = 0; p < past; p++) {
        sum = multiply_add(sum, inputs[p][v], load<Floats>(conv.weight + p * conv.channels + at));
        inputs[p][v] = p + 1 < past ? inputs[p + 1][v] : newest;
      }
      sum = multiply_add(sum, newest, load<Floats>(conv.weight + past * conv.channels + at));
      put(token, at, conv.bias == nullptr ? sum : sum + load<Floats>(conv.bias + at));
    }
  }
  if (tokens.kept == tokens.count) keep();
}

// The convolution of all rows, as a phase of a program. ``pool``: [cells, size - 1, channels]; ``stashes``: [slots,
// drafts, channels].
template <class T, class Input, class Put>
void convolve(Worker& worker, const CausalConv& conv, const Rows& rows, const RowStates& states, T* pool, T* stashes,
              Input&& input, Put&& put) {
  constexpr int64_t STRETCH = CONV_VECTORS * LANES;
  const int64_t stretches = (conv.channels + STRETCH - 1) / STRETCH;
  worker.parallel(rows.count * stretches, [&](int64_t task) {
    // Chunks are behind decodes: the long tasks come first.
    const int64_t row = rows.count - 1 - task / stretches, channel = task % stretches * STRETCH;
    const int count = static_cast<int>(std::min(STRETCH, conv.channels - channel) / LANES);
    convolve_task(conv, channel, count, states.tokens(rows, row),
                  state_of<const T>(pool, states.read[row], conv.state_size()),
                  state_of(pool, states.write[row], conv.state_size()), states.stash(stashes, row, conv.channels),
                  input, put);
  });
}

// The first half of a layer: c * conv(b * x), with b, c and x from one projection, and back to the residual.
template <class T>
struct ShortConv {
  const Linear<T>* into;  // hidden to b, c and x
  CausalConv conv;
  const Linear<T>* out;
  int64_t state;  // which pool has its state

  // Throws InvalidArguments unless the parts fit each other and a residual of size ``hidden``.
  void check(int64_t hidden) const {
    require(state >= 0, "the index of a state is negative");
    conv.check();
    require_size(*into, 3 * conv.channels, hidden);
    require_size(*out, hidden, conv.channels);
  }

  // From projections [tokens, 3, channels] to the inputs of ``out``, as a phase of a program.
  void mix(Worker& worker, const T* projected, const Rows& rows, const RowStates& states, T* pool, T* stashes,
           const Inputs<T>& mixed) const {
    const int64_t channels = conv.channels, tokens = mixed.rows();
    const auto part = [&](int64_t token, int which, int64_t at) {
      return Number<T>::load_lanes(projected + (3 * token + which) * channels + at);
    };
    convolve(
        worker, conv, rows, states, pool, stashes,
        [&](int64_t token, int64_t at) { return rounded<T>(part(token, 0, at) * part(token, 2, at)); },
        [&](int64_t token, int64_t at, Floats result) {
          if (token >= tokens) return;  // replayed
          mixed.put(mixed.row(token), at, part(token, 1, at) * rounded<T>(result));
        });
  }
};

}  // namespace aioinfer
