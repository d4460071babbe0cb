// Weights in panels, and the product of activations with them.
//
//   activations, in blocks of rows          weights, in panels of outputs
//   ┌ block 0 ──────────┐                   ┌ panel 0 ─────────────────┐
//   │ unit 0: r0 r1 r2  │                   │ unit 0: o0 o1 ... o31    │   a unit is 4 bytes: one float or
//   │ unit 1: r0 r1 r2  │   each block      │ unit 1: o0 o1 ... o31    │   two bfloat16 that are neighbours
//   │ ...               │   times each      │ ...                      │   along the inner dimension
//   ├ block 1 ──────────┤   panel stays     ├ panel 1 ─────────────────┤
//   │ ...               │   in registers    │ ...                      │
//
// Every output is one sum along the inner dimension, from the first unit to the last, in one lane: its bits
// depend neither on the rest of the batch nor on the number of threads. (The blocking is Goto's and
// van de Geijn's, 2008; weights are packed once, so only activations are copied.)
//
// Where the processor has tiles, those multiply bfloat16, one row as well as a thousand: see tile_product.hpp.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "activations.hpp"
#include "memory.hpp"
#include "simd.hpp"
#include "sink.hpp"
#include "thread_pool.hpp"
#include "tile_product.hpp"

namespace aioinfer {

static_assert(!tiles::ENABLED || LANES == tiles::SIDE);

// Weights [outputs, inner] in panels, with a bias or without.
//
// Gated weights are two matrices of ``outputs`` rows; each panel holds LANES rows of the first and the same of the
// second, so that a gate and its value are in registers together.
template <class T>
class Weights {
 public:
  Weights(ThreadPool& pool, const T* rows, const T* bias, int64_t outputs, int64_t inner, bool gated)
      : Weights(nullptr, outputs, inner, gated) {
    memory_ = Memory(bytes());
    data_ = memory_.as<char>();
    set(pool, rows);
    set_bias(bias);
  }

  // Without a bias, in memory of size bytes() that the caller owns: set() fills it, or it holds packed weights.
  Weights(char* data, int64_t outputs, int64_t inner, bool gated)
      : outputs(outputs), inner(inner), depth(units_of<T>(inner)), gated(gated),
        panel_outputs(gated ? LANES : PANEL), data_(data) {
    panels = (outputs + panel_outputs - 1) / panel_outputs;
  }

  void set(ThreadPool& pool, const T* rows) {
    pool.run([&](Worker& worker) { worker.parallel(panels, [&](int64_t panel) { pack(panel, rows); }); });
  }

  // ``bias``: one element per row, or null.
  void set_bias(const T* bias) {
    if (bias == nullptr) return;
    bias_.resize(panels * PANEL);
    for (int64_t panel = 0; panel < panels; panel++)
      for (int lane = 0; lane < PANEL; lane++) {
        const int64_t row = source(panel, lane);
        bias_[panel * PANEL + lane] = row < 0 ? 0.0f : Number<T>::read(bias[row]);
      }
  }

  const char* data() const { return data_; }
  bool mapped() const { return memory_.as<char>() == nullptr; }
  int64_t bytes() const { return panels * panel_bytes(); }
  int64_t panel_bytes() const { return depth * PANEL * static_cast<int64_t>(sizeof(uint32_t)); }
  const uint32_t* panel(int64_t index) const { return reinterpret_cast<const uint32_t*>(data_) + index * depth * PANEL; }

  bool biased() const { return !bias_.empty(); }

  // Add the biases of the outputs to half a panel's sums, its first or second vector.
  AIOINFER_INLINE Floats finished(Floats sums, int64_t panel, int half) const {
    return biased() ? sums + load<Floats>(&bias_[panel * PANEL + half * LANES]) : sums;
  }

  int64_t outputs, inner, depth, panels;
  bool gated;
  int panel_outputs;

 private:
  // Row of the matrix that a lane of a panel holds; -1 for padding.
  int64_t source(int64_t panel, int lane) const {
    const int64_t at = panel * panel_outputs + (gated ? lane % LANES : lane);
    if (at >= outputs) return -1;
    return gated && lane >= LANES ? outputs + at : at;
  }

  void pack(int64_t index, const T* rows) {
    constexpr int PER_UNIT = Number<T>::PER_UNIT;
    T* panel = reinterpret_cast<T*>(data_ + index * panel_bytes());
    for (int lane = 0; lane < PANEL; lane++) {
      const int64_t row = source(index, lane);
      auto weight = [&](int64_t k) { return row < 0 || k >= inner ? Number<T>::make(0.0f) : rows[row * inner + k]; };
      auto place = [&](int64_t k) { return (k / PER_UNIT * PANEL + lane) * PER_UNIT + k % PER_UNIT; };
      for (int64_t k = 0; k < depth * PER_UNIT; k++) panel[place(k)] = weight(k);
    }
  }

