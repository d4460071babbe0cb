// Attention over paged keys and values.
//
// A task is some queries of one row that share a KV head. It processes the context in stretches of SPAN
// positions counted from the start of the sequence: scores, their exponentials, weighted values. The result of a
// query is a function of the positions that it sees, to the bit: it depends neither on other queries, nor on how
// the prompt was cut into chunks, nor on the pages of the context.
#pragma once

#include <type_traits>
#include <vector>

#include "attending.hpp"
#include "checks.hpp"
#include "heads.hpp"
#include "kv_pool.hpp"
#include "weights.hpp"
#include "tiled_attending.hpp"

namespace aioinfer {

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

template <class T>
std::vector<AttentionTask> divide(const Rows& rows, int64_t kv_heads, int64_t group) {
  std::vector<AttentionTask> tasks;
  for (int64_t row = 0; row < rows.count; row++) {
    const int64_t queries = (rows.starts[row + 1] - rows.starts[row]) * group;
    const Blocks blocks = BY_TILES<T> ? Blocks::of_height(queries, TiledAttending<T>::MOST) : Blocks::equal(queries);
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
using AttentionScratch = std::conditional_t<BY_TILES<T>, TiledScratch<T>, VectorScratch<T>>;

// One task. sink(token) returns a put(index, LANES results), the index counting through all query heads.
template <class T, class Sink>
void attend_task(const AttentionTask& task, const Rows& rows, const KVPool<T>& kv, const AttentionParams& params,
                 const Projected<T>& projected, int64_t group, AttentionScratch<T>& scratch, Sink& sink) {
  const int64_t head_dim = kv.head_dim, begin = rows.starts[task.row], length = rows.lengths[task.row];
  const int64_t start = length - (rows.starts[task.row + 1] - begin);
  const Context<T> context(kv, rows.tables + task.row * rows.width, length, task.head);
  const auto token = [&](int q) { return begin + (task.first + q) / group; };
  const auto head = [&](int q) { return task.head * group + (task.first + q) % group; };
  const auto compute = [&](auto&& attending, int queries) {
    for (int q = 0; q < queries; q++) {
      const T* query = projected.queries + token(q) * projected.query_stride + head(q) * head_dim;
      attending.begin(q, query, start + token(q) - begin, length);
    }
    attending.run();
    for (int q = 0; q < queries; q++) {
      auto put = sink(token(q));
      attending.finish(q, [&](int64_t d, Floats values) { put(head(q) * head_dim + d, values); });
    }
  };
  if constexpr (BY_TILES<T>)
    compute(TiledAttending<T>(context, head_dim, params, task.queries, scratch), task.queries);
  else
    with_height(task.queries, [&](auto height) {
      compute(Attending<T, decltype(height)::value>(context, head_dim, params, scratch), height);
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
