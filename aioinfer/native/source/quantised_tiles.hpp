// Products of quantised weights by tiles: 16 rows at a time times panels that are unpacked to bytes.
//
//     activations                       weights of 16 outputs, unpacked          sums of a group
//     ┌ 16 rows x 64 numbers ┐    x     ┌ 16 units x 16 outputs ┐      ->      16 x 16 numbers of 32 bits
//
// Sums are exact, and what becomes of them is the arithmetic of quantised.hpp: results have the bits of other kernels. A group
// has one tile of weights or several; with shorter ones, storing and scaling sums takes longer than vectors take for all.
#pragma once

#include "quantised_dot.hpp"

namespace aioinfer {

// Fewer rows are multiplied by vectors.
constexpr int64_t LEAST_TILE_ROWS = 28;
// Numbers of the inner dimension that a tile has.
constexpr int64_t TILE_NUMBERS = tiles::SIDE * UNIT;
// Vectors of a row of a tile.
constexpr int TILE_VECTORS = tiles::SIDE / DOT_LANES;

// Whether so many rows are multiplied by tiles.
inline bool by_tiles(const QuantisedShape& shape, int64_t rows) {
  return tiles::ENABLED && rows >= LEAST_TILE_ROWS && shape.group % TILE_NUMBERS == 0;
}

// Rows in blocks of 16, as tiles along the inner dimension, with the factors of the rows of a block side by side.
class TileInputs {
 public:
  void set(const RoundedRows& a, int64_t first, int64_t rows, const QuantisedShape& shape) {
    depth_ = shape.depth(), groups_ = shape.groups();
    const int64_t padded = (rows + tiles::SIDE - 1) / tiles::SIDE * tiles::SIDE;
    grow(tiles_, padded * depth_), grow(factors_, padded * 2 * groups_);
    for (int64_t row = 0; row < padded; row++) {
      int8_t* to = tiles_.data() + row / tiles::SIDE * tiles::SIDE * depth_ + row % tiles::SIDE * tiles::ROW;
      float* factors = factors_.data() + row / tiles::SIDE * tiles::SIDE * 2 * groups_ + row % tiles::SIDE;
      const int8_t* from = row < rows ? a.values(first + row) : nullptr;
      for (int64_t k = 0; k < depth_; k += TILE_NUMBERS, to += tiles::BYTES)
        from ? std::memcpy(to, from + k, TILE_NUMBERS) : std::memset(to, 0, TILE_NUMBERS);
      const RowGroup* groups = row < rows ? a.groups(first + row) : nullptr;
      for (int64_t g = 0; g < groups_; g++, factors += 2 * tiles::SIDE) {
        factors[0] = groups ? groups[g].factor : 0.0f;
        factors[tiles::SIDE] = groups ? groups[g].offset_factor : 0.0f;
      }
    }
  }

  // From a row on that begins a block: the tiles, and, group by group, factors and then offset factors.
  const int8_t* tiles(int64_t row) const { return tiles_.data() + row * depth_; }
  const float* factors(int64_t row) const { return factors_.data() + row * 2 * groups_; }

 private:
  Buffer<int8_t> tiles_;
  Buffer<float> factors_;
  int64_t depth_ = 0, groups_ = 0;
};

// Half of a panel as tiles of its groups one after the other, and its scales and offsets as floats.
class TileOutputs {
 public:
  // Unpack a half of a panel.
  void unpack(const QuantisedWeights& w, int64_t panel, int half) {
    const int64_t groups = w.shape.groups();
    steps_ = w.shape.group / TILE_NUMBERS;
    grow(tiles_, groups * steps_ * tiles::BYTES), grow(factors_, groups * 2 * tiles::SIDE);
    const int kind = w.shape.kind();
    const auto unpack_groups = kind == LOOKED_UP ? &TileOutputs::groups<LOOKED_UP>
                               : kind == 4       ? &TileOutputs::groups<4>
                               : kind == 6       ? &TileOutputs::groups<6>
                                                 : &TileOutputs::groups<8>;
    (this->*unpack_groups)(w, panel * STRIPS + half * tiles::SIDE / STRIP, half * tiles::SIDE % STRIP);
  }

  // The block of rows from ``row`` on times the outputs, into rows of QUANTISED_PANEL.
  void multiply(const TileInputs& a, int64_t row, const QuantisedWeights& w, float* to) const {
    if (w.offsets)
      multiply<true>(a.tiles(row), a.factors(row), w.shape.groups(), to);
    else
      multiply<false>(a.tiles(row), a.factors(row), w.shape.groups(), to);
  }

