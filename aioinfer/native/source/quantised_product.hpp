// Rows of rounded activations times strips of quantised weights; see quantised.hpp for the arithmetic.
#pragma once

#include "quantised_tiles.hpp"

namespace aioinfer {

// Rows [row, row + ROWS) times a strip, into rows of QUANTISED_PANEL. FETCH: the strip comes from memory, which is read
// faster where it is prefetched.
template <int BITS, bool FETCH, int ROWS>
__attribute__((noinline)) void multiply_strip(const RoundedRows& a, int64_t row, const QuantisedWeights& w,
                                              int64_t strip, float* to) {
  const int64_t units = w.shape.group / UNIT, groups = w.shape.groups();
  const int32_t zero = BITS == 8 || BITS == LOOKED_UP ? EIGHT_BIT_ZERO : w.offsets ? 0 : 1 << (w.shape.bits - 1);
  Quads table{};
  if constexpr (BITS == LOOKED_UP) table = spread_table(w.shape.table, EIGHT_BIT_ZERO);
  StripGroups at(w, strip);
  const int8_t* values[ROWS];
  const RowGroup* row_groups[ROWS];
  Reals totals[ROWS][DOT_VECTORS] = {};
  AIOINFER_UNROLL
  for (int r = 0; r < ROWS; r++) values[r] = a.values(row + r), row_groups[r] = a.groups(row + r);
  for (int64_t g = 0; g < groups; g++) {
    at.advance([](const char* from, int64_t bytes) { fetch<FETCH>(from, bytes); });
    Whole sums[ROWS][DOT_VECTORS];
    AIOINFER_UNROLL
    for (int r = 0; r < ROWS; r++) {
      const Whole start = zero == 0 ? Whole{} : Whole{} - zero * row_groups[r][g].sum;
      AIOINFER_UNROLL
      for (int v = 0; v < DOT_VECTORS; v++) sums[r][v] = start;
    }
    add_products<BITS, ROWS, FETCH>(sums, values, at.units, units, table);
    with_factors(w, at, [&](auto&& read) __attribute__((always_inline)) {
      AIOINFER_UNROLL
      for (int v = 0; v < DOT_VECTORS; v++) {
        const Reals scales = read(v * DOT_LANES);
        if (w.offsets) {
          const Reals offsets = read(STRIP + v * DOT_LANES);
          AIOINFER_UNROLL
          for (int r = 0; r < ROWS; r++)
            totals[r][v] = fused(broadcast(row_groups[r][g].offset_factor), offsets, totals[r][v]);
        }
        AIOINFER_UNROLL
        for (int r = 0; r < ROWS; r++)
          totals[r][v] = fused(__builtin_convertvector(sums[r][v], Reals) * row_groups[r][g].factor, scales, totals[r][v]);
      }
    });
    AIOINFER_UNROLL
    for (int r = 0; r < ROWS; r++) values[r] += w.shape.group;
  }
  AIOINFER_UNROLL
  for (int r = 0; r < ROWS; r++)
    AIOINFER_UNROLL
    for (int v = 0; v < DOT_VECTORS; v++) store(to + r * QUANTISED_PANEL + v * DOT_LANES, totals[r][v]);
}

// The kernel of a number of rows, at most DOT_ROWS.
using StripKernel = void (*)(const RoundedRows&, int64_t, const QuantisedWeights&, int64_t, float*);

template <int BITS, bool FETCH, int... ROWS>
StripKernel strip_kernel(int64_t rows, std::integer_sequence<int, ROWS...>) {
  static constexpr StripKernel KERNELS[] = {&multiply_strip<BITS, FETCH, ROWS + 1>...};
  return KERNELS[rows - 1];
}

inline StripKernel strip_kernel(int bits, int64_t rows, bool fetch) {
  constexpr auto ALL = std::make_integer_sequence<int, DOT_ROWS>{};
  if (bits == LOOKED_UP) return fetch ? strip_kernel<LOOKED_UP, true>(rows, ALL) : strip_kernel<LOOKED_UP, false>(rows, ALL);
  if (bits == 4) return fetch ? strip_kernel<4, true>(rows, ALL) : strip_kernel<4, false>(rows, ALL);
  if (bits == 6) return fetch ? strip_kernel<6, true>(rows, ALL) : strip_kernel<6, false>(rows, ALL);
  return fetch ? strip_kernel<8, true>(rows, ALL) : strip_kernel<8, false>(rows, ALL);
}

// Rows that go past a panel while it stays in the first cache, in blocks of equal height.
constexpr int64_t BAND = 32;

// Rows [first, first + rows), at most BAND, times a panel; ``fetch``: which comes from memory.
inline void multiply_band(const RoundedRows& a, int64_t first, int64_t rows, const QuantisedWeights& w, int64_t panel,
                          bool fetch, float* sums) {
  const int64_t blocks = (rows + DOT_ROWS - 1) / DOT_ROWS, height = (rows + blocks - 1) / blocks;
  for (int strip = 0; strip < STRIPS; strip++)
    for (int64_t row = 0; row < rows; row += height) {
      const StripKernel kernel = strip_kernel(w.shape.kind(), std::min(height, rows - row), fetch && row == 0);
      kernel(a, first + row, w, STRIPS * panel + strip, sums + row * QUANTISED_PANEL + strip * STRIP);
    }
}

// Adds biases, and gives sums of panels of QUANTISED_PANEL outputs to a sink as those of PANEL.
class PanelSink {
 public:
  PanelSink(const QuantisedWeights& w, const Sink& sink)
      : w_(w), sink_(sink), width_(w.shape.gated ? LANES : PANEL), parts_((w.shape.outputs + width_ - 1) / width_) {}

