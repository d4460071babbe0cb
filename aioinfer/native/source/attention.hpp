// Attention over paged keys and values, with a softmax that streams (Milakov and Gimelshein, 2018; Dao et al., 2022).
//
// A task is some queries of one row that share a KV head. It processes the context in stretches of SPAN
// positions counted from the start of the sequence: scores, their exponentials, weighted values. The result of a
// query is a function of the positions that it sees, to the bit: it depends neither on other queries, nor on how
// the prompt was cut into chunks, nor on the pages of the context.
#pragma once

#include <cmath>
#include <vector>

#include "checks.hpp"
#include "heads.hpp"
#include "kv_pool.hpp"
#include "linear.hpp"

namespace aioinfer {

constexpr int SPAN = 128;

// Constants of a layer: the positions that a query sees, and the scale of scores.
struct AttentionParams {
  float scale;
  float soft_cap;  // 0: none
  int64_t window;  // positions up to a query's own; 0: all
  int64_t block;   // positions of a block; a query sees its own block to the end; 1: causal

  int64_t first_visible(int64_t position) const { return window && position >= window ? position - window + 1 : 0; }
  int64_t behind_visible(int64_t position, int64_t length) const {
    return std::min((position / block + 1) * block, length);
  }
};

// The rows of a step; see aioinfer.model.batch.Batch.
struct Rows {
  int64_t count;
  const int64_t* starts;   // [count + 1] first token of each
  const int64_t* lengths;  // [count] positions of its sequence
  const int64_t* tables;   // [count, width] pages of its sequence
  int64_t width;
};

// Refuse rows that lie beyond the tokens, or whose sequences lie beyond the pages that their tables have or the pool has.
inline void check(const Rows& rows, int64_t tokens, int64_t page_size, int64_t pages) {
  require(page_size > 0 && rows.count >= 0 && rows.width >= 0, "page_size, rows or table_width is not a size");
  require(rows.starts[0] >= 0 && rows.starts[rows.count] <= tokens, "cu_q goes beyond the tokens");
  require(std::is_sorted(rows.starts, rows.starts + rows.count + 1), "cu_q is not in order");
  require_below("kv_len", rows.lengths, rows.count, rows.width * page_size + 1);
  for (int64_t row = 0; row < rows.count; row++)
    require_below("block_table", rows.tables + row * rows.width, (rows.lengths[row] + page_size - 1) / page_size, pages);
}

// Some queries of a row that share a KV head. Query i is that of token i / group, of its head i % group.
struct AttentionTask {
  int64_t row, head, first;
  int queries;
};

inline std::vector<AttentionTask> divide(const Rows& rows, int64_t kv_heads, int64_t group) {
  std::vector<AttentionTask> tasks;
  for (int64_t row = 0; row < rows.count; row++) {
    const Blocks blocks((rows.starts[row + 1] - rows.starts[row]) * group);
    for (int64_t head = 0; head < kv_heads; head++)
      // Later queries see more: the long tasks come first.
      for (int64_t b = blocks.count - 1; b >= 0; b--) {
        const int64_t first = b * blocks.height;
        tasks.push_back({row, head, first, static_cast<int>(std::min<int64_t>(blocks.height, blocks.rows - first))});
      }
  }
  return tasks;
}

// Scratch memory of one worker.
template <class T>
struct AttentionScratch {
  explicit AttentionScratch(int64_t head_dim)
      : queries(MAX_ROWS * head_dim), weights(MAX_ROWS * SPAN), scores(MAX_ROWS * SPAN), sums(MAX_ROWS * head_dim),
        tiles(2 * SPAN * head_dim) {}
  std::vector<uint32_t> queries, weights;
  std::vector<float> scores, sums;
  std::vector<T> tiles;
};

// The computation of one task with QUERIES queries.
template <class T, int QUERIES>
class Attending {
 public:
  static constexpr int PER_UNIT = Number<T>::PER_UNIT;
  static constexpr int PER_TILE = TILE / LANES;

  // ``position``: those of the queries.
  Attending(const Context<T>& context, int64_t head_dim, const AttentionParams& params,
            const int64_t (&position)[QUERIES], int64_t length, AttentionScratch<T>& scratch)
      : context_(context), head_dim_(head_dim), params_(params), scratch_(scratch) {
    for (int q = 0; q < QUERIES; q++) {
      from_[q] = params.first_visible(position[q]);
      to_[q] = params.behind_visible(position[q], length);
      best_[q] = -INFINITY;
      total_[q] = 0;
    }
  }