 private:
  template <bool OFFSETS>
  __attribute__((noinline)) void multiply(const int8_t* rows, const float* row_factors, int64_t groups,
                                          float* to) const {
    Reals totals[tiles::SIDE][TILE_VECTORS] = {};
    auto each = [](auto&& call) {
      call(std::integral_constant<int, 0>{}), call(std::integral_constant<int, 1>{});
      call(std::integral_constant<int, 2>{}), call(std::integral_constant<int, 3>{});
    };
    for (int64_t first = 0; first < groups; first += 4) {
      each([&](auto index) {
        if (first + index < groups) add_up<index>(rows, first + index);
      });
      each([&](auto index) {
        const int64_t group = first + index;
        if (group < groups)
          scale<OFFSETS, index>(factors_.data() + group * 2 * tiles::SIDE, row_factors + group * 2 * tiles::SIDE, totals);
      });
    }
    AIOINFER_UNROLL
    for (int r = 0; r < tiles::SIDE; r++)
      AIOINFER_UNROLL
      for (int v = 0; v < TILE_VECTORS; v++) store(to + r * QUANTISED_PANEL + v * DOT_LANES, totals[r][v]);
  }

  typedef int8_t Bytes __attribute__((vector_size(DOT_LANES * UNIT)));

  template <int BITS>
  void groups(const QuantisedWeights& w, int64_t strip, int first) {
    constexpr int RUN = RUN_UNITS<BITS>;
    const int64_t units = w.shape.group / UNIT;
    constexpr bool SIGNED = BITS == 8 || BITS == LOOKED_UP;
    const int8_t number = SIGNED || w.offsets ? 0 : static_cast<int8_t>(1 << (w.shape.bits - 1));
    const Bytes zero = Bytes{} + number;
    const Quads table = spread_table(w.shape.table, 0);
    char* to = tiles_.data();
    float* factors = factors_.data();
    StripGroups at(w, strip);
    auto fetch = [&](const char* from, int64_t bytes) {  // for each half its own lines of the cache
      for (int64_t place = first * UNIT; place < bytes; place += LINE) __builtin_prefetch(from + place + AHEAD);
    };
    for (int64_t g = 0; g < w.shape.groups(); g++, factors += 2 * tiles::SIDE) {
      at.advance(fetch);
      fetch(at.units, w.units_bytes());
      with_factors(w, at, [&](auto&& read) __attribute__((always_inline)) {
        for (int kind = 0; kind < w.kinds(); kind++)
          AIOINFER_UNROLL
          for (int v = 0; v < TILE_VECTORS; v++)
            store(factors + kind * tiles::SIDE + v * DOT_LANES, read(kind * STRIP + first + v * DOT_LANES));
      });
      const char* from = at.units + first * UNIT;
      for (int64_t unit = 0; unit < units; unit += RUN, from += RUN_LINES<BITS> * LINE, to += RUN * tiles::ROW)
        AIOINFER_UNROLL
        for (int j = 0; j < RUN; j++)
          AIOINFER_UNROLL
          for (int v = 0; v < TILE_VECTORS; v++)
            store(to + j * tiles::ROW + v * DOT_BYTES, weights<BITS>(from + v * DOT_BYTES, j, table) - zero);
    }
  }

  template <int BITS>
  static AIOINFER_INLINE Bytes weights(const char* run, int unit, Quads table) {
    if constexpr (BITS == 8) return load<Bytes>(run);
    const Quads found = unsigned_weights<BITS>(run, unit);
    return cast<Bytes>(BITS == LOOKED_UP ? looked_up(table, found) : found);
  }

  // The products of a group, in a tile of the number INDEX.
  template <int INDEX>
  AIOINFER_INLINE void add_up(const int8_t* rows, int64_t group) const {
    constexpr int A = 4 + INDEX % 2, B = 6 + INDEX % 2;
    tiles::zero<INDEX>();
    for (int64_t tile = group * steps_; tile < (group + 1) * steps_; tile++) {
      tiles::load<A>(rows + tile * tiles::BYTES, tiles::ROW);
      tiles::load<B>(tiles_.data() + tile * tiles::BYTES, tiles::ROW);
      tiles::add_int8_product<INDEX, A, B>();
    }
  }

  // Add the sums in a tile to the totals of 16 rows.
  template <bool OFFSETS, int INDEX>
  static AIOINFER_INLINE void scale(const float* factors, const float* of_rows, Reals (&totals)[tiles::SIDE][TILE_VECTORS]) {
    alignas(64) int32_t sums[tiles::SIDE * tiles::SIDE];
    tiles::store<INDEX>(sums, tiles::ROW);
    AIOINFER_UNROLL
    for (int v = 0; v < TILE_VECTORS; v++) {
      const Reals scales = load<Reals>(factors + v * DOT_LANES), offsets = load<Reals>(factors + tiles::SIDE + v * DOT_LANES);
      AIOINFER_UNROLL
      for (int r = 0; r < tiles::SIDE; r++) {
        const Whole sum = load<Whole>(sums + r * tiles::SIDE + v * DOT_LANES);
        if (OFFSETS) totals[r][v] = fused(broadcast(of_rows[tiles::SIDE + r]), offsets, totals[r][v]);
        totals[r][v] = fused(__builtin_convertvector(sum, Reals) * broadcast(of_rows[r]), scales, totals[r][v]);
      }
    }
  }

  Buffer<char> tiles_;
  Buffer<float> factors_;
  int64_t steps_ = 1;  // tiles of a group
};

}  // namespace aioinfer
