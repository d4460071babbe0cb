// Rows of rounded activations times strips of quantised weights; see quantised.hpp for the arithmetic.
#pragma once

#include "quantised_tiles.hpp"

namespace aioinfer {

// Rows [row, row + ROWS) times DOT_STRIPS strips, into rows of QUANTISED_PANEL. Memory is read faster where FETCH prefetches
// the strips ``ahead`` bytes further on, which are needed next: the processor's own prefetching starts anew in every strip.
template <int BITS, bool FETCH, int ROWS>
__attribute__((noinline)) void multiply_strips(const RoundedRows& a, int64_t row, const QuantisedWeights& w,
                                               int64_t strip, int64_t ahead, float* to) {
  constexpr int64_t APART = DOT_LANES == STRIP ? 0 : DOT_LANES;  // lanes from vector to vector within a strip
  const int64_t size = w.factor_bytes(), units = w.shape.group / UNIT, units_bytes = w.units_bytes();
  const int64_t steps = w.steps_bytes(), factors_bytes = w.factors_bytes(), header = w.header_bytes();
  const int64_t groups = w.shape.groups(), in_block = w.block(), block_bytes = w.block_bytes();
  const int64_t strip_bytes = APART ? 0 : w.strip_bytes();
  const int32_t zero = BITS == 8 ? EIGHT_BIT_ZERO : w.offsets ? 0 : 1 << (BITS - 1);
  const char* block = w.strip(strip);
  const int8_t* values[ROWS];
  const RowGroup* row_groups[ROWS];
  Reals totals[ROWS][DOT_VECTORS] = {};
  AIOINFER_UNROLL
  for (int r = 0; r < ROWS; r++) values[r] = a.values(row + r), row_groups[r] = a.groups(row + r);
  for (int64_t g = 0; g < groups; block += block_bytes) {
    const char* blocks[DOT_VECTORS];
    AIOINFER_UNROLL
    for (int v = 0; v < DOT_VECTORS; v++) blocks[v] = block + v * strip_bytes;
    for (int64_t line = 0; line < header; line += LINE) fetch<FETCH>(blocks, line + ahead);
    for (int64_t i = 0; i < in_block; i++, g++) {
      const char* vectors[DOT_VECTORS];
      Whole sums[ROWS][DOT_VECTORS];
      AIOINFER_UNROLL
      for (int v = 0; v < DOT_VECTORS; v++) vectors[v] = blocks[v] + header + i * units_bytes + v * APART * UNIT;
      AIOINFER_UNROLL
      for (int r = 0; r < ROWS; r++) {
        const Whole start = zero == 0 ? Whole{} : Whole{} - zero * row_groups[r][g].sum;
        AIOINFER_UNROLL
        for (int v = 0; v < DOT_VECTORS; v++) sums[r][v] = start;
      }
      add_products<BITS, ROWS, FETCH>(sums, values, vectors, units, ahead);
      AIOINFER_UNROLL
      for (int v = 0; v < DOT_VECTORS; v++) {
        const char* factors = blocks[v] + steps + i * factors_bytes + v * APART * size;
        const char* own = blocks[v] + v * APART * sizeof(float);
        const Reals scales = load_factors(factors, w.precision, own);
        if (w.offsets) {
          const Reals offsets = load_factors(factors + STRIP * size, w.precision, own + STRIP * sizeof(float));
          AIOINFER_UNROLL
          for (int r = 0; r < ROWS; r++)
            totals[r][v] = fused(Reals{} + row_groups[r][g].offset_factor, offsets, totals[r][v]);
        }
        AIOINFER_UNROLL
        for (int r = 0; r < ROWS; r++)
          totals[r][v] =
              fused(__builtin_convertvector(sums[r][v], Reals) * row_groups[r][g].factor, scales, totals[r][v]);
      }
      AIOINFER_UNROLL
      for (int r = 0; r < ROWS; r++) values[r] += w.shape.group;
    }
  }
  AIOINFER_UNROLL
  for (int r = 0; r < ROWS; r++)
    AIOINFER_UNROLL
    for (int v = 0; v < DOT_VECTORS; v++) store(to + r * QUANTISED_PANEL + v * DOT_LANES, totals[r][v]);
}

// The kernel of a number of rows, at most DOT_ROWS.
using StripKernel = void (*)(const RoundedRows&, int64_t, const QuantisedWeights&, int64_t, int64_t, float*);

template <int BITS, bool FETCH, int... ROWS>
StripKernel strip_kernel(int64_t rows, std::integer_sequence<int, ROWS...>) {
  static constexpr StripKernel KERNELS[] = {&multiply_strips<BITS, FETCH, ROWS + 1>...};
  return KERNELS[rows - 1];
}

inline StripKernel strip_kernel(int bits, int64_t rows, bool fetch) {
  constexpr auto ALL = std::make_integer_sequence<int, DOT_ROWS>{};
  if (bits == 4) return fetch ? strip_kernel<4, true>(rows, ALL) : strip_kernel<4, false>(rows, ALL);
  if (bits == 6) return fetch ? strip_kernel<6, true>(rows, ALL) : strip_kernel<6, false>(rows, ALL);
  return fetch ? strip_kernel<8, true>(rows, ALL) : strip_kernel<8, false>(rows, ALL);
}

// Rows that go past a strip while it stays in the first cache, in blocks of equal height.
constexpr int64_t BAND = 32;

// Rows [first, first + rows), at most BAND, times a panel; those that read it first prefetch what is ``ahead``.
inline void multiply_band(const RoundedRows& a, int64_t first, int64_t rows, const QuantisedWeights& w, int64_t panel,
                          int64_t ahead, float* sums) {
  const int64_t blocks = (rows + DOT_ROWS - 1) / DOT_ROWS, height = (rows + blocks - 1) / blocks;
  for (int half = 0; half < 2; half += DOT_STRIPS)
    for (int64_t row = 0; row < rows; row += height) {
      const StripKernel kernel = strip_kernel(w.shape.bits, std::min(height, rows - row), row == 0 && ahead != 0);
      kernel(a, first + row, w, 2 * panel + half, ahead, sums + row * QUANTISED_PANEL + half * STRIP);
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
    sink_({first, rows, panel * PARTS, count, sums, QUANTISED_PANEL, width_, w_.shape.gated ? STRIP : LANES});
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
  thread_local TileStrip own_strips[2];
  TileInputs& inputs = own_inputs;  // finding them takes a call
  TileStrip(&strips)[2] = own_strips;
  alignas(64) float sums[tiles::SIDE * QUANTISED_PANEL];
  inputs.set(a, first, last - first, w.shape);
  for (int64_t panel = from; panel < to; panel++) {
    const int64_t ahead = panel + 1 < w.panels() ? w.panel_bytes() : 0;
    for (int half = 0; half < 2; half++) strips[half].unpack(w, 2 * panel + half, ahead);
    for (int64_t row = 0; row < last - first; row += tiles::SIDE) {
      for (int half = 0; half < 2; half++) strips[half].multiply(inputs, row, w, sums + half * STRIP);
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
    const int64_t ahead = panel + 1 < w.panels() ? w.panel_bytes() : 0;
    for (int64_t row = first; row < last; row += BAND) {
      const int64_t rows = std::min(BAND, last - row);
      multiply_band(a, row, rows, w, panel, row == first ? ahead : 0, sums);
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