  char* data_;
  Memory memory_;
  std::vector<float> bias_;
};

// The arithmetic of packed weights.
template <class T>
struct Packed : Number<T> {};

#if defined(AIOINFER_ARM_BFLOAT16)
// BFDOT, or two of them one after the other in a BFMMLA, which therefore has the same bits: sum + (low + high), where both
// sums are rounded to odd, and denormals are 0.
template <>
struct Packed<bfloat16> : Number<bfloat16> {
  static AIOINFER_INLINE Floats multiply_add(Floats sum, Ints a, Ints b) {
    return vbfdotq_f32(sum, cast<bfloat16x8_t>(a), cast<bfloat16x8_t>(b));
  }
};
#endif

// Whether each vector prefetches: of short ones, several would fetch the same line.
constexpr bool FETCHES = LANES > 4;

// sums[r][v] += sum over units k of a[k * ROWS + r] * vectors[v][k * step .. + LANES]
//
// ``Arithmetic`` adds a product. FETCH prefetches the same offsets from ``ahead``, which are needed next. With APART, a is
// [row][unit], and rows are so many units apart.
template <class Arithmetic, bool FETCH, int APART = 0, int ROWS, int VECTORS>
AIOINFER_INLINE void accumulate(Floats (&sums)[ROWS][VECTORS], const uint32_t* a,
                                const uint32_t* const (&vectors)[VECTORS], int64_t step, int64_t depth,
                                const uint32_t* const (&ahead)[VECTORS]) {
  for (int64_t k = 0; k < depth; k++) {
    Ints b[VECTORS];
    AIOINFER_UNROLL
    for (int v = 0; v < VECTORS; v++) {
      b[v] = load<Ints>(vectors[v] + k * step);
      if constexpr (FETCH && FETCHES) __builtin_prefetch(ahead[v] + k * step, 0, 2);
    }
    AIOINFER_UNROLL
    for (int r = 0; r < ROWS; r++) {
      const Ints unit = Ints{} + static_cast<int32_t>(APART ? a[r * APART + k] : a[k * ROWS + r]);
      AIOINFER_UNROLL
      for (int v = 0; v < VECTORS; v++) sums[r][v] = Arithmetic::multiply_add(sums[r][v], unit, b[v]);
    }
  }
}

#if defined(AIOINFER_ARM_BFLOAT16)
// The same for pairs of rows by BFMMLA, and for the last of an odd number by BFDOT. Both operands have two units of two
// rows, or of two outputs, side by side: what zipping has made of two units of LANES. A panel has an even number of units.
template <int ROWS, int VECTORS>
AIOINFER_INLINE void accumulate_pairs(Floats (&sums)[ROWS][VECTORS], const uint32_t* a,
                                      const uint32_t* const (&vectors)[VECTORS], int64_t step, int64_t depth) {
  constexpr int PAIRS = ROWS / 2;
  // Of each pair of rows, its sums for two outputs of a vector and for the other two.
  float32x4_t first[PAIRS][VECTORS] = {}, second[PAIRS][VECTORS] = {};
  for (int64_t k = 0; k < depth; k += 2, a += 2 * ROWS) {
    bfloat16x8_t rows[PAIRS];
    AIOINFER_UNROLL
    for (int p = 0; p < PAIRS; p++) {
      const uint32x2_t one = vld1_u32(a + 2 * p), other = vld1_u32(a + ROWS + 2 * p);
      rows[p] = cast<bfloat16x8_t>(vcombine_u32(vzip1_u32(one, other), vzip2_u32(one, other)));
    }
    AIOINFER_UNROLL
    for (int v = 0; v < VECTORS; v++) {
      const uint32x4_t one = vld1q_u32(vectors[v] + k * step), other = vld1q_u32(vectors[v] + (k + 1) * step);
      const auto low = cast<bfloat16x8_t>(vzip1q_u32(one, other)), high = cast<bfloat16x8_t>(vzip2q_u32(one, other));
      AIOINFER_UNROLL
      for (int p = 0; p < PAIRS; p++) {
        first[p][v] = vbfmmlaq_f32(first[p][v], rows[p], low);
        second[p][v] = vbfmmlaq_f32(second[p][v], rows[p], high);
      }
      if constexpr (ROWS % 2) {
        Floats& last = sums[ROWS - 1][v];
        last = Packed<bfloat16>::multiply_add(last, cast<Ints>(vdupq_n_u32(a[ROWS - 1])), cast<Ints>(one));
        last = Packed<bfloat16>::multiply_add(last, cast<Ints>(vdupq_n_u32(a[2 * ROWS - 1])), cast<Ints>(other));
      }
    }
  }
  AIOINFER_UNROLL
  for (int p = 0; p < PAIRS; p++)
    AIOINFER_UNROLL
    for (int v = 0; v < VECTORS; v++) {
      const auto one = cast<float64x2_t>(first[p][v]), other = cast<float64x2_t>(second[p][v]);
      sums[2 * p][v] = cast<Floats>(vzip1q_f64(one, other));
      sums[2 * p + 1][v] = cast<Floats>(vzip2q_f64(one, other));
    }
}
#endif

// The panels that a block of so many rows multiplies at once: enough sums to hide the latency of each. Those of short
// vectors are 8 to 24 in 32 registers, beside weights and rows.
constexpr int panels_at_once(int rows) {
  if (!MANY_REGISTERS) return 1;
  if (LANES == 4) return rows <= 2 ? 4 : rows <= 6 ? 2 : 1;
  return rows <= 3 ? 4 : rows == 4 ? 3 : rows <= 6 ? 2 : 1;
}

// Call call(std::integral_constant<int, height>) for a height known at run time.
template <class Call, int... HEIGHTS>
AIOINFER_INLINE void with_height(int height, Call&& call, std::integer_sequence<int, HEIGHTS...>) {
  (void)((height == HEIGHTS + 1 && (call(std::integral_constant<int, HEIGHTS + 1>{}), true)) || ...);
}
template <int MOST = MAX_ROWS, class Call>
AIOINFER_INLINE void with_height(int height, Call&& call) {
  with_height(height, call, std::make_integer_sequence<int, MOST>{});
}

// ROWS rows times COUNT panels. ``next`` is a panel to prefetch, or -1.
template <class T, int ROWS, int COUNT>
AIOINFER_INLINE void multiply_tile(const Activations<T>& a, int64_t block, const Weights<T>& w, int64_t panel,
                                   int64_t next, const Sink& sink) {
  const uint32_t *vectors[2 * COUNT], *ahead[2 * COUNT];
  Floats sums[ROWS][2 * COUNT];
  AIOINFER_UNROLL
  for (int v = 0; v < 2 * COUNT; v++) {
    vectors[v] = w.panel(panel + v / 2) + v % 2 * LANES;
    ahead[v] = w.panel(next + v / 2) + v % 2 * LANES;
  }
  AIOINFER_UNROLL
  for (int r = 0; r < ROWS; r++)
    AIOINFER_UNROLL
    for (int v = 0; v < 2 * COUNT; v++) sums[r][v] = Floats{};
#if defined(AIOINFER_ARM_BFLOAT16)
  constexpr bool BY_PAIRS = ROWS > 1 && Number<T>::PER_UNIT == 2;
#else
  constexpr bool BY_PAIRS = false;
#endif
  if constexpr (BY_PAIRS)
    accumulate_pairs(sums, a.block(block), vectors, PANEL, w.depth);
  else if (FETCHES && next >= 0)
    accumulate<Packed<T>, true>(sums, a.block(block), vectors, PANEL, w.depth, ahead);
  else
    accumulate<Packed<T>, false>(sums, a.block(block), vectors, PANEL, w.depth, vectors);
  alignas(64) float found[ROWS * COUNT * PANEL];
  AIOINFER_UNROLL
  for (int r = 0; r < ROWS; r++)
    AIOINFER_UNROLL
    for (int v = 0; v < 2 * COUNT; v++)
      store(found + (r * COUNT * 2 + v) * LANES, w.finished(sums[r][v], panel + v / 2, v % 2));
  const int64_t first = block * ROWS;
  sink({first, std::min<int64_t>(ROWS, a.blocks.rows - first), panel, COUNT, found, COUNT * PANEL, PANEL, LANES});
}

// A block of rows times panels [from, to); ``next`` as above.
template <class T>
void multiply_block(const Activations<T>& a, int64_t block, const Weights<T>& w, int64_t from, int64_t to, int64_t next,
                    const Sink& sink) {
  with_height(a.blocks.height, [&](auto height) {
    constexpr int ROWS = decltype(height)::value, COUNT = panels_at_once(ROWS);
    int64_t panel = from;
    if constexpr (COUNT > 1)
      for (; panel + COUNT <= to; panel += COUNT) multiply_tile<T, ROWS, COUNT>(a, block, w, panel, next, sink);
    for (; panel < to; panel++) multiply_tile<T, ROWS, 1>(a, block, w, panel, next, sink);
  });
}

// Bytes of panels or of activations that stay in a core's cache beside other data.
constexpr int64_t CACHE = 512 << 10;

// Whether the activations stay in the cache while all panels are read.
template <class T>
bool stays(const Activations<T>& a) {
  return a.blocks.rows * a.depth * static_cast<int64_t>(sizeof(uint32_t)) <= CACHE;
}

// Blocks [first, last) times panels [from, to): panel by panel if the activations stay in the cache, each prefetched
// during the one before; else block by block, so that the panels stay.
template <class T>
void multiply_by_vectors(const Activations<T>& a, const Weights<T>& w, int64_t from, int64_t to, int64_t first,
                         int64_t last, const Sink& sink) {
  if (last - first == 1 || !stays(a)) {
    for (int64_t b = first; b < last; b++) multiply_block(a, b, w, from, to, -1, sink);
    return;
  }
  for (int64_t panel = from; panel < to; panel++)
    for (int64_t b = first; b < last; b++)
      multiply_block(a, b, w, panel, panel + 1, b == first && panel + 1 < to ? panel + 1 : -1, sink);
}

// Compiled once, by common.cpp: models of every type have routers in float.
extern template void multiply_by_vectors(const Activations<float>&, const Weights<float>&, int64_t, int64_t, int64_t,
                                         int64_t, const Sink&);

// All blocks times panels [from, to).
template <class T>
void multiply_panels(const Activations<T>& a, const Weights<T>& w, int64_t from, int64_t to, const Sink& sink) {
  if constexpr (BY_TILES<T>)
    multiply_by_tiles(a, w, from, to, sink);
  else
    multiply_by_vectors(a, w, from, to, 0, a.blocks.count, sink);
}

// How workers divide a product: into tasks of ``run`` panels times ``part`` blocks of rows.
struct Division {
  int64_t run, runs, part, parts;
};

template <class T>
Division divide(const Activations<T>& a, const Weights<T>& w, int workers) {
  const int64_t blocks = a.blocks.count;
  auto in_runs = [&](int64_t run) { return (w.panels + run - 1) / run; };
  if constexpr (BY_TILES<T>) {
    const int64_t run = panels_by_tiles(a.blocks.rows, w.panels, w.panel_bytes(), workers);
    return {run, in_runs(run), blocks, 1};
  }
  // Few rows read panels from memory. Many read a run of panels once, which then stays in the core's cache.
  constexpr int64_t RUN = 256 << 10, TASKS = 4, LEAST_BLOCKS = 8;
  const int64_t wanted = TASKS * workers, at_once = panels_at_once(a.blocks.height);
  int64_t run = stays(a) ? std::min(RUN / w.panel_bytes(), w.panels / wanted) : CACHE / w.panel_bytes();
  // Of equal length, and a multiple of what is multiplied at once.
  const int64_t least = in_runs(std::max<int64_t>(1, run));
  run = ((w.panels + least - 1) / least + at_once - 1) / at_once * at_once;
  const int64_t runs = in_runs(run);
  int64_t parts = 1;
  if (!stays(a)) parts = std::clamp<int64_t>((wanted + runs - 1) / runs, 1, std::max<int64_t>(1, blocks / LEAST_BLOCKS));
  const int64_t part = (blocks + parts - 1) / parts;
  return {run, runs, part, (blocks + part - 1) / part};
}

// All rows times all panels, divided among the workers.
template <class T>
void multiply(Worker& worker, const Activations<T>& a, const Weights<T>& w, const Sink& sink) {
  // Without rows there is no task: a chunk of a prompt may want no logits.
  if (a.blocks.rows == 0) return worker.parallel(0, [](int64_t) {});
  const Division division = divide(a, w, worker.workers());
  worker.parallel(division.runs * division.parts, [&](int64_t task) {
    const int64_t from = task / division.parts * division.run, to = std::min(w.panels, from + division.run);
    if constexpr (BY_TILES<T>) {
      multiply_by_tiles(a, w, from, to, sink);
    } else {
      const int64_t first = task % division.parts * division.part;
      multiply_by_vectors(a, w, from, to, first, std::min(a.blocks.count, first + division.part), sink);
    }
  });
}

// Write the outputs of a panel into a row of ``width``, which may end within the panel.
template <class V>
AIOINFER_INLINE void put_pair(V* row, int64_t panel, int64_t width, Floats one, Floats other) {
  V* to = row + panel * PANEL;
  const int64_t left = width - panel * PANEL;
  if (left >= PANEL) {
    Number<V>::store_lanes(to, one);
    Number<V>::store_lanes(to + LANES, other);
    return;
  }
  V values[PANEL];
  Number<V>::store_lanes(values, one);
  Number<V>::store_lanes(values + LANES, other);
  std::memcpy(to, values, sizeof(V) * left);
}

}  // namespace aioinfer
