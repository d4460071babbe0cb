// Attending: a task of attention by products of vectors. The most queries are MAX_ROWS.
#pragma once

#include <cstring>
#include <vector>

#include "kv_pool.hpp"
#include "weights.hpp"
#include "softmax.hpp"

namespace aioinfer {

// Scratch memory of one worker.
template <class T>
struct VectorScratch {
  // The most blocks of queries that go through a context side by side.
  static constexpr int BLOCKS = 8;

  explicit VectorScratch(int64_t head_dim)
      : queries(BLOCKS * MAX_ROWS * head_dim), scores(MAX_ROWS * SPAN), sums(BLOCKS * MAX_ROWS * head_dim),
        weights(MAX_ROWS * SPAN), tiles(2 * SPAN * head_dim) {}

  std::vector<uint32_t> queries;  // of each block
  std::vector<float> scores, sums;  // of a block in a stretch; of each block
  std::vector<T> weights, tiles;    // of a block in a stretch
  int64_t made_from = 0, made_to = 0;  // tiles whose values are there, made of latents; of one task
};

// The computation of one task with QUERIES queries.
template <class T, int QUERIES>
class Attending {
 public:
  static constexpr int PER_UNIT = Number<T>::PER_UNIT;
  static constexpr int PER_TILE = TILE / LANES;

  // ``block``: which one of the scratch memory's it is.
  Attending(const Context<T>& context, int64_t head_dim, const AttentionParams& params, VectorScratch<T>& scratch,
            int block = 0)
      : context_(context), head_dim_(head_dim), value_dim_(context.value_dim()), scale_(params.scale), scratch_(scratch),
        queries_(&scratch.queries[block * MAX_ROWS * head_dim]), sums_(&scratch.sums[block * MAX_ROWS * head_dim]),
        softmax_(params) {}

  // Query ``q`` [head_dim] of a head, which is at ``position`` of a sequence and sees it up to ``behind``. A function of
  // its own: inlined, it costs the loop over stretches 5 % (GCC 12, Zen 5).
  __attribute__((noinline)) void begin(int q, const T* query, int64_t head, int64_t position, int64_t behind) {
    softmax_.begin(q, head, position, behind);
    for (int64_t d = 0; d < head_dim_; d += PER_UNIT)
      std::memcpy(&queries_[d / PER_UNIT * QUERIES + q], query + d, sizeof(uint32_t));
  }

  // The first stretch, and the end of the last one, after all queries have begun.
  int64_t first() const { return softmax_.first(QUERIES) / SPAN * SPAN; }
  int64_t behind() const { return softmax_.behind(QUERIES); }

  // Have query ``q`` see no others than positions [from, to).
  void clip(int q, int64_t from, int64_t to) { softmax_.clip(q, from, to); }

  // Go through the stretch at ``at``; every one from first() to behind(), in order. Not inlined: it is compiled once.
  __attribute__((noinline)) void go_through(int64_t at) {
    const int64_t end = behind();
    const int count = static_cast<int>(std::min<int64_t>(SPAN, end - at)), tiles = (count + TILE - 1) / TILE;
    locate(at / TILE, tiles, (end + TILE - 1) / TILE);
    score(tiles);
    weigh(at, tiles);
    add_values(count, at == first());
  }

  // The results [head_dim] of one query.
  const float* finish(int q) {
    const float share = softmax_.share(q);
    float* results = &sums_[q * value_dim_];
    for (int64_t d = 0; d < value_dim_; d += LANES) store(results + d, load<Floats>(results + d) * share);
    return results;
  }

  // What results are made of, instead: see softmax.hpp.
  Weighted weighted(int q) const { return {softmax_.best(q), softmax_.total(q), &sums_[q * value_dim_]}; }

 private:
  // Units from the weights of one query to those of the next.
  static constexpr int WEIGHTS_APART = SPAN / PER_UNIT;
  // With so few queries the time goes to memory, not to arithmetic.
  static constexpr bool LEAN = QUERIES <= MAX_ROWS / 2;

  // Find the tiles of the stretch from tile ``first`` on, and of the next stretch, out of ``all`` tiles.
  void locate(int64_t first, int tiles, int64_t all) {
    const int64_t half = TILE * head_dim_;
    for (int i = 0; i < tiles; i++) {
      T* scratch = &scratch_.tiles[2 * half * i];
      tile_[i] = context_.tile(first + i, scratch);
      const int64_t later = first + i + SPAN / TILE;
      const bool ahead = (LEAN || context_.latent()) && later < all && context_.lies();
      next_[i] = ahead ? context_.tile(later, nullptr) : tile_[i];
      values_[i] = context_.latent() ? reinterpret_cast<const uint32_t*>(scratch + half)
                                     : context_.values(tile_[i], nullptr, nullptr);
    }
    if (context_.latent()) make_values(first, first + tiles);
  }

