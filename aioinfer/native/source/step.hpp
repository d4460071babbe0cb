// The inputs and outputs of a step; see decoder.hpp.
#pragma once

#include <cstring>

#include "linear.hpp"
#include "states.hpp"

namespace aioinfer {

// The vectors of tokens: one of the first two is null.
template <class T>
struct Embedding {
  const T* vectors;        // [vocabulary, hidden]
  const Linear<T>* words;  // the same as quantised weights
  float scale;             // of these vectors
  const T* positions;      // [positions, hidden], added to them; or null

  void read(int64_t id, int64_t position, int64_t hidden, T* to) const {
    if (vectors != nullptr)
      std::memcpy(to, vectors + id * hidden, sizeof(T) * hidden);
    else
      words->quantised()->read(id, to);
    if (scale == 1.0f && positions == nullptr) return;
    for (int64_t i = 0; i < hidden; i += LANES) {
      Floats value = rounded<T>(Number<T>::load_lanes(to + i) * scale);
      if (positions != nullptr) value += Number<T>::load_lanes(positions + position * hidden + i);
      Number<T>::store_lanes(to + i, value);
    }
  }

  // The vector of a token alone, without that of a position.
  void read_word(int64_t id, int64_t hidden, T* to) const {
    Embedding words = *this;
    words.positions = nullptr;
    words.read(id, 0, hidden, to);
  }
};

// Vectors of images, which stand in place of those of tokens, and what is added to the residual behind the first layers.
template <class T>
struct ImageFeatures {
  int64_t count;
  const int64_t* rows;  // [count] tokens of the step, each once
  const T* vectors;     // [1 + deep, count, hidden]
  int64_t deep;
};

// The residual of all tokens at some places: in front of layer i, behind the last layer (their number), and that normed (one
// more).
template <class T>
struct Capture {
  int64_t count;
  const int64_t* places;  // [count]
  T* out;                 // [tokens, count, hidden]
};

// The inputs and the output of a step; see aioinfer.model.batch.Batch.
template <class T>
struct StepInput {
  const int64_t* ids;  // [tokens]
  AttentionInput attention;
  T* const* kv_pools;  // [num_kv_pools]
  int64_t num_kv_pools;
  int64_t page_size;
  int64_t num_pages;  // of each pool, the null page included
  RowStates states;          // of a model without states, all zero
  void* const* state_pools;  // [num_states] the cells of each tensor of a state
  void* const* stash_pools;  // [num_states] and what drafts bring to it; null in a step without drafts
  int64_t num_states;
  int64_t num_logits;
  const int64_t* logits_rows;
  float* logits;  // [num_logits, vocabulary]
  const int64_t* adapters;  // [rows] slots of their adapters, 0 for none; or null
  int64_t num_hidden;
  const int64_t* hidden_rows;
  float* hidden;  // [num_hidden, hidden] the normed residual, not rounded
  ImageFeatures<T> features;
  const T* cos;   // [tokens, rotary_dim] in place of the layers' tables; or null
  const T* sin;
  Capture<T> capture;
};

}  // namespace aioinfer
