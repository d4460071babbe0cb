// Products by tiles: up to 32 rows times up to 64 columns whose sums stay in tiles, and linear layers made of them.
//
//             B  [k step][16 units][columns]          A block of rows of activations is read as tiles of 1 KB, and
//             ┌────┬────┐                             the panel of weights [unit][32 outputs] as two tiles side by
//   A         │ B0 │ B1 │                             side: it is not packed in another way. The order of summation is
//   ┌────┐    ├────┼────┤                             that of tiles.hpp, step by step of 32 numbers, for one row or a
//   │ A0 │ .. │ C0 │ C1 │                             thousand.
//   │ A1 │    │ C2 │ C3 │
//   └────┘    └────┴────┘
#pragma once

#include <algorithm>

#include "sink.hpp"

namespace aioinfer {

template <class T>
class Weights;

// Where a product reads A and B: addresses, and bytes from one step of 32 numbers to the next and from one row of a tile
// to the next.
struct TileRows {
  const void* first;
  int64_t block;  // bytes from one block of 16 rows to the next
  int64_t step, stride;

  AIOINFER_INLINE const char* at(int rows, int64_t k) const {
    return static_cast<const char*>(first) + rows * block + k * step;
  }
};

template <int COLUMNS>
struct TileColumns {
  const void* first[COLUMNS];  // of each block of 16 columns
  int64_t step, stride;

  AIOINFER_INLINE const char* at(int column, int64_t k) const {
    return static_cast<const char*>(first[column]) + k * step;
  }
};

// Sums of ROWS blocks of 16 rows and COLUMNS blocks of 16 columns, in the first tiles of the thread.
template <int ROWS, int COLUMNS>
class TileSums {
 public:
  static_assert(ROWS == 2 ? COLUMNS <= 2 : ROWS == 1 && COLUMNS <= 4);

  static AIOINFER_INLINE void clear() {
    each([](auto row, auto column) { tiles::zero<sum(row, column)>(); });
  }

  // From and to floats, rows ``width`` apart.
  static AIOINFER_INLINE void load(const float* from, int64_t width) {
    each([&](auto row, auto column) {
      tiles::load<sum(row, column)>(from + (row * width + column) * tiles::SIDE, width * sizeof(float));
    });
  }

  static AIOINFER_INLINE void store(float* to, int64_t width) {
    each([&](auto row, auto column) {
      tiles::store<sum(row, column)>(to + (row * width + column) * tiles::SIDE, width * sizeof(float));
    });
  }

  // Add the products of so many steps. FETCH prefetches what memory has behind the columns.
  template <bool FETCH = false>
  static AIOINFER_INLINE void add(const TileRows& rows, const TileColumns<COLUMNS>& columns, int64_t steps) {
    for (int64_t k = 0; k < steps; k++) {
      if constexpr (FETCH)
        for (int column = 0; column < COLUMNS; column += 2) fetch(columns.at(column, k));
      if constexpr (ROWS == 1) {
        tiles::load<A>(rows.at(0, k), rows.stride);
        add_column<0>(columns, k), add_column<1>(columns, k), add_column<2>(columns, k), add_column<3>(columns, k);
      } else {
        tiles::load<B>(columns.at(0, k), columns.stride);
        tiles::load<A>(rows.at(0, k), rows.stride);
        tiles::add_bfloat16_product<sum(0, 0), A, B>();
        if constexpr (COLUMNS == 2) {
          tiles::load<B + 1>(columns.at(1, k), columns.stride);
          tiles::add_bfloat16_product<sum(0, 1), A, B + 1>();
        }
        tiles::load<A + 1>(rows.at(1, k), rows.stride);
        tiles::add_bfloat16_product<sum(1, 0), A + 1, B>();
        if constexpr (COLUMNS == 2) tiles::add_bfloat16_product<sum(1, 1), A + 1, B + 1>();
      }
    }
  }

 private:
  // Numbers of tiles: 0 to 3 are sums.
  static constexpr int A = 4, B = ROWS == 1 ? 5 : 6;
  static constexpr int sum(int row, int column) { return row * COLUMNS + column; }

  template <int COLUMN>
  static AIOINFER_INLINE void add_column(const TileColumns<COLUMNS>& columns, int64_t k) {
    if constexpr (COLUMN < COLUMNS) {
      tiles::load<B + COLUMN % 3>(columns.at(COLUMN, k), columns.stride);
      tiles::add_bfloat16_product<sum(0, COLUMN), A, B + COLUMN % 3>();
    }
  }

