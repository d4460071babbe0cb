// LatentAttention: the first half of a layer whose heads share one latent of a token; see
// aioinfer.model.mixers.latent_attention.
//
//   hidden ─► queries, latent ─► norms, rotations ─► queries into the latent's space ─► attention ─► values ─► out
//
// Heads are never expanded, whatever the number of tokens: a head's queries are multiplied into the space of the latent,
// whose first elements are the values, and the results out of it. So the bits of a token do not depend on how its prompt
// was cut.
//
// A task is some blocks of queries of a row, of any heads, which go through the latents side by side: these are read
// once. The context is divided into parts of PART positions, counted from the start of the sequence, whose results are
// merged in order. Where there are few tasks, the parts of a row are tasks of their own: the same operations, the same
// bits.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "attention.hpp"
#include "linear.hpp"

namespace aioinfer {

template <class T>
struct LatentAttention {
  int64_t heads;
  int64_t plain, rotated;     // elements of a head's query, and of its key, that are not rotated, and that are
  int64_t rank;               // elements of the latent before the rotated ones
  int64_t value_dim;          // of the results of a head
  const Linear<T>* into;      // hidden to what queries are made of, and to the latent
  const float* query_norm;    // [queries->inner], or null
  const Linear<T>* queries;   // of normed inputs; null: ``into`` makes queries
  const float* latent_norm;   // [rank]
  float eps;
  Rotary<T> rotary;
  const Linear<T>* absorb;    // of each head, ``plain`` to ``rank``: [heads * rank, plain]
  const Linear<T>* expand;    // of each head, ``rank`` to ``value_dim``: [heads * value_dim, rank]
  const Linear<T>* out;
  AttentionParams params;
  int64_t kv;                 // which pool has its latents

  int64_t width() const { return rank + rotated; }
  int64_t query_dim() const { return plain + rotated; }
  // Where the latent begins in the projection of a token.
  int64_t begin() const { return queries == nullptr ? heads * query_dim() : queries->inner; }

  bool same_heads(const LatentAttention& other) const {
    return heads == other.heads && rank == other.rank && rotated == other.rotated;
  }

  // Throws InvalidArguments unless the parts fit each other and a residual of size ``hidden``.
  void check(int64_t hidden) const {
    aioinfer::check(params);
    require(heads > 0 && plain > 0 && rotated > 0 && rank > 0 && value_dim > 0, "sizes of heads are not positive");
    require(plain % SUM_LANES == 0 && rotated % SUM_LANES == 0, "a part of a head is no multiple of a vector");
    // Both kinds of weights have panels that lie within a head then.
    require(rank % QUANTISED_PANEL == 0, "rank is no multiple of a panel");
    require(value_dim % QUANTISED_PANEL == 0, "value_dim is no multiple of a panel");
    require(rotary.size == rotated, "the table of a rotation has another size");
    require(kv >= 0, "the index of a KV pool is negative");
    require((queries == nullptr) == (query_norm == nullptr), "queries without their norm, or a norm alone");
    require_size(*into, begin() + width(), hidden);
    if (queries != nullptr) {
      require(queries->inner % SUM_LANES == 0, "the inner size of queries is no multiple of a vector");
      require_size(*queries, heads * query_dim(), queries->inner);
    }
    require_size(*absorb, heads * rank, plain);
    require_size(*expand, heads * value_dim, rank);
    require_size(*out, hidden, heads * value_dim);
  }
};

// Blocks of queries of a row in some parts of its context. Query i is that of token i / heads, of its head i % heads.
struct LatentTask {
  int64_t row, first;
  int height, blocks;
  int64_t from, to;       // parts
  int64_t slots = -1;     // where the results of parts go; -1: they are merged at once
};

// Memory for steps of layers with the same heads, and their tasks.
template <class T>
class LatentWork {
 public:
  static constexpr int64_t PART = 8 * SPAN;
  static constexpr int BLOCKS = BY_TILES<T> ? 1 : VectorScratch<T>::BLOCKS;