  void run() {
    const int64_t first = *std::min_element(from_, from_ + QUERIES) / SPAN * SPAN;
    const int64_t behind = *std::max_element(to_, to_ + QUERIES);
    for (int64_t at = first; at < behind; at += SPAN) {
      const int count = static_cast<int>(std::min<int64_t>(SPAN, behind - at)), tiles = (count + TILE - 1) / TILE;
      locate(at / TILE, tiles, (behind + TILE - 1) / TILE);
      score(tiles);
      weigh(at, tiles);
      add_values(count, at == first);
    }
  }

  // put(dimension, LANES results) of one query
  template <class Put>
  void finish(int q, Put&& put) const {
    const float share = 1.0f / total_[q];
    for (int64_t d = 0; d < head_dim_; d += LANES) put(d, load<Floats>(&scratch_.sums[q * head_dim_ + d]) * share);
  }

 private:
  // With so few queries the time goes to memory, not to arithmetic.
  static constexpr bool LEAN = QUERIES <= MAX_ROWS / 2;

  // Find the tiles of the stretch from tile ``first`` on, and of the next stretch, out of ``all`` tiles.
  void locate(int64_t first, int tiles, int64_t all) {
    const int64_t half = TILE * head_dim_;
    for (int i = 0; i < tiles; i++) {
      tile_[i] = context_.tile(first + i, &scratch_.tiles[2 * half * i]);
      const int64_t later = first + i + SPAN / TILE;
      next_[i] = LEAN && later < all && context_.lies() ? context_.tile(later, nullptr) : tile_[i];
    }
  }

  // Scores of all queries and of ``tiles`` tiles, before any cap or mask.
  void score(int tiles) {
    constexpr int WIDE = context_vectors();
    const int vectors = tiles * PER_TILE;
    int v = 0;
    for (; v + WIDE <= vectors; v += WIDE) score_vectors<WIDE>(v);
    for (; v < vectors; v++) score_vectors<1>(v);
  }

  template <int COUNT>
  AIOINFER_INLINE void score_vectors(int first) {
    const uint32_t *keys[COUNT], *values[COUNT];
    Floats sums[QUERIES][COUNT];
    AIOINFER_UNROLL
    for (int v = 0; v < COUNT; v++) {
      keys[v] = tile_[(first + v) / PER_TILE] + (first + v) % PER_TILE * LANES;
      values[v] = keys[v] + TILE * head_dim_ / PER_UNIT;
    }
    clear(sums);
    accumulate<T, LEAN>(sums, scratch_.queries.data(), keys, TILE, head_dim_ / PER_UNIT, values);
    AIOINFER_UNROLL
    for (int q = 0; q < QUERIES; q++)
      AIOINFER_UNROLL
      for (int v = 0; v < COUNT; v++)
        store(&scratch_.scores[q * SPAN + (first + v) * LANES], sums[q][v] * params_.scale);
  }

  // From scores to weights: exponentials relative to the best score so far; a better score shrinks the sums. All
  // maxima are found before any weights, so that consecutive operations do not depend on each other.
  void weigh(int64_t at, int tiles) {
    const int vectors = tiles * PER_TILE;
    for (int q = 0; q < QUERIES; q++) find_best(q, at, vectors);
    for (int q = 0; q < QUERIES; q++) {
      const float* scores = &scratch_.scores[q * SPAN];
      // No position seen so far: every difference must be minus infinity, not NaN.
      const float base = best_[q] == -INFINITY ? 0.0f : best_[q];
      Floats total{};
      for (int v = 0; v < vectors; v++) {
        const Floats weight = exponential(load<Floats>(scores + v * LANES) - base);
        total += weight;
        put_weights(q, v * LANES, weight);
      }
      total_[q] = total_[q] * shrink_[q] + sum(total);
    }
  }

  void find_best(int q, int64_t at, int vectors) {
    float* scores = &scratch_.scores[q * SPAN];
    Floats best = spread(-INFINITY);
    if (at >= from_[q] && at + vectors * LANES <= to_[q] && params_.soft_cap == 0) {
      for (int v = 0; v < vectors; v++) best = larger(best, load<Floats>(scores + v * LANES));
    } else {
      for (int v = 0; v < vectors; v++) {
        const Floats value = visible(q, at + v * LANES, capped(load<Floats>(scores + v * LANES)));
        store(scores + v * LANES, value);
        best = larger(best, value);
      }
    }
    const float now = std::max(best_[q], largest(best));
    shrink_[q] = now == best_[q] ? 1.0f : exponential(spread(best_[q] - now))[0];
    best_[q] = now;
  }

