// States: where rows find and leave the recurrent state of their sequence; see aioinfer.model.state.
#pragma once

#include "checks.hpp"

namespace aioinfer {

struct RowStates {
  const int64_t* read;   // [rows] the cell that a row starts from; 0: it starts from zeros
  const int64_t* write;  // [rows] the cell that it leaves its state in; 0: in none
  int64_t cells;         // of each pool, the null cell included
};

inline void check(const RowStates& states, int64_t rows) {
  const bool given = states.read != nullptr && states.write != nullptr;
  require(given || rows == 0, "a step without cells for the states of its rows");
  require_below("read", states.read, rows, states.cells);
  require_below("write", states.write, rows, states.cells);
}

// The state of a row in a pool of cells of ``size`` elements; null for one that starts from zeros, or is not kept.
template <class V>
V* state_of(V* pool, int64_t index, int64_t size) {
  return index == 0 ? nullptr : pool + index * size;
}

}  // namespace aioinfer