  void operator()(int64_t first, int64_t rows, int64_t panel, float* sums) const {
    constexpr int64_t PARTS = QUANTISED_PANEL / PANEL;
    if (const float* bias = w_.bias(panel))
      for (int64_t row = 0; row < rows; row++)
        for (int i = 0; i < QUANTISED_PANEL; i++) sums[row * QUANTISED_PANEL + i] += bias[i];
    const int64_t count = std::min(PARTS, parts_ - panel * PARTS);
    sink_({first, rows, panel * PARTS, count, sums, QUANTISED_PANEL, width_, w_.shape.gated ? QUANTISED_PANEL / 2 : LANES});
  }

 private:
  const QuantisedWeights& w_;
  const Sink& sink_;
  int64_t width_, parts_;
};

// Rows [first, last) times panels [from, to): block by block past a panel that is unpacked.
inline void multiply_tile_panels(const RoundedRows& a, const QuantisedWeights& w, int64_t first, int64_t last,
                                 int64_t from, int64_t to, const PanelSink& sink) {
  thread_local TileInputs own_inputs;
  thread_local TileOutputs own_halves[2];
  TileInputs& inputs = own_inputs;  // finding them takes a call
  TileOutputs(&halves)[2] = own_halves;
  alignas(64) float sums[tiles::SIDE * QUANTISED_PANEL];
  inputs.set(a, first, last - first, w.shape);
  for (int64_t panel = from; panel < to; panel++) {
    for (int half = 0; half < 2; half++) halves[half].unpack(w, panel, half);
    for (int64_t row = 0; row < last - first; row += tiles::SIDE) {
      for (int half = 0; half < 2; half++) halves[half].multiply(inputs, row, w, sums + half * tiles::SIDE);
      sink(first + row, std::min<int64_t>(tiles::SIDE, last - first - row), panel, sums);
    }
  }
}

// Rows that stay in a core's cache with a run of panels: more of them where unpacked panels are no longer read from there.
inline int64_t rows_at_once(const RoundedRows& a, bool tiled) {
  const int64_t most = tiled ? 384 << 10 : 128 << 10;
  return std::max<int64_t>(1, most / a.depth() / BAND) * BAND;
}

void multiply_rounded(const RoundedRows& a, const QuantisedWeights& w, int64_t first, int64_t last, int64_t from,
                      int64_t to, const Sink& sink) {
  const PanelSink panel_sink(w, sink);
  if (by_tiles(w.shape, last - first)) {
    const int64_t at_once = rows_at_once(a, true);
    for (int64_t row = first; row < last; row += at_once)
      multiply_tile_panels(a, w, row, std::min(last, row + at_once), from, to, panel_sink);
    return;
  }
  alignas(64) float sums[BAND * QUANTISED_PANEL];
  for (int64_t panel = from; panel < to; panel++) {
    for (int64_t row = first; row < last; row += BAND) {
      const int64_t rows = std::min(BAND, last - row);
      multiply_band(a, row, rows, w, panel, row == first, sums);
      panel_sink(row, rows, panel, sums);
    }
  }
}

void multiply_rounded(Worker& worker, const RoundedRows& a, const QuantisedWeights& w, const Sink& sink) {
  // A task is a panel, or, for many rows, a run of panels that stays in a core's cache, times rows that stay there with it.
  constexpr int64_t WEIGHTS = 256 << 10, TASKS = 4;
  const bool tiled = by_tiles(w.shape, a.rows());
  const int64_t fitting = std::min(WEIGHTS / w.panel_bytes(), w.panels() / (TASKS * worker.workers()));
  const int64_t run = a.rows() <= BAND && !tiled ? 1 : std::max<int64_t>(1, fitting), runs = (w.panels() + run - 1) / run;
  const int64_t chunk = rows_at_once(a, tiled), chunks = (a.rows() + chunk - 1) / chunk;
  worker.parallel_in_shares(runs * chunks, [&](int64_t task) {
    const int64_t from = task / chunks * run, first = task % chunks * chunk;
    multiply_rounded(a, w, first, std::min(a.rows(), first + chunk), from, std::min(w.panels(), from + run), sink);
  });
}

}  // namespace aioinfer