  template <class Call>
  static AIOINFER_INLINE void each(Call&& call) {
    each_in_row<0>(call);
    if constexpr (ROWS > 1) each_in_row<1>(call);
  }

  template <int ROW, class Call>
  static AIOINFER_INLINE void each_in_row(Call& call) {
    const std::integral_constant<int, ROW> row;
    call(row, std::integral_constant<int, 0>{});
    if constexpr (COLUMNS > 1) call(row, std::integral_constant<int, 1>{});
    if constexpr (COLUMNS > 2) call(row, std::integral_constant<int, 2>{});
    if constexpr (COLUMNS > 3) call(row, std::integral_constant<int, 3>{});
  }

  // The two tiles of a step, 4 KB ahead: with more, or with the processor's own prefetching alone, memory is slower.
  static AIOINFER_INLINE void fetch(const char* from) {
    AIOINFER_UNROLL
    for (int i = 0; i < 2 * tiles::SIDE; i++) __builtin_prefetch(from + 4096 + i * tiles::ROW, 0, 3);
  }
};

// One or two blocks of rows times one or two panels from ``panel`` on.
template <int ROWS, int PANELS, bool FETCH, class T>
void multiply_tiles(const Activations<T>& a, int64_t block, const Weights<T>& w, int64_t panel, const Sink& sink) {
  constexpr int COLUMNS = 2 * PANELS, WIDTH = COLUMNS * tiles::SIDE, UNITS = 2 * tiles::SIDE;
  using Sums = TileSums<ROWS, COLUMNS>;
  alignas(64) float sums[ROWS * tiles::SIDE * WIDTH];
  TileColumns<COLUMNS> columns{{}, UNITS * tiles::ROW, UNITS * sizeof(uint32_t)};
  for (int i = 0; i < COLUMNS; i++) columns.first[i] = w.panel(panel + i / 2) + i % 2 * tiles::SIDE;
  const int64_t row_bytes = w.depth * static_cast<int64_t>(sizeof(uint32_t));
  Sums::clear();
  Sums::template add<FETCH>({a.block(block), tiles::SIDE * row_bytes, tiles::BYTES, tiles::ROW}, columns,
                            w.depth / tiles::SIDE);
  Sums::store(sums, WIDTH);
  const int64_t first = block * tiles::SIDE, rows = std::min<int64_t>(ROWS * tiles::SIDE, a.blocks.rows - first);
  if (w.biased())
    for (int64_t row = 0; row < rows; row++)
      for (int v = 0; v < COLUMNS; v++) {
        float* at = sums + row * WIDTH + v * LANES;
        store(at, w.finished(load<Floats>(at), panel + v / 2, v % 2));
      }
  sink({first, rows, panel, PANELS, sums, WIDTH, PANEL, LANES});
}

// All blocks times panels [from, to): two blocks at a time past all panels, which stay in the core's cache; the first
// ones read them from memory.
template <class T>
void multiply_by_tiles(const Activations<T>& a, const Weights<T>& w, int64_t from, int64_t to, const Sink& sink) {
  for (int64_t block = 0; block < a.blocks.count; block += 2) {
    int64_t panel = from;
    if (block + 1 < a.blocks.count) {
      for (; panel < to; panel++)
        if (block == 0)
          multiply_tiles<2, 1, true>(a, block, w, panel, sink);
        else
          multiply_tiles<2, 1, false>(a, block, w, panel, sink);
      continue;
    }
    for (; panel + 2 <= to; panel += 2)
      if (block == 0)
        multiply_tiles<1, 2, true>(a, block, w, panel, sink);
      else
        multiply_tiles<1, 2, false>(a, block, w, panel, sink);
    if (panel < to) multiply_tiles<1, 1, false>(a, block, w, panel, sink);
  }
}

// The panels of a task for so many rows, of ``all`` panels of ``bytes`` bytes: those of many rows fill half of the core's
// cache, or all of it where they are long, and others are few enough that every worker has some.
inline int64_t panels_by_tiles(int64_t rows, int64_t all, int64_t bytes, int workers) {
  constexpr int64_t FEW_ROWS = 128, LONG = 2048 * 2 * 2 * tiles::SIDE;
  const int64_t most = rows <= FEW_ROWS ? 256 << 10 : bytes < LONG ? 512 << 10 : 1 << 20;
  const int64_t shared = all / ((rows <= FEW_ROWS ? 4 : 2) * workers);
  return std::max<int64_t>(1, (std::min(most / bytes, shared) + 1) / 2) * 2;
}

}  // namespace aioinfer
