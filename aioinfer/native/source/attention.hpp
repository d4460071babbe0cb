// Attention over paged keys and values.
//
// A task is some queries of one row that share a KV head. It processes the context in stretches of SPAN
// positions counted from the start of the sequence: scores, their exponentials, weighted values. The blocks of
// queries of a task go through a stretch one after the other, so that a long context is read from memory once for all
// of them. The result of a query is a function of the positions that it sees, to the bit: it depends neither on other
// queries, nor on how the prompt was cut into chunks, nor on the pages of the context.
#pragma once

#include <optional>
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

// Some queries of a row that share a KV head: ``blocks`` blocks of ``queries`` each. Query i is that of token i / group,
// of its head i % group.
struct AttentionTask {
  int64_t row, head, first;
  int queries, blocks;
};

// The blocks of a task in a row whose sequence has so many positions, of ``all`` blocks in the step: as many as leave
// every worker enough tasks, if keys and values of a head do not stay in a core's cache anyway.
template <class T>
int64_t blocks_of_task(int64_t length, int64_t head_dim, int64_t all, int workers) {
  constexpr int64_t TASKS = 8;
  if (BY_TILES<T> || 2 * length * head_dim * static_cast<int64_t>(sizeof(T)) <= CACHE) return 1;
  return std::clamp<int64_t>(all / (TASKS * workers), 1, VectorScratch<T>::BLOCKS);
}

template <class T>
std::vector<AttentionTask> divide(const Rows& rows, const HeadShape<T>& shape, int workers) {
  const auto blocks_of = [&](int64_t row) {
    const int64_t queries = (rows.starts[row + 1] - rows.starts[row]) * shape.group();
    return BY_TILES<T> ? Blocks::of_height(queries, TiledAttending<T>::MOST) : Blocks::equal(queries);
  };
  int64_t all = 0;
  for (int64_t row = 0; row < rows.count; row++) all += blocks_of(row).count * shape.kv_heads;
  std::vector<AttentionTask> tasks;
  for (int64_t row = 0; row < rows.count; row++) {
    const Blocks blocks = blocks_of(row);
    const int64_t most = blocks_of_task<T>(rows.lengths[row], shape.head_dim, all, workers);
    for (int64_t head = 0; head < shape.kv_heads; head++)
      // Later queries see more: the long tasks come first.
      for (int64_t end = blocks.count, count; end > 0; end -= count) {
        const int64_t left = blocks.rows - (end - 1) * blocks.height;
        // The last block may have fewer queries; the blocks of a task have the same number.
        const bool whole = left >= blocks.height;
        count = whole ? std::min(most, end) : 1;
        const int64_t height = whole ? blocks.height : left;
        tasks.push_back({row, head, (end - count) * blocks.height, static_cast<int>(height), static_cast<int>(count)});
      }
  }
  return tasks;
}

// The inputs of attention that are the same in every layer of a step.
struct AttentionInput {
  int64_t tokens;
  const int64_t* cells;      // [tokens] where each key and value goes
  const int64_t* positions;  // [tokens] rows of the rotary table, or null for the tokens' own order
  Rows rows;
  // [tokens] the end of the span that a token is in, of another one its position + 1; or null: there are none
  const int64_t* ends = nullptr;
};

// Scratch memory of one worker.
template <class T>
using AttentionScratch = std::conditional_t<BY_TILES<T>, TiledScratch<T>, VectorScratch<T>>;

// Where results go: one call for each query, so that tasks are compiled once, whatever becomes of their results.
class HeadSink {
 public:
  // start(token) returns a put(index, LANES results), the index counting through all query heads.
  template <class Start>
  explicit HeadSink(Start& start) : start_(const_cast<void*>(static_cast<const void*>(&start))) {
    call_ = [](void* start, int64_t token, int64_t at, int64_t size, const float* results) {
      auto put = (*static_cast<Start*>(start))(token);
      for (int64_t d = 0; d < size; d += LANES) put(at + d, load<Floats>(results + d));
    };
  }

