// Linear: activations times packed weights.
//
//   activations, in blocks of rows          weights, in panels of outputs
//   ┌ block 0 ──────────┐                   ┌ panel 0 ─────────────────┐
//   │ unit 0: r0 r1 r2  │                   │ unit 0: o0 o1 ... o31    │   a unit is 4 bytes: one float or
//   │ unit 1: r0 r1 r2  │   each block      │ unit 1: o0 o1 ... o31    │   two bfloat16 that are neighbours
//   │ ...               │   times each      │ ...                      │   along the inner dimension
//   ├ block 1 ──────────┤   panel stays     ├ panel 1 ─────────────────┤
//   │ ...               │   in registers    │ ...                      │
//
// Every output is one sum along the inner dimension, from its first unit to its last, in one lane: its bits
// depend neither on what else is in the batch nor on how many threads there are. (The blocking is Goto's and
// van de Geijn's, 2008; weights are packed once, so nothing is copied but activations.)
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <utility>
#include <vector>

#include "simd.hpp"
#include "team.hpp"

namespace aioinfer {

// Outputs of a panel: two vectors.
constexpr int PANEL = 2 * LANES;
// Rows of a block at most: two accumulators each, and the registers are full.
constexpr int MAX_ROWS = LANES == 16 ? 14 : 6;

// Memory for weights: aligned, and on huge pages where the system has any.
class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t bytes) {
    constexpr size_t huge = size_t{1} << 21;
    bytes = (bytes + huge - 1) / huge * huge;
    data_ = std::aligned_alloc(huge, bytes);
    if (data_ == nullptr) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    madvise(data_, bytes, MADV_HUGEPAGE);
#endif
  }
  ~Memory() { std::free(data_); }
  Memory(Memory&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  Memory& operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    return *this;
  }
  template <class V>
  V* as() const {
    return static_cast<V*>(data_);
  }

 private:
  void* data_ = nullptr;
};

// Room for ``size`` elements at least; what is in a buffer may be lost.
template <class V>
void grow(std::vector<V>& buffer, int64_t size) {
  if (static_cast<int64_t>(buffer.size()) < size) buffer.resize(size);
}

// How ``rows`` rows are divided into blocks of one height.
struct Blocks {
  explicit Blocks(int64_t rows) : rows(rows) {
    count = (rows + MAX_ROWS - 1) / MAX_ROWS;
    height = count ? static_cast<int>((rows + count - 1) / count) : 1;
  }
  int64_t rows, count;
  int height;
};

// A row: of which block, which in it, and which of all.
struct Place {
  int64_t block;
  int in_block;
  int64_t row;
};

// Activations [rows, depth units] in blocks; does not own its memory.
template <class T>
struct Activations {
  Activations(uint32_t* data, int64_t rows, int64_t inner)
      : data(data), blocks(rows), depth((inner + Number<T>::PER_UNIT - 1) / Number<T>::PER_UNIT) {}

  static int64_t units(int64_t rows, int64_t inner) {
    const Blocks blocks(rows);
    return blocks.count * blocks.height * ((inner + Number<T>::PER_UNIT - 1) / Number<T>::PER_UNIT);
  }

  const uint32_t* block(int64_t index) const { return data + index * blocks.height * depth; }

  // Where a row begins.
  AIOINFER_INLINE uint32_t* row(int64_t index) const {
    return data + index / blocks.height * blocks.height * depth + index % blocks.height;
  }

  // The same for a place in activations of as many rows.
  AIOINFER_INLINE uint32_t* row(const Place& place) const {
    return data + place.block * blocks.height * depth + place.in_block;
  }

  // LANES values of the row that begins at ``row``, from inner index ``at`` on, which is a multiple of LANES.
  AIOINFER_INLINE void put(uint32_t* row, int64_t at, Floats values) const {
    constexpr int COUNT = LANES / Number<T>::PER_UNIT;
    T numbers[LANES];
    Number<T>::store_lanes(numbers, values);
    uint32_t units[COUNT];
    std::memcpy(units, numbers, sizeof units);
    const int height = blocks.height;
    uint32_t* to = row + at / Number<T>::PER_UNIT * height;
    AIOINFER_UNROLL
    for (int i = 0; i < COUNT; i++) to[i * height] = units[i];
  }

  uint32_t* data;
  Blocks blocks;
  int64_t depth;
};

// Weights [outputs, inner] in panels, with a bias or without.
//
// Gated weights are two matrices of ``outputs`` rows; each panel holds LANES rows of the first and the same
// of the second, so that gate and gated meet in registers.
template <class T>
class Weights {
 public:
  Weights(Team& team, const T* rows, const T* bias, int64_t outputs, int64_t inner, bool gated)
      : Weights(nullptr, outputs, inner, gated) {
    memory_ = Memory(sizeof(uint32_t) * units());
    data_ = memory_.as<uint32_t>();
    set(team, rows, inner);
    if (bias == nullptr) return;
    bias_.resize(panels * PANEL);
    for (int64_t panel = 0; panel < panels; panel++)
      for (int lane = 0; lane < PANEL; lane++) {
        const int64_t row = source(panel, lane);
        bias_[panel * PANEL + lane] = row < 0 ? 0.0f : Number<T>::read(bias[row]);
      }
  }

