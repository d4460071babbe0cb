// States: where rows find and leave the recurrent state of their sequence; see aioinfer.model.state.
#pragma once

#include "attention.hpp"

namespace aioinfer {

// The tokens that a row goes through: ``replayed`` ones, which are in its stash, and its own, the last of them drafts.
struct RowTokens {
  int64_t count, replayed;
  int64_t kept;         // the state is left as it is behind so many; the others are drafts
  int64_t first, own;   // index of the first that is replayed, behind all tokens of the step; of the first of its own

  int64_t operator[](int64_t i) const { return i < replayed ? first + i : own + i - replayed; }
};

struct RowStates {
  const int64_t* read;   // [rows] the cell that a row starts from; 0: it starts from zeros
  const int64_t* write;  // [rows] the cell that it leaves its state in; 0: in none
  int64_t cells;         // of each pool, the null cell included
  // Of a step in which rows have drafts or replay some, else null. The stash of a row is that of the cell it writes.
  const int64_t* replays;  // [rows + 1] row r replays replays[r + 1] - replays[r] tokens
  const int64_t* kept;     // [rows] tokens of a row that its state includes
  int64_t stashes, drafts;  // of each pool, and what one has room for

  int64_t replayed(const Rows& rows) const { return replays == nullptr ? 0 : replays[rows.count]; }

  RowTokens tokens(const Rows& rows, int64_t row) const {
    const int64_t own = rows.starts[row], count = rows.starts[row + 1] - own;
    if (replays == nullptr) return {count, 0, count, 0, own};
    const int64_t replayed = replays[row + 1] - replays[row];
    return {replayed + count, replayed, replayed + kept[row], rows.starts[rows.count] + replays[row], own};
  }

  // The stash of a row in a pool of ``width`` elements a token; null if it has none.
  template <class V>
  V* stash(V* pool, int64_t row, int64_t width) const {
    return pool == nullptr ? nullptr : pool + write[row] * drafts * width;
  }
};

inline void check(const RowStates& states, const Rows& rows) {
  const bool given = states.read != nullptr && states.write != nullptr;
  require(given || rows.count == 0, "a step without cells for the states of its rows");
  require_below("read", states.read, rows.count, states.cells);
  require_below("write", states.write, rows.count, states.cells);
  if (states.replays == nullptr) return;
  require(states.kept != nullptr && states.replays[0] == 0, "rows with drafts do not say what their states include");
  require(states.stashes > 0, "a step with drafts and no stashes");
  for (int64_t row = 0; row < rows.count; row++) {
    const RowTokens tokens = states.tokens(rows, row);
    const int64_t drafts = tokens.count - tokens.kept;
    const bool whole = tokens.replayed >= 0 && drafts >= 0 && (tokens.kept > tokens.replayed || tokens.count == 0);
    require(whole, "kept or replays is not in order");
    require(std::max(tokens.replayed, drafts) <= states.drafts, "a stash has no room for the drafts of a row");
    const bool stashed = tokens.replayed > 0 || drafts > 0;
    require(!stashed || (states.write[row] > 0 && states.write[row] < states.stashes), "a row has no stash");
  }
}

// What the drafts of a row are for a layer, ``width`` elements of each token of the step, which are ``stride`` apart, goes
// to its stash; and what was there of those that the row replays, behind the step's tokens.
template <class T>
void exchange(const RowTokens& tokens, T* stash, int64_t width, T* values, int64_t stride) {
  for (int64_t i = 0; i < tokens.replayed; i++) std::copy_n(stash + i * width, width, values + tokens[i] * stride);
  for (int64_t i = tokens.kept; i < tokens.count; i++)
    std::copy_n(values + tokens[i] * stride, width, stash + (i - tokens.kept) * width);
}

// The state of a row in a pool of cells of ``size`` elements; null for one that starts from zeros, or is not kept.
template <class V>
V* state_of(V* pool, int64_t index, int64_t size) {
  return index == 0 ? nullptr : pool + index * size;
}

}  // namespace aioinfer