  void reserve(const LatentAttention<T>& self, int64_t tokens) {
    const int64_t rows = self.heads * tokens, padded = self.heads * Blocks::of<T>(tokens).padded();
    if (self.queries != nullptr) {
      narrow_.reserve(*self.queries, tokens);
      grow(queries_, rows * self.query_dim());
    }
    plain_.reserve(*self.absorb, rows, padded, true);
    results_.reserve(*self.expand, rows, padded, true);
    grow(absorbed_, rows * self.width());
  }

  void divide(const Rows& rows, const LatentAttention<T>& self, int workers) {
    constexpr int64_t TASKS = 4, MOST_QUERIES = 256;
    tasks_.clear(), merges_.clear();
    const int height = height_of(self.heads);
    int64_t all = 0, slots = 0;
    for (int64_t row = 0; row < rows.count; row++) all += count(rows, row, self.heads, height * BLOCKS);
    for (int64_t row = 0; row < rows.count; row++) {
      const int64_t queries = (rows.starts[row + 1] - rows.starts[row]) * self.heads;
      const int64_t parts = (rows.lengths[row] + PART - 1) / PART;
      const bool apart = parts > 1 && all < TASKS * workers && queries <= MOST_QUERIES;
      // Later queries see more: the long tasks come first.
      for (int64_t end = (queries + height - 1) / height; end > 0;) {
        const int64_t left = queries - (end - 1) * height, blocks = left < height ? 1 : std::min<int64_t>(BLOCKS, end);
        end -= blocks;
        LatentTask task{row, end * height, static_cast<int>(std::min<int64_t>(left, height)), static_cast<int>(blocks),
                        0, parts};
        for (int64_t part = 0; apart && part < parts; part++) {
          task.from = part, task.to = part + 1, task.slots = slots + part * queries;
          tasks_.push_back(task);
        }
        if (!apart) tasks_.push_back(task);
      }
      if (!apart) continue;
      for (int64_t query = 0; query < queries; query++) merges_.push_back({row, query, queries, slots + query});
      slots += parts * queries;
    }
    grow(slots_, slots * slot(self.rank));
    while (static_cast<int>(scratch_.size()) < workers)
      scratch_.push_back(std::make_unique<Scratch>(self.width(), BLOCKS * MAX_HEIGHT * slot(self.rank)));
  }

  // From the projections [tokens, into->outputs] of all tokens, and the queries that were made of them, to put(token,
  // index, LANES results) of all heads.
  template <class Put>
  void mix(Worker& worker, const LatentAttention<T>& self, T* projected, const AttentionInput& input,
           const KVPool<T>& kv, Put&& put) {
    const int64_t heads = self.heads, tokens = input.tokens;
    const HeadShape<T> shape{1, 1, self.rotated, nullptr, 0.0f};
    worker.parallel_in_runs(tokens * (heads + 1), [&](int64_t i) {
      const int64_t token = i / (heads + 1), head = i % (heads + 1), at = input.positions[token];
      T* own = projected + token * self.into->outputs;
      Scratch& scratch = *scratch_[worker.index()];
      if (head == heads) {
        T* latent = own + self.begin();
        norm_in_place(latent, self.rank, self.latent_norm, self.eps);
        prepare_head(latent + self.rank, shape, nullptr, self.rotary, at, scratch.merged.data());
        kv.write(input.cells[token], 0, latent, latent);
        return;
      }
      T* query = (self.queries == nullptr ? own : &queries_[token * heads * self.query_dim()]) + head * self.query_dim();
      prepare_head(query + self.plain, shape, nullptr, self.rotary, at, scratch.merged.data());
      std::memcpy(absorbed(self, token, head) + self.rank, query + self.plain, sizeof(T) * self.rotated);
      of_head(plain_, *self.absorb, tokens, head).set(token, query);
    });
    by_head(worker, plain_, *self.absorb, heads, tokens, [&](const Place& place, int64_t head, int64_t panel, Floats one,
                                                            Floats other) {
      put_pair(absorbed(self, place.row, head), panel, self.rank, one, other);
    });
    worker.parallel(static_cast<int64_t>(tasks_.size()), [&](int64_t index) {
      attend(tasks_[index], self, input, kv, *scratch_[worker.index()]);
    });
    worker.parallel_in_runs(static_cast<int64_t>(merges_.size()), [&](int64_t index) {
      const Merge& merge = merges_[index];
      const Weighted found = of_slot(slots_.data(), merge.slot, self.rank);
      const int64_t behind = position(input.rows, merge.row, merge.query / heads) + 1;
      Weighted whole = found;
      for (int64_t part = 1; part * PART < behind; part++)
        whole.merge(of_slot(slots_.data(), merge.slot + part * merge.queries, self.rank), self.rank);
      finish(self, input.rows.starts[merge.row] + merge.query / heads, merge.query % heads, tokens, whole);
    });
    by_head(worker, results_, *self.expand, heads, tokens, [&](const Place& place, int64_t head, int64_t panel,
                                                              Floats one, Floats other) {
      const int64_t at = head * self.value_dim + panel * PANEL;
      put(place, at, one), put(place, at + LANES, other);
    });
  }