  // Of latents, by the first of the blocks that go through a stretch.
  void make_values(int64_t from, int64_t to) {
    if (scratch_.made_from != from) scratch_.made_from = scratch_.made_to = from;
    for (int64_t at = scratch_.made_to; at < to; at++)
      context_.values(tile_[at - from], next_[at - from], const_cast<uint32_t*>(values_[at - from]));
    scratch_.made_to = std::max(scratch_.made_to, to);
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
      values[v] = values_[(first + v) / PER_TILE] + (first + v) % PER_TILE * LANES;
    }
    clear(sums);
    accumulate<Number<T>, LEAN>(sums, queries_, keys, TILE, head_dim_ / PER_UNIT, values);
    AIOINFER_UNROLL
    for (int q = 0; q < QUERIES; q++)
      AIOINFER_UNROLL
      for (int v = 0; v < COUNT; v++)
        store(&scratch_.scores[q * SPAN + (first + v) * LANES], sums[q][v] * scale_);
  }

  // From scores to weights. All maxima are found before any weights, so that consecutive operations do not depend on
  // each other.
  void weigh(int64_t at, int tiles) {
    const int vectors = tiles * PER_TILE;
    for (int q = 0; q < QUERIES; q++) softmax_.find_best(q, &scratch_.scores[q * SPAN], at, vectors);
    for (int q = 0; q < QUERIES; q++)
      softmax_.weigh(q, &scratch_.scores[q * SPAN], vectors,
                     [&](int i, Floats weight) { Number<T>::store_lanes(&scratch_.weights[q * SPAN + i], weight); });
  }

  // sums = sums * shrink + weights * values of ``count`` positions; ``fresh`` sums are 0. Cells behind them may hold
  // any value and are not read.
  void add_values(int count, bool fresh) {
    constexpr int WIDE = context_vectors();
    const int vectors = static_cast<int>(value_dim_ / LANES);
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
          sums[q][v] = load<Floats>(&sums_[q * value_dim_ + (first + v) * LANES]) * softmax_.shrink(q);
    for (int done = 0; done < count; done += TILE) {
      const uint32_t* values = values_[done / TILE] + first * LANES;
      const uint32_t* keys = next_[done / TILE] + first * LANES;
      const uint32_t* weights = reinterpret_cast<const uint32_t*>(&scratch_.weights[done]);
      const uint32_t *vectors[COUNT], *ahead[COUNT];
      AIOINFER_UNROLL
      for (int v = 0; v < COUNT; v++) vectors[v] = values + v * LANES, ahead[v] = keys + v * LANES;
      const int whole = std::min(TILE, count - done) / PER_UNIT;
      accumulate<Number<T>, LEAN, WEIGHTS_APART>(sums, weights, vectors, value_dim_, whole, ahead);
      if (count - done < TILE && count % PER_UNIT)
        add_last<COUNT>(sums, weights + whole, values + whole * value_dim_);
    }
    AIOINFER_UNROLL
    for (int q = 0; q < QUERIES; q++)
      AIOINFER_UNROLL
      for (int v = 0; v < COUNT; v++) store(&sums_[q * value_dim_ + (first + v) * LANES], sums[q][v]);
  }

  // A unit of which only the first half exists.
  template <int COUNT>
  AIOINFER_INLINE void add_last(Floats (&sums)[QUERIES][COUNT], const uint32_t* weights, const uint32_t* values) const {
    AIOINFER_UNROLL
    for (int v = 0; v < COUNT; v++) {
      const Ints value = load<Ints>(values + v * LANES) & 0xffff;
      AIOINFER_UNROLL
      for (int q = 0; q < QUERIES; q++)
        sums[q][v] = Number<T>::multiply_add(sums[q][v], Ints{} + static_cast<int32_t>(weights[q * WEIGHTS_APART]), value);
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
  static constexpr int context_vectors() { return MANY_REGISTERS ? 2 * panels_at_once(QUERIES) : 2; }

  const Context<T>& context_;
  const int64_t head_dim_, value_dim_;
  const float scale_;
  VectorScratch<T>& scratch_;
  uint32_t* queries_;
  float* sums_;
  const uint32_t *tile_[SPAN / TILE], *next_[SPAN / TILE], *values_[SPAN / TILE];
  Softmax<QUERIES> softmax_;
};

}  // namespace aioinfer
