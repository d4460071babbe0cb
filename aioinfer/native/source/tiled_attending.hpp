// TiledAttending: a task of attention by tiles, or by vectors that sum up in the order of tiles.
//
// Scores are products of queries with keys: a tile of the pool is [unit of dimensions][16 positions], which is what a
// product reads. Weighted values are products of weights with [unit of positions][dimensions] of 32 positions, two
// tiles of the pool, whose values are copied side by side; what is copied behind the last position is 0, since a
// product reads it. A few queries, as those of a decode, would leave most of each tile empty. They are multiplied by
// vectors, which compute the same sums as tiles do, step by step of 32 dimensions or positions: the bits of a query do
// not depend on how many others there are. Only the sign of a sum that is 0 could, so that finish() has no -0.
#pragma once

#include <algorithm>
#include <cstring>

#include "kv_pool.hpp"
#include "softmax.hpp"
#include "tile_product.hpp"

namespace aioinfer {

// Scratch memory of one worker.
template <class T>
struct TiledScratch {
  // The most queries of a task, and of one that is computed by vectors.
  static constexpr int MOST = 2 * tiles::SIDE, FEW = 8;

  explicit TiledScratch(int64_t head_dim)
      : padded(units_of<T>(head_dim) * Number<T>::PER_UNIT), queries(MOST * padded), weights(MOST * SPAN),
        keys(padded == head_dim ? 0 : SPAN * padded), values(SPAN * head_dim), tiles(2 * SPAN * head_dim),
        scores(MOST * SPAN), sums(MOST * head_dim), factors(FEW * SPAN),
        wide_queries(FEW * head_dim) {}

  int64_t padded;                       // numbers of a head and zeros up to the end of a tile
  Buffer<T> queries, weights;           // [MOST, padded] and [MOST, SPAN]
  Buffer<T> keys, values;               // of a stretch: tiles [padded / 2, 16, 2] or nothing, [SPAN / 2, head_dim, 2]
  Buffer<T> tiles;                      // of a stretch, where the pool has none
  Buffer<float> scores, sums;           // [MOST, SPAN] and [MOST, head_dim]
  Buffer<float> factors, wide_queries;  // the weights and queries of a few, [FEW, SPAN] and [FEW, head_dim]
};

template <class T>
class TiledAttending {
 public:
  static constexpr int MOST = TiledScratch<T>::MOST;

  TiledAttending(const Context<T>& context, int64_t head_dim, const AttentionParams& params, int queries,
                 TiledScratch<T>& scratch)
      : context_(context), head_dim_(head_dim), value_dim_(context.value_dim()), scale_(params.scale), queries_(queries), scratch_(scratch),
        softmax_(params) {}

  // Query ``q`` [head_dim] of a head, which is at ``position`` of a sequence and sees it up to ``behind``.
  void begin(int q, const T* query, int64_t head, int64_t position, int64_t behind) {
    softmax_.begin(q, head, position, behind);
    if (queries_ <= FEW)
      for (int64_t d = 0; d < head_dim_; d += LANES)
        store(&scratch_.wide_queries[q * head_dim_ + d], Number<T>::load_lanes(query + d));
    else
      std::memcpy(&scratch_.queries[q * scratch_.padded], query, sizeof(T) * head_dim_);
  }

  // Have query ``q`` see no others than positions [from, to).
  void clip(int q, int64_t from, int64_t to) { softmax_.clip(q, from, to); }

  __attribute__((noinline)) void run() {
    const int64_t first = softmax_.first(queries_) / SPAN * SPAN, behind = softmax_.behind(queries_);
    std::fill_n(scratch_.sums.data(), queries_ * value_dim_, 0.0f);
    for (int64_t at = first; at < behind; at += SPAN) {
      count_ = static_cast<int>(std::min<int64_t>(SPAN, behind - at));
      tiles_ = (count_ + TILE - 1) / TILE;
      steps_ = (count_ + STEP - 1) / STEP;
      locate(at / TILE, (behind + TILE - 1) / TILE);
      if (queries_ <= FEW)
        with_height<FEW>(queries_, [&](auto queries) { by_vectors<decltype(queries)::value>(at); });
      else if (queries_ <= tiles::SIDE)
        by_tiles<1>(at);
      else
        by_tiles<2>(at);
    }
  }