  // Without a bias, in memory of units() that belongs to somebody else; what set() packs is there from then on.
  Weights(uint32_t* data, int64_t outputs, int64_t inner, bool gated)
      : outputs(outputs), depth((inner + Number<T>::PER_UNIT - 1) / Number<T>::PER_UNIT), gated(gated),
        panel_outputs(gated ? LANES : PANEL), data_(data) {
    panels = (outputs + panel_outputs - 1) / panel_outputs;
  }

  void set(Team& team, const T* rows, int64_t inner) {
    team.run([&](Member& member) {
      member.parallel(panels, [&](int64_t panel) { pack(panel, rows, inner); });
    });
  }

  int64_t units() const { return panels * depth * PANEL; }

  const uint32_t* panel(int64_t index) const { return data_ + index * depth * PANEL; }

  // The bias of half a panel: its first or its second vector.
  AIOINFER_INLINE Floats bias(int64_t panel, int half) const { return load<Floats>(&bias_[panel * PANEL + half * LANES]); }
  bool has_bias() const { return !bias_.empty(); }

  int64_t outputs, depth, panels;
  bool gated;
  int panel_outputs;

 private:
  // Row of the matrix that a lane of a panel holds; -1 for padding.
  int64_t source(int64_t panel, int lane) const {
    const int64_t at = panel * panel_outputs + (gated ? lane % LANES : lane);
    if (at >= outputs) return -1;
    return gated && lane >= LANES ? outputs + at : at;
  }

  void pack(int64_t index, const T* rows, int64_t inner) {
    constexpr int PER_UNIT = Number<T>::PER_UNIT;
    T* to = reinterpret_cast<T*>(data_ + index * depth * PANEL);
    for (int lane = 0; lane < PANEL; lane++) {
      const int64_t row = source(index, lane);
      for (int64_t k = 0; k < depth * PER_UNIT; k++) {
        T& place = to[(k / PER_UNIT * PANEL + lane) * PER_UNIT + k % PER_UNIT];
        place = row < 0 || k >= inner ? Number<T>::make(0.0f) : rows[row * inner + k];
      }
    }
  }

  uint32_t* data_;
  Memory memory_;
  std::vector<float> bias_;
};

// sums[r][v] += sum over units k of a[k * ROWS + r] * vectors[v][k * step .. + LANES]
//
// With FETCH the same places behind ``ahead`` are asked for on the way: they will be wanted next.
template <class T, bool FETCH, int ROWS, int VECTORS>
AIOINFER_INLINE void accumulate(Floats (&sums)[ROWS][VECTORS], const uint32_t* a,
                                const uint32_t* const (&vectors)[VECTORS], int64_t step, int64_t depth,
                                const uint32_t* const (&ahead)[VECTORS]) {
  for (int64_t k = 0; k < depth; k++) {
    Ints b[VECTORS];
    AIOINFER_UNROLL
    for (int v = 0; v < VECTORS; v++) {
      b[v] = load<Ints>(vectors[v] + k * step);
      if constexpr (FETCH) __builtin_prefetch(ahead[v] + k * step, 0, 2);
    }
    AIOINFER_UNROLL
    for (int r = 0; r < ROWS; r++) {
      const Ints unit = Ints{} + static_cast<int32_t>(a[k * ROWS + r]);
      AIOINFER_UNROLL
      for (int v = 0; v < VECTORS; v++) sums[r][v] = Number<T>::multiply_add(sums[r][v], unit, b[v]);
    }
  }
}

// Panels that a block of so many rows takes at once: enough sums to hide the latency of each.
constexpr int panels_at_once(int rows) { return LANES < 16 ? 1 : rows <= 3 ? 4 : rows == 4 ? 3 : rows <= 6 ? 2 : 1; }

// Call call(std::integral_constant<int, height>) for a height known only now.
template <class Call, int... HEIGHTS>
AIOINFER_INLINE void with_height(int height, Call&& call, std::integer_sequence<int, HEIGHTS...>) {
  (void)((height == HEIGHTS + 1 && (call(std::integral_constant<int, HEIGHTS + 1>{}), true)) || ...);
}
template <class Call>
AIOINFER_INLINE void with_height(int height, Call&& call) {
  with_height(height, call, std::make_integer_sequence<int, MAX_ROWS>{});
}