  // Where queries are made from their normed inputs.
  InputBuffer<T>& narrow() { return narrow_; }
  T* queries() { return queries_.data(); }

 private:
  static constexpr int MAX_HEIGHT = BY_TILES<T> ? TiledScratch<bfloat16>::MOST : MAX_ROWS;

  struct Scratch {
    Scratch(int64_t width, int64_t size) : attention(width), merged(size) {}
    AttentionScratch<T> attention;
    Buffer<float> merged;  // slots of a task's queries
  };

  // The parts of a query whose results are to be merged: every ``queries``-th slot from ``slot`` on.
  struct Merge {
    int64_t row, query, queries, slot;
  };

  // Rows of a block: all heads of a token in as many blocks of the same height as there must be.
  static int height_of(int64_t heads) {
    if (BY_TILES<T>) return MAX_HEIGHT;
    for (int height = MAX_ROWS; height > MAX_ROWS / 2; height--)
      if (heads % height == 0) return height;
    return MAX_ROWS;
  }

  static int64_t count(const Rows& rows, int64_t row, int64_t heads, int64_t queries) {
    return ((rows.starts[row + 1] - rows.starts[row]) * heads + queries - 1) / queries;
  }

  // Floats of a slot: sums, best and total.
  static int64_t slot(int64_t rank) { return rank + SUM_LANES; }

  // The sums of a slot, whose scores are copied.
  static Weighted of_slot(float* slots, int64_t index, int64_t rank) {
    float* sums = slots + index * slot(rank);
    return {sums[rank], sums[rank + 1], sums};
  }

  static int64_t position(const Rows& rows, int64_t row, int64_t token) {
    return rows.lengths[row] - (rows.starts[row + 1] - rows.starts[row]) + token;
  }

  T* absorbed(const LatentAttention<T>& self, int64_t token, int64_t head) {
    return &absorbed_[(token * self.heads + head) * self.width()];
  }

  static Inputs<T> of_head(InputBuffer<T>& buffer, const Linear<T>& layer, int64_t tokens, int64_t head) {
    return buffer.inputs(layer, tokens, head * tokens, head * Blocks::of<T>(tokens).padded());
  }

  // Each head's rows times its own panels of a layer. store(place, head, panel of the head, first vector, second).
  template <class Store>
  static void by_head(Worker& worker, InputBuffer<T>& buffer, const Linear<T>& layer, int64_t heads, int64_t tokens,
                      Store&& store) {
    // Without rows there is no task.
    if (tokens == 0) return worker.parallel(0, [](int64_t) {});
    constexpr int64_t TASKS = 4;
    const int64_t own = layer.panels() / heads, panels = layer.outputs / heads / PANEL;
    const int64_t pieces = std::clamp<int64_t>(TASKS * worker.workers() / heads, 1, own);
    const int64_t run = (own + pieces - 1) / pieces;
    worker.parallel_in_shares(heads * pieces, [&](int64_t task) {
      const int64_t head = task / pieces, first = head * own, from = first + task % pieces * run;
      const int64_t to = std::min(first + own, from + run);
      if (from >= to) return;
      multiply_panels(of_head(buffer, layer, tokens, head), layer, from, to,
                      [&](const Place& place, int64_t panel, Floats one, Floats other) {
                        store(place, head, panel - head * panels, one, other);
                      });
    });
  }