  AIOINFER_INLINE Floats capped(Floats score) const {
    if (params_.soft_cap == 0) return score;
    float values[LANES];
    store(values, score);
    for (float& value : values) value = params_.soft_cap * std::tanh(value / params_.soft_cap);
    return load<Floats>(values);
  }

  // Minus infinity for positions from ``at`` on that a query does not see, whatever their scores.
  AIOINFER_INLINE Floats visible(int q, int64_t at, Floats scores) const {
    if (at >= from_[q] && at + LANES <= to_[q]) return scores;
    Ints lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    const int32_t from = static_cast<int32_t>(std::clamp<int64_t>(from_[q] - at, 0, LANES));
    const int32_t to = static_cast<int32_t>(std::clamp<int64_t>(to_[q] - at, 0, LANES));
    scores = lane < from ? spread(-INFINITY) : scores;
    return lane >= to ? spread(-INFINITY) : scores;
  }

  AIOINFER_INLINE void put_weights(int q, int at, Floats weight) {
    constexpr int COUNT = LANES / PER_UNIT;
    T numbers[LANES];
    Number<T>::store_lanes(numbers, weight);
    uint32_t units[COUNT];
    std::memcpy(units, numbers, sizeof units);
    AIOINFER_UNROLL
    for (int i = 0; i < COUNT; i++) scratch_.weights[(at / PER_UNIT + i) * QUERIES + q] = units[i];
  }

  // sums = sums * shrink + weights * values of ``count`` positions; ``fresh`` sums are 0. Cells behind them may hold
  // any value and are not read.
  void add_values(int count, bool fresh) {
    constexpr int WIDE = context_vectors();
    const int vectors = static_cast<int>(head_dim_ / LANES);
    int v = 0;
    for (; v + WIDE <= vectors; v += WIDE) add_vectors<WIDE>(count, v, fresh);
    for (; v < vectors; v++) add_vectors<1>(count, v, fresh);
  }

  template <int COUNT>
  AIOINFER_INLINE void add_vectors(int count, int first, bool fresh) {
    Floats sums[QUERIES][COUNT];
    clear(sums);
    if (!fresh)
      AIOINFER_UNROLL
      for (int q = 0; q < QUERIES; q++)
        AIOINFER_UNROLL
        for (int v = 0; v < COUNT; v++)
          sums[q][v] = load<Floats>(&scratch_.sums[q * head_dim_ + (first + v) * LANES]) * shrink_[q];
    for (int done = 0; done < count; done += TILE) {
      const uint32_t* values = tile_[done / TILE] + TILE * head_dim_ / PER_UNIT + first * LANES;
      const uint32_t* keys = next_[done / TILE] + first * LANES;
      const uint32_t* weights = &scratch_.weights[done / PER_UNIT * QUERIES];
      const uint32_t *vectors[COUNT], *ahead[COUNT];
      AIOINFER_UNROLL
      for (int v = 0; v < COUNT; v++) vectors[v] = values + v * LANES, ahead[v] = keys + v * LANES;
      const int whole = std::min(TILE, count - done) / PER_UNIT;
      accumulate<T, LEAN>(sums, weights, vectors, head_dim_, whole, ahead);
      if (count - done < TILE && count % PER_UNIT)
        add_last<COUNT>(sums, weights + whole * QUERIES, values + whole * head_dim_);
    }
    AIOINFER_UNROLL
    for (int q = 0; q < QUERIES; q++)
      AIOINFER_UNROLL
      for (int v = 0; v < COUNT; v++) store(&scratch_.sums[q * head_dim_ + (first + v) * LANES], sums[q][v]);
  }

  // A unit of which only the first half exists.
  template <int COUNT>
  AIOINFER_INLINE void add_last(Floats (&sums)[QUERIES][COUNT], const uint32_t* weights, const uint32_t* values) const {
    AIOINFER_UNROLL
    for (int v = 0; v < COUNT; v++) {
      const Ints value = load<Ints>(values + v * LANES) & 0xffff;
      AIOINFER_UNROLL
      for (int q = 0; q < QUERIES; q++)
        sums[q][v] = Number<T>::multiply_add(sums[q][v], Ints{} + static_cast<int32_t>(weights[q]), value);
    }
  }