  // The results [head_dim] of one query.
  const float* finish(int q) {
    const float share = softmax_.share(q);
    float* results = &scratch_.sums[q * value_dim_];
    for (int64_t d = 0; d < value_dim_; d += LANES) store(results + d, load<Floats>(results + d) * share + 0.0f);
    return results;
  }

  // What results are made of, instead: see softmax.hpp.
  Weighted weighted(int q) const { return {softmax_.best(q), softmax_.total(q), &scratch_.sums[q * value_dim_]}; }

 private:
  // The numbers of a step.
  static constexpr int FEW = TiledScratch<T>::FEW, STEP = 2 * tiles::SIDE;
  static_assert(TILE == tiles::SIDE && SPAN % STEP == 0);

  // Find the tiles of the stretch from tile ``first`` on, and of the next stretch, out of ``all`` tiles.
  void locate(int64_t first, int64_t all) {
    for (int i = 0; i < tiles_; i++) {
      tile_[i] = context_.tile(first + i, &scratch_.tiles[2 * TILE * head_dim_ * i]);
      const int64_t later = first + i + SPAN / TILE;
      next_[i] = later < all && context_.lies() ? context_.tile(later, nullptr) : tile_[i];
      values_[i] = context_.values(tile_[i], next_[i], &scratch_.values[TILE * value_dim_ * i]);
    }
  }

  const uint32_t* values(int tile) const { return values_[tile]; }

  // put(query, offset, LANES weights). All maxima are found before any weights, so that consecutive operations do not
  // depend on each other. Positions up to the end of a step have weights, too: behind the last one these are 0.
  template <class Put>
  AIOINFER_INLINE void weigh(int64_t at, Put&& put) {
    const int vectors = steps_ * STEP / LANES;
    for (int q = 0; q < queries_; q++) softmax_.find_best(q, &scratch_.scores[q * SPAN], at, vectors);
    for (int q = 0; q < queries_; q++) {
      softmax_.weigh(q, &scratch_.scores[q * SPAN], vectors, [&](int i, Floats weight) { put(q, i, weight); });
      if (softmax_.shrink(q) != 1.0f) shrink(q);
    }
  }

  void shrink(int q) {
    float* sums = &scratch_.sums[q * value_dim_];
    for (int64_t d = 0; d < value_dim_; d += LANES) store(sums + d, load<Floats>(sums + d) * softmax_.shrink(q));
  }

  // -- by tiles: ROWS blocks of 16 queries -----------------------------------------------------------------------

  template <int ROWS>
  void by_tiles(int64_t at) {
    score_by_tiles<ROWS>();
    weigh(at, [&](int q, int i, Floats weight) { Number<T>::store_lanes(&scratch_.weights[q * SPAN + i], weight); });
    copy_values();
    const TileRows weights{scratch_.weights.data(), tiles::SIDE * SPAN * sizeof(T), tiles::ROW, SPAN * sizeof(T)};
    int64_t d = 0;
    for (; d + 2 * tiles::SIDE <= value_dim_; d += 2 * tiles::SIDE) add_by_tiles<ROWS, 2>(weights, d);
    if (d < value_dim_) add_by_tiles<ROWS, 1>(weights, d);
  }

  template <int ROWS>
  void score_by_tiles() {
    const int64_t row = scratch_.padded * sizeof(T);
    const TileRows queries{scratch_.queries.data(), tiles::SIDE * row, tiles::ROW, row};
    int i = 0;
    for (; i + 2 <= tiles_; i += 2) score_columns<ROWS, 2>(queries, i);
    if (i < tiles_) score_columns<ROWS, 1>(queries, i);
    for (int q = 0; q < queries_; q++)
      for (int v = 0; v < tiles_; v++) {
        float* scores = &scratch_.scores[q * SPAN + v * LANES];
        store(scores, load<Floats>(scores) * scale_);
      }
  }

  template <int ROWS, int COLUMNS>
  void score_columns(const TileRows& queries, int tile) {
    TileColumns<COLUMNS> keys{{}, tiles::BYTES, tiles::ROW};
    for (int i = 0; i < COLUMNS; i++) keys.first[i] = padded_keys(tile + i);
    TileSums<ROWS, COLUMNS>::clear();
    TileSums<ROWS, COLUMNS>::add(queries, keys, scratch_.padded / STEP);
    TileSums<ROWS, COLUMNS>::store(&scratch_.scores[tile * TILE], SPAN);
  }