  // The results of a query in the latent's space.
  void finish(const LatentAttention<T>& self, int64_t token, int64_t head, int64_t tokens, const Weighted& whole) {
    const Inputs<T> inputs = of_head(results_, *self.expand, tokens, head);
    const auto row = inputs.row(token);
    const float share = 1.0f / whole.total;
    for (int64_t d = 0; d < self.rank; d += LANES) inputs.put(row, d, load<Floats>(whole.sums + d) * share + 0.0f);
    inputs.finish(token);
  }

  void attend(const LatentTask& task, const LatentAttention<T>& self, const AttentionInput& input, const KVPool<T>& kv,
              Scratch& scratch) {
    const Rows& rows = input.rows;
    const int64_t begin = rows.starts[task.row], heads = self.heads, rank = self.rank;
    const Context<T> context(kv, rows.tables + task.row * rows.width, rows.lengths[task.row], 0);
    const int64_t last = task.first + task.blocks * task.height - 1;
    const int64_t parts = position(rows, task.row, last / heads) / PART + 1;
    float* slots = task.slots < 0 ? scratch.merged.data() : &slots_[(task.slots + task.first) * slot(rank)];
    const auto start = [&](auto& attending, int64_t block, int64_t part) {
      for (int q = 0; q < task.height; q++) {
        const int64_t query = task.first + block * task.height + q, at = query / heads;
        const int64_t own = position(rows, task.row, at);
        attending.begin(q, absorbed(self, begin + at, query % heads), query % heads, own, own + 1);
        attending.clip(q, part * PART, (part + 1) * PART);
      }
    };
    const auto keep = [&](const auto& attending, int64_t block, int64_t part) {
      for (int q = 0; q < task.height; q++) {
        const int64_t index = block * task.height + q;
        if (position(rows, task.row, (task.first + index) / heads) < part * PART) continue;
        Weighted found = attending.weighted(q);
        float* to = slots + index * slot(rank);
        if (part == task.from) {
          std::copy_n(found.sums, rank, to);
        } else {
          Weighted whole = of_slot(slots, index, rank);
          whole.merge(found, rank);
          found = whole;
        }
        to[rank] = found.best, to[rank + 1] = found.total;
      }
    };
    for (int64_t part = task.from; part < std::min(task.to, parts); part++)
      go_through(task, context, self, scratch.attention, part, start, keep);
    if (task.slots >= 0) return;
    for (int64_t index = 0; index < task.blocks * task.height; index++) {
      const int64_t query = task.first + index;
      finish(self, begin + query / heads, query % heads, input.tokens, of_slot(slots, index, rank));
    }
  }

  template <class Start, class Keep>
  static void go_through(const LatentTask& task, const Context<T>& context, const LatentAttention<T>& self,
                         AttentionScratch<T>& scratch, int64_t part, Start&& start, Keep&& keep) {
    if constexpr (BY_TILES<T>) {
      TiledAttending<T> attending(context, self.width(), self.params, task.height, scratch);
      start(attending, 0, part);
      attending.run();
      keep(attending, 0, part);
    } else {
      scratch.made_from = -1;
      with_height(task.height, [&](auto height) {
        using Block = Attending<T, decltype(height)::value>;
        std::optional<Block> blocks[BLOCKS];
        int64_t to = 0;
        for (int b = 0; b < task.blocks; b++) {
          start(blocks[b].emplace(context, self.width(), self.params, scratch, b), b, part);
          to = std::max(to, blocks[b]->behind());
        }
        for (int64_t at = part * PART; at < to; at += SPAN)
          for (int b = 0; b < task.blocks; b++)
            if (at < blocks[b]->behind()) blocks[b]->go_through(at);
        for (int b = 0; b < task.blocks; b++) keep(*blocks[b], b, part);
      });
    }
  }

  InputBuffer<T> narrow_, plain_, results_;  // of queries, of their parts that are not rotated, and of values; by head
  std::vector<T> queries_, absorbed_;        // [tokens, heads, query_dim] and [tokens, heads, width]
  std::vector<LatentTask> tasks_;
  std::vector<Merge> merges_;
  Buffer<float> slots_;
  std::vector<std::unique_ptr<Scratch>> scratch_;
};

}  // namespace aioinfer