  template <int COUNT>
  static AIOINFER_INLINE void clear(Floats (&sums)[QUERIES][COUNT]) {
    AIOINFER_UNROLL
    for (int q = 0; q < QUERIES; q++)
      AIOINFER_UNROLL
      for (int v = 0; v < COUNT; v++) sums[q][v] = Floats{};
  }

  // The number of vectors that occupies all units of the processor.
  static constexpr int context_vectors() { return LANES < 16 ? 2 : 2 * panels_at_once(QUERIES); }

  const Context<T>& context_;
  const int64_t head_dim_;
  const AttentionParams& params_;
  AttentionScratch<T>& scratch_;
  const uint32_t *tile_[SPAN / TILE], *next_[SPAN / TILE];
  int64_t from_[QUERIES], to_[QUERIES];
  float best_[QUERIES], total_[QUERIES], shrink_[QUERIES];
};

// One task. sink(token) returns a put(index, LANES results), the index counting through all query heads.
template <class T, class Sink>
void attend_task(const AttentionTask& task, const Rows& rows, const KVPool<T>& kv, const AttentionParams& params,
                 const Projected<T>& projected, int64_t group, AttentionScratch<T>& scratch, Sink& sink) {
  constexpr int PER_UNIT = Number<T>::PER_UNIT;
  const int64_t head_dim = kv.head_dim, begin = rows.starts[task.row], length = rows.lengths[task.row];
  const int64_t start = length - (rows.starts[task.row + 1] - begin);
  const Context<T> context(kv, rows.tables + task.row * rows.width, length, task.head);
  with_height(task.queries, [&](auto height) {
    constexpr int QUERIES = decltype(height)::value;
    int64_t token[QUERIES], head[QUERIES], position[QUERIES];
    for (int q = 0; q < QUERIES; q++) {
      token[q] = begin + (task.first + q) / group;
      head[q] = task.head * group + (task.first + q) % group;
      position[q] = start + token[q] - begin;
      const T* from = projected.queries + token[q] * projected.query_stride + head[q] * head_dim;
      for (int64_t d = 0; d < head_dim; d += PER_UNIT)
        std::memcpy(&scratch.queries[d / PER_UNIT * QUERIES + q], from + d, sizeof(uint32_t));
    }
    Attending<T, QUERIES> attending(context, head_dim, params, position, length, scratch);
    attending.run();
    for (int q = 0; q < QUERIES; q++) {
      auto put = sink(token[q]);
      attending.finish(q, [&](int64_t d, Floats values) { put(head[q] * head_dim + d, values); });
    }
  });
}

// Refuse constants that kernels cannot compute.
inline void check(const AttentionParams& params) {
  require(params.block >= 1 && params.window >= 0, "block or window is not a number of positions");
}

// The inputs of attention that are the same in every layer of a step.
struct AttentionInput {
  int64_t tokens;
  const int64_t* cells;   // [tokens] where each key and value goes
  const int64_t* rotary;  // [tokens] rows of the rotary table, or null for the tokens' own order
  Rows rows;
};

// A layer's attention: keys and values of all tokens are stored, then every query attends. sink(token) returns a
// put(index, LANES results), the index counting through all query heads.
template <class T, class Sink>
void attend(Worker& worker, const std::vector<AttentionTask>& tasks, const AttentionInput& input,
            const Projected<T>& projected, const HeadShape<T>& shape, const Rotary<T>& rotary, const KVPool<T>& kv,
            const AttentionParams& params, AttentionScratch<T>& scratch, Sink&& sink) {
  worker.parallel_in_runs(input.tokens * shape.kv_heads, [&](int64_t i) {
    const int64_t token = i / shape.kv_heads, at = input.rotary == nullptr ? token : input.rotary[token];
    prepare_token(projected, shape, rotary, token, at, i % shape.kv_heads, input.cells[token], kv,
                  scratch.sums.data());
  });
  worker.parallel(static_cast<int64_t>(tasks.size()), [&](int64_t index) {
    attend_task(tasks[index], input.rows, kv, params, projected, shape.group(), scratch, sink);
  });
}

}  // namespace aioinfer