  // The keys of a tile of the pool; copied where they end within a tile of a product, which reads zeros behind them.
  const void* padded_keys(int tile) {
    if (scratch_.padded == head_dim_) return tile_[tile];
    return std::memcpy(&scratch_.keys[tile * TILE * scratch_.padded], tile_[tile], sizeof(T) * TILE * head_dim_);
  }

  void copy_values() {
    uint32_t* to = reinterpret_cast<uint32_t*>(scratch_.values.data());
    const int64_t units = TILE / 2 * value_dim_;
    // Those of latents are there.
    for (int i = 0; i < tiles_ && !context_.latent(); i++) std::memcpy(to + i * units, values(i), sizeof(uint32_t) * units);
    if (count_ % 2)
      for (int64_t d = 0; d < value_dim_; d++) to[count_ / 2 * value_dim_ + d] &= 0xffff;
    const int begin = (count_ + 1) / 2, end = steps_ * tiles::SIDE;
    std::fill_n(to + begin * value_dim_, (end - begin) * value_dim_, 0u);
  }

  template <int ROWS, int COLUMNS>
  void add_by_tiles(const TileRows& weights, int64_t d) {
    const int64_t row = value_dim_ * sizeof(uint32_t);
    TileColumns<COLUMNS> values{{}, tiles::SIDE * row, row};
    for (int i = 0; i < COLUMNS; i++) values.first[i] = &scratch_.values[2 * (d + i * tiles::SIDE)];
    TileSums<ROWS, COLUMNS>::load(&scratch_.sums[d], value_dim_);
    TileSums<ROWS, COLUMNS>::add(weights, values, steps_);
    TileSums<ROWS, COLUMNS>::store(&scratch_.sums[d], value_dim_);
  }

  // -- by vectors ------------------------------------------------------------------------------------------------

  // The number of vectors whose sums fill the registers.
  static constexpr int at_once(int queries) { return !MANY_REGISTERS || queries > 4 ? 1 : queries > 1 ? 2 : 4; }

  template <int QUERIES>
  void by_vectors(int64_t at) {
    constexpr int WIDE = at_once(QUERIES);
    int v = 0;
    for (; v + WIDE <= tiles_; v += WIDE) score_vectors<QUERIES, WIDE>(v);
    for (; v < tiles_; v++) score_vectors<QUERIES, 1>(v);
    weigh(at, [&](int q, int i, Floats weight) { store(&scratch_.factors[q * SPAN + i], rounded<T>(weight)); });
    const int vectors = static_cast<int>(value_dim_ / LANES);
    for (v = 0; v + WIDE <= vectors; v += WIDE) add_vectors<QUERIES, WIDE>(v);
    for (; v < vectors; v++) add_vectors<QUERIES, 1>(v);
  }

  // Sums of the low and of the high halves of units, as a product of tiles makes them for a step.
  template <int QUERIES, int COUNT>
  struct Halves {
    Floats even[QUERIES][COUNT] = {}, odd[QUERIES][COUNT] = {};

    // Add units from ``vectors``, ``step`` apart, times the numbers [QUERIES][width] at ``a``; prefetch the same from
    // ``ahead``, which is needed next.
    AIOINFER_INLINE void add(const float* a, int64_t width, const uint32_t* const (&vectors)[COUNT], int64_t step,
                             int64_t units, const uint32_t* const (&ahead)[COUNT]) {
      for (int64_t k = 0; k < units; k++) {
        Ints low[COUNT], high[COUNT];
        AIOINFER_UNROLL
        for (int v = 0; v < COUNT; v++) {
          const Ints both = load<Ints>(vectors[v] + k * step);
          low[v] = both << 16, high[v] = both & static_cast<int32_t>(0xffff0000u);
          __builtin_prefetch(ahead[v] + k * step, 0, 2);
        }
        AIOINFER_UNROLL
        for (int q = 0; q < QUERIES; q++) {
          const Ints first = cast<Ints>(spread(a[q * width + 2 * k]));
          const Ints second = cast<Ints>(spread(a[q * width + 2 * k + 1]));
          AIOINFER_UNROLL
          for (int v = 0; v < COUNT; v++) {
            even[q][v] = Number<float>::multiply_add(even[q][v], first, low[v]);
            odd[q][v] = Number<float>::multiply_add(odd[q][v], second, high[v]);
          }
        }
      }
    }