// ``next``: a panel to fetch, or -1.
template <class T, int ROWS, int COUNT, class Store>
AIOINFER_INLINE void multiply_tile(const Activations<T>& a, int64_t block, const Weights<T>& w, int64_t panel,
                                   int64_t next, Store& store) {
  const uint32_t *vectors[2 * COUNT], *ahead[2 * COUNT];
  Floats sums[ROWS][2 * COUNT];
  AIOINFER_UNROLL
  for (int v = 0; v < 2 * COUNT; v++) vectors[v] = w.panel(panel + v / 2) + v % 2 * LANES;
  AIOINFER_UNROLL
  for (int v = 0; v < 2 * COUNT; v++) ahead[v] = w.panel(next + v / 2) + v % 2 * LANES;
  AIOINFER_UNROLL
  for (int r = 0; r < ROWS; r++)
    AIOINFER_UNROLL
    for (int v = 0; v < 2 * COUNT; v++) sums[r][v] = Floats{};
  if (next >= 0)
    accumulate<T, true>(sums, a.block(block), vectors, PANEL, w.depth, ahead);
  else
    accumulate<T, false>(sums, a.block(block), vectors, PANEL, w.depth, vectors);
  const int64_t left = a.blocks.rows - block * ROWS;
  AIOINFER_UNROLL
  for (int r = 0; r < ROWS; r++) {
    if (r >= left) break;
    AIOINFER_UNROLL
    for (int p = 0; p < COUNT; p++) {
      Floats one = sums[r][2 * p], other = sums[r][2 * p + 1];
      if (w.has_bias()) one += w.bias(panel + p, 0), other += w.bias(panel + p, 1);
      store(Place{block, r, block * ROWS + r}, panel + p, one, other);
    }
  }
}

// A block of rows times panels [from, to). While it does so, panel ``next`` is fetched, if it is not -1.
template <class T, class Store>
void multiply_block(const Activations<T>& a, int64_t block, const Weights<T>& w, int64_t from, int64_t to,
                    int64_t next, Store& store) {
  with_height(a.blocks.height, [&](auto height) {
    constexpr int ROWS = decltype(height)::value, COUNT = panels_at_once(ROWS);
    int64_t panel = from;
    if constexpr (COUNT > 1)
      for (; panel + COUNT <= to; panel += COUNT) multiply_tile<T, ROWS, COUNT>(a, block, w, panel, next, store);
    for (; panel < to; panel++) multiply_tile<T, ROWS, 1>(a, block, w, panel, next, store);
  });
}

// All blocks times panels [from, to): panel by panel where the activations stay in the cache meanwhile.
template <class T, class Store>
void multiply_panels(const Activations<T>& a, const Weights<T>& w, int64_t from, int64_t to, Store&& store) {
  constexpr int64_t CACHE = 512 << 10;
  const bool panel_by_panel =
      a.blocks.count > 1 && a.blocks.rows * a.depth * static_cast<int64_t>(sizeof(uint32_t)) <= CACHE;
  if (!panel_by_panel) {
    for (int64_t b = 0; b < a.blocks.count; b++) multiply_block(a, b, w, from, to, -1, store);
    return;
  }
  for (int64_t panel = from; panel < to; panel++)
    for (int64_t b = 0; b < a.blocks.count; b++)
      multiply_block(a, b, w, panel, panel + 1, b == 0 && panel + 1 < to ? panel + 1 : -1, store);
}

// store(place, panel, first vector, second vector) for all rows and panels of a * w, shared among the team.
//
// Few rows: a task is a run of panels, each multiplied with all blocks while the next one is fetched from
// memory. Many rows: as many panels as fit into the cache beside a block, so that panels are what stays.
template <class T, class Store>
void multiply(Member& member, const Activations<T>& a, const Weights<T>& w, Store&& store) {
  constexpr int64_t CACHE = 512 << 10, RUN = 256 << 10;
  const int64_t panel_bytes = w.depth * PANEL * sizeof(uint32_t);
  const int64_t activation_bytes = a.blocks.rows * a.depth * sizeof(uint32_t);
  const int at_once = panels_at_once(a.blocks.height);
  const bool panel_by_panel = a.blocks.count > 1 && activation_bytes <= CACHE;
  const int64_t wanted = std::max<int64_t>(1, (a.blocks.count > 1 && !panel_by_panel ? CACHE : RUN) / panel_bytes);
  const int64_t run = (wanted + at_once - 1) / at_once * at_once;
  member.parallel((w.panels + run - 1) / run, [&](int64_t task) {
    const int64_t from = task * run, to = std::min(w.panels, from + run);
    if (!panel_by_panel) {
      for (int64_t b = 0; b < a.blocks.count; b++) multiply_block(a, b, w, from, to, -1, store);
      return;
    }
    for (int64_t panel = from; panel < to; panel++)
      for (int64_t b = 0; b < a.blocks.count; b++)
        multiply_block(a, b, w, panel, panel + 1, b == 0 && panel + 1 < to ? panel + 1 : -1, store);
  });
}

// The outputs of a panel into a row of ``width``, whose end may lie within the panel.
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