  // ``size`` results of a token from index ``at`` on.
  void operator()(int64_t token, int64_t at, int64_t size, const float* results) const {
    call_(start_, token, at, size, results);
  }

 private:
  void* start_;
  void (*call_)(void* start, int64_t token, int64_t at, int64_t size, const float* results);
};

template <class T>
void attend_task(const AttentionTask& task, const AttentionInput& input, const KVPool<T>& kv,
                 const AttentionParams& params, const Projected<T>& projected, int64_t group,
                 AttentionScratch<T>& scratch, const HeadSink& sink) {
  const Rows& rows = input.rows;
  const int64_t* ends = params.spans ? input.ends : nullptr;
  const int64_t head_dim = kv.head_dim, begin = rows.starts[task.row], length = rows.lengths[task.row];
  const int64_t start = length - (rows.starts[task.row + 1] - begin);
  const Context<T> context(kv, rows.tables + task.row * rows.width, length, task.head);
  const auto token = [&](int q) { return begin + (task.first + q) / group; };
  const auto head = [&](int q) { return task.head * group + (task.first + q) % group; };
  // ``first``: of the block's queries in the task.
  const auto start_block = [&](auto& attending, int first) {
    for (int q = 0; q < task.queries; q++) {
      const int64_t at = token(first + q), position = start + at - begin;
      const T* query = projected.queries + at * projected.query_stride + head(first + q) * head_dim;
      const int64_t behind = params.behind_visible(position, ends == nullptr ? 0 : ends[at], length);
      attending.begin(q, query, head(first + q), position, behind);
    }
  };
  const auto finish_block = [&](auto& attending, int first) {
    for (int q = 0; q < task.queries; q++)
      sink(token(first + q), head(first + q) * head_dim, head_dim, attending.finish(q));
  };
  if constexpr (BY_TILES<T>) {
    TiledAttending<T> attending(context, head_dim, params, task.queries, scratch);
    start_block(attending, 0);
    attending.run();
    finish_block(attending, 0);
  } else {
    with_height(task.queries, [&](auto height) {
      using Block = Attending<T, decltype(height)::value>;
      std::optional<Block> blocks[VectorScratch<T>::BLOCKS];
      int64_t from = INT64_MAX, to = 0;
      for (int b = 0; b < task.blocks; b++) {
        start_block(blocks[b].emplace(context, head_dim, params, scratch, b), b * height);
        from = std::min(from, blocks[b]->first()), to = std::max(to, blocks[b]->behind());
      }
      for (int64_t at = from; at < to; at += SPAN)
        for (int b = 0; b < task.blocks; b++)
          if (at >= blocks[b]->first() && at < blocks[b]->behind()) blocks[b]->go_through(at);
      for (int b = 0; b < task.blocks; b++) finish_block(*blocks[b], b * height);
    });
  }
}

// Refuse constants that kernels cannot compute.
inline void check(const AttentionParams& params) {
  require(params.block >= 1 && params.window >= 0, "block or window is not a number of positions");
}

// A layer's attention: keys and values of all tokens are stored, then every query attends.
template <class T>
void attend(Worker& worker, const std::vector<AttentionTask>& tasks, const AttentionInput& input,
            const Projected<T>& projected, const HeadShape<T>& shape, const Rotary<T>& rotary, const KVPool<T>& kv,
            const AttentionParams& params, AttentionScratch<T>& scratch, const HeadSink& sink) {
  worker.parallel_in_runs(input.tokens * shape.kv_heads, [&](int64_t i) {
    const int64_t token = i / shape.kv_heads, at = input.positions == nullptr ? token : input.positions[token];
    prepare_token(projected, shape, rotary, token, at, i % shape.kv_heads, input.cells[token], kv,
                  scratch.sums.data());
  });
  worker.parallel(static_cast<int64_t>(tasks.size()), [&](int64_t index) {
    attend_task(tasks[index], input, kv, params, projected, shape.group(), scratch, sink);
  });
}

}  // namespace aioinfer