    // Add a unit of which only the first half exists.
    AIOINFER_INLINE void add_half(const float* a, int64_t width, const uint32_t* const (&vectors)[COUNT]) {
      AIOINFER_UNROLL
      for (int v = 0; v < COUNT; v++)
        AIOINFER_UNROLL
        for (int q = 0; q < QUERIES; q++)
          even[q][v] = Number<float>::multiply_add(even[q][v], cast<Ints>(spread(a[q * width])),
                                                   load<Ints>(vectors[v]) << 16);
    }

    AIOINFER_INLINE void add_to(Floats (&sums)[QUERIES][COUNT]) const {
      AIOINFER_UNROLL
      for (int q = 0; q < QUERIES; q++)
        AIOINFER_UNROLL
        for (int v = 0; v < COUNT; v++) sums[q][v] += even[q][v] + odd[q][v];
    }
  };

  template <int QUERIES, int COUNT>
  AIOINFER_INLINE void score_vectors(int first) {
    Floats sums[QUERIES][COUNT] = {};
    for (int64_t d = 0; d < head_dim_; d += STEP) {
      const uint32_t *keys[COUNT], *ahead[COUNT];
      for (int v = 0; v < COUNT; v++) keys[v] = tile_[first + v] + d / 2 * TILE, ahead[v] = values(first + v) + d / 2 * TILE;
      Halves<QUERIES, COUNT> halves;
      halves.add(&scratch_.wide_queries[d], head_dim_, keys, TILE, std::min<int64_t>(STEP, head_dim_ - d) / 2, ahead);
      halves.add_to(sums);
    }
    AIOINFER_UNROLL
    for (int q = 0; q < QUERIES; q++)
      AIOINFER_UNROLL
      for (int v = 0; v < COUNT; v++) store(&scratch_.scores[q * SPAN + (first + v) * LANES], sums[q][v] * scale_);
  }

  // Cells behind the last position may hold anything and are not read.
  template <int QUERIES, int COUNT>
  AIOINFER_INLINE void add_vectors(int first) {
    Floats sums[QUERIES][COUNT];
    AIOINFER_UNROLL
    for (int q = 0; q < QUERIES; q++)
      AIOINFER_UNROLL
      for (int v = 0; v < COUNT; v++) sums[q][v] = load<Floats>(&scratch_.sums[q * value_dim_ + (first + v) * LANES]);
    for (int done = 0; done < count_; done += STEP) {
      Halves<QUERIES, COUNT> halves;
      for (int begin = done; begin < std::min(done + STEP, count_); begin += TILE) {
        const uint32_t *vectors[COUNT], *ahead[COUNT], *last[COUNT];
        const int positions = std::min(TILE, count_ - begin), units = positions / 2;
        for (int v = 0; v < COUNT; v++) {
          vectors[v] = values(begin / TILE) + (first + v) * LANES;
          ahead[v] = next_[begin / TILE] + (first + v) * LANES;
          last[v] = vectors[v] + units * value_dim_;
        }
        const float* weights = &scratch_.factors[begin];
        halves.add(weights, SPAN, vectors, value_dim_, units, ahead);
        if (positions % 2) halves.add_half(weights + 2 * units, SPAN, last);
      }
      halves.add_to(sums);
    }
    AIOINFER_UNROLL
    for (int q = 0; q < QUERIES; q++)
      AIOINFER_UNROLL
      for (int v = 0; v < COUNT; v++) store(&scratch_.sums[q * value_dim_ + (first + v) * LANES], sums[q][v]);
  }

  const Context<T>& context_;
  const int64_t head_dim_, value_dim_;
  const float scale_;
  const int queries_;
  int count_, tiles_, steps_;  // positions of the stretch, their tiles, and steps of 32
  TiledScratch<T>& scratch_;
  const uint32_t *tile_[SPAN / TILE], *next_[SPAN / TILE], *values_[SPAN / TILE];
  Softmax<MOST> softmax_;
};

}  // namespace aioinfer
