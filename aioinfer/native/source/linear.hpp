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
// Every output is one sum along the inner dimension, from the first unit to the last, in one lane: its bits
// depend neither on the rest of the batch nor on the number of threads. (The blocking is Goto's and
// van de Geijn's, 2008; weights are packed once, so only activations are copied.)
//
// Where the processor has tiles, those multiply bfloat16, one row as well as a thousand: see tile_product.hpp.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <new>
#include <utility>
#include <vector>

#include "activations.hpp"
#include "simd.hpp"
#include "thread_pool.hpp"
#include "tile_product.hpp"

namespace aioinfer {

// Outputs of a panel: two vectors.
constexpr int PANEL = 2 * LANES;
static_assert(!tiles::ENABLED || LANES == tiles::SIDE);

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

// The format of weights: the type of the model, or 8-bit integers with one factor per output.
enum class Format { PLAIN, INT8 };

// Reads a lane's unit in each format. A *piece* is the element of its pointers.
template <class T, Format FORMAT>
struct Stored;

template <class T>
struct Stored<T, Format::PLAIN> {
  using Piece = uint32_t;
  static constexpr int PER_UNIT = 1;
  static AIOINFER_INLINE Ints units(const Piece* from) { return load<Ints>(from); }
};

template <class T>
struct Stored<T, Format::INT8> {
  using Piece = int8_t;
  static constexpr int PER_UNIT = Number<T>::PER_UNIT;
  static AIOINFER_INLINE Ints units(const Piece* from) { return Number<T>::of_bytes(from); }
};

// Weights [outputs, inner] in panels, with a bias or without.
//
// Gated weights are two matrices of ``outputs`` rows; each panel holds LANES rows of the first and the same of the
// second, so that a gate and its value are in registers together. Rounded to 8 bits, the weights of an output are
// multiples of its factor, the largest one 127 times.
template <class T>
class Weights {
 public:
  Weights(ThreadPool& pool, const T* rows, const T* bias, int64_t outputs, int64_t inner, bool gated,
          Format format = Format::PLAIN)
      : Weights(nullptr, outputs, inner, gated, format) {
    memory_ = Memory(bytes());
    data_ = memory_.as<char>();
    set(pool, rows);
    if (bias == nullptr) return;
    bias_.resize(panels * PANEL);
    for (int64_t panel = 0; panel < panels; panel++)
      for (int lane = 0; lane < PANEL; lane++) {
        const int64_t row = source(panel, lane);
        bias_[panel * PANEL + lane] = row < 0 ? 0.0f : Number<T>::read(bias[row]);
      }
  }

  // Without a bias, in memory of size bytes() that the caller owns; set() fills it.
  Weights(char* data, int64_t outputs, int64_t inner, bool gated, Format format)
      : outputs(outputs), inner(inner), depth(units_of<T>(inner)), gated(gated),
        panel_outputs(gated ? LANES : PANEL), format(format), data_(data) {
    panels = (outputs + panel_outputs - 1) / panel_outputs;
    if (format == Format::INT8) factors_.resize(panels * PANEL);
  }

  void set(ThreadPool& pool, const T* rows) {
    pool.run([&](Worker& worker) { worker.parallel(panels, [&](int64_t panel) { pack(panel, rows); }); });
  }

  int64_t bytes() const { return panels * panel_bytes(); }
  int64_t panel_bytes() const {
    return depth * PANEL * (format == Format::INT8 ? Number<T>::PER_UNIT : sizeof(uint32_t));
  }

  // The beginning of a panel; the caller knows its format.
  template <class Piece = uint32_t>
  const Piece* panel(int64_t index) const {
    return reinterpret_cast<const Piece*>(data_ + index * panel_bytes());
  }

  // Apply the factors and biases of the outputs to half a panel's sums, its first or second vector.
  AIOINFER_INLINE Floats finished(Floats sums, int64_t panel, int half) const {
    if (!factors_.empty()) sums *= load<Floats>(&factors_[panel * PANEL + half * LANES]);
    if (!bias_.empty()) sums += load<Floats>(&bias_[panel * PANEL + half * LANES]);
    return sums;
  }

  // A panel in the plain format, into depth * PANEL units.
  void expand(int64_t index, uint32_t* to) const {
    constexpr int STEP = LANES * Number<T>::PER_UNIT;
    const int8_t* from = panel<int8_t>(index);
    for (int64_t i = 0; i < 2 * depth; i++) store(to + i * LANES, Number<T>::of_bytes(from + i * STEP));
  }

  int64_t outputs, inner, depth, panels;
  bool gated;
  int panel_outputs;
  Format format;

 private:
  // Row of the matrix that a lane of a panel holds; -1 for padding.
  int64_t source(int64_t panel, int lane) const {
    const int64_t at = panel * panel_outputs + (gated ? lane % LANES : lane);
    if (at >= outputs) return -1;
    return gated && lane >= LANES ? outputs + at : at;
  }

  void pack(int64_t index, const T* rows) {
    constexpr int PER_UNIT = Number<T>::PER_UNIT;
    char* panel = data_ + index * panel_bytes();
    for (int lane = 0; lane < PANEL; lane++) {
      const int64_t row = source(index, lane);
      auto weight = [&](int64_t k) { return row < 0 || k >= inner ? Number<T>::make(0.0f) : rows[row * inner + k]; };
      auto place = [&](int64_t k) { return (k / PER_UNIT * PANEL + lane) * PER_UNIT + k % PER_UNIT; };
      if (format == Format::PLAIN) {
        for (int64_t k = 0; k < depth * PER_UNIT; k++) reinterpret_cast<T*>(panel)[place(k)] = weight(k);
        continue;
      }
      float most = 0;
      for (int64_t k = 0; k < inner; k++) most = std::max(most, std::abs(Number<T>::read(weight(k))));
      const float factor = most > 0 ? most / 127 : 1.0f;
      factors_[index * PANEL + lane] = factor;
      for (int64_t k = 0; k < depth * PER_UNIT; k++)
        reinterpret_cast<int8_t*>(panel)[place(k)] =
            static_cast<int8_t>(std::clamp(std::nearbyint(Number<T>::read(weight(k)) / factor), -127.0f, 127.0f));
    }
  }

  char* data_;
  Memory memory_;
  std::vector<float> bias_, factors_;
};

// sums[r][v] += sum over units k of a[k * ROWS + r] * vectors[v][k * step .. + LANES]
//
// FETCH prefetches the same offsets from ``ahead``, which are needed next.
template <class T, bool FETCH, Format FORMAT = Format::PLAIN, int ROWS, int VECTORS, class Piece>
AIOINFER_INLINE void accumulate(Floats (&sums)[ROWS][VECTORS], const uint32_t* a,
                                const Piece* const (&vectors)[VECTORS], int64_t step, int64_t depth,
                                const Piece* const (&ahead)[VECTORS]) {
  for (int64_t k = 0; k < depth; k++) {
    Ints b[VECTORS];
    AIOINFER_UNROLL
    for (int v = 0; v < VECTORS; v++) {
      b[v] = Stored<T, FORMAT>::units(vectors[v] + k * step);
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

// The panels that a block of so many rows multiplies at once: enough sums to hide the latency of each.
constexpr int panels_at_once(int rows) { return !MANY_REGISTERS ? 1 : rows <= 3 ? 4 : rows == 4 ? 3 : rows <= 6 ? 2 : 1; }

// Call call(std::integral_constant<int, height>) for a height known at run time.
template <class Call, int... HEIGHTS>
AIOINFER_INLINE void with_height(int height, Call&& call, std::integer_sequence<int, HEIGHTS...>) {
  (void)((height == HEIGHTS + 1 && (call(std::integral_constant<int, HEIGHTS + 1>{}), true)) || ...);
}
template <int MOST = MAX_ROWS, class Call>
AIOINFER_INLINE void with_height(int height, Call&& call) {
  with_height(height, call, std::make_integer_sequence<int, MOST>{});
}

// Panels to multiply: in memory in a format, or a single expanded one.
template <class T, Format FORMAT>
struct Panels {
  using Piece = typename Stored<T, FORMAT>::Piece;
  static constexpr int64_t STEP = PANEL * Stored<T, FORMAT>::PER_UNIT;

  const Weights<T>& weights;
  const Piece* first;  // of panel ``from``
  int64_t from;
  int64_t next;  // a panel to prefetch, or -1

  static Panels in_memory(const Weights<T>& weights, int64_t next) {
    return {weights, weights.template panel<Piece>(0), 0, next};
  }

  AIOINFER_INLINE const Piece* vector(int64_t panel, int half) const {
    return first + (panel - from) * weights.depth * STEP + half * (STEP / 2);
  }
};

template <class T, int ROWS, int COUNT, Format FORMAT, class Store>
AIOINFER_INLINE void multiply_tile(const Activations<T>& a, int64_t block, const Panels<T, FORMAT>& panels,
                                   int64_t panel, Store& store) {
  using Piece = typename Panels<T, FORMAT>::Piece;
  const Weights<T>& w = panels.weights;
  const Piece *vectors[2 * COUNT], *ahead[2 * COUNT];
  Floats sums[ROWS][2 * COUNT];
  AIOINFER_UNROLL
  for (int v = 0; v < 2 * COUNT; v++) {
    vectors[v] = panels.vector(panel + v / 2, v % 2);
    ahead[v] = panels.vector(panels.next + v / 2, v % 2);
  }
  AIOINFER_UNROLL
  for (int r = 0; r < ROWS; r++)
    AIOINFER_UNROLL
    for (int v = 0; v < 2 * COUNT; v++) sums[r][v] = Floats{};
  constexpr int64_t STEP = Panels<T, FORMAT>::STEP;
  if (panels.next >= 0)
    accumulate<T, true, FORMAT>(sums, a.block(block), vectors, STEP, w.depth, ahead);
  else
    accumulate<T, false, FORMAT>(sums, a.block(block), vectors, STEP, w.depth, vectors);
  const int64_t left = a.blocks.rows - block * ROWS;
  AIOINFER_UNROLL
  for (int r = 0; r < ROWS; r++) {
    if (r >= left) break;
    AIOINFER_UNROLL
    for (int p = 0; p < COUNT; p++)
      store(Place{block, r, block * ROWS + r}, panel + p, w.finished(sums[r][2 * p], panel + p, 0),
            w.finished(sums[r][2 * p + 1], panel + p, 1));
  }
}

// A block of rows times panels [from, to).
template <class T, Format FORMAT, class Store>
void multiply_block(const Activations<T>& a, int64_t block, const Panels<T, FORMAT>& panels, int64_t from, int64_t to,
                    Store& store) {
  with_height(a.blocks.height, [&](auto height) {
    constexpr int ROWS = decltype(height)::value, COUNT = panels_at_once(ROWS);
    int64_t panel = from;
    if constexpr (COUNT > 1)
      for (; panel + COUNT <= to; panel += COUNT) multiply_tile<T, ROWS, COUNT>(a, block, panels, panel, store);
    for (; panel < to; panel++) multiply_tile<T, ROWS, 1>(a, block, panels, panel, store);
  });
}

// Bytes of panels or of activations that stay in a core's cache beside other data.
constexpr int64_t CACHE = 512 << 10;

// Whether the activations stay in the cache while all panels are read.
template <class T>
bool stays(const Activations<T>& a) {
  return a.blocks.rows * a.depth * static_cast<int64_t>(sizeof(uint32_t)) <= CACHE;
}

// All blocks times panels [from, to): panel by panel if the activations stay in the cache, each prefetched during the
// one before; else block by block, so that the panels stay.
template <class T, class Store>
void multiply_plain(const Activations<T>& a, const Weights<T>& w, int64_t from, int64_t to, Store& store) {
  if (a.blocks.count == 1 || !stays(a)) {
    const auto panels = Panels<T, Format::PLAIN>::in_memory(w, -1);
    for (int64_t b = 0; b < a.blocks.count; b++) multiply_block(a, b, panels, from, to, store);
    return;
  }
  for (int64_t panel = from; panel < to; panel++)
    for (int64_t b = 0; b < a.blocks.count; b++) {
      const auto panels = Panels<T, Format::PLAIN>::in_memory(w, b == 0 && panel + 1 < to ? panel + 1 : -1);
      multiply_block(a, b, panels, panel, panel + 1, store);
    }
}

// The same for 8-bit weights: a single block reads them directly, for several each panel is expanded once.
template <class T, class Store>
void multiply_bytes(const Activations<T>& a, const Weights<T>& w, int64_t from, int64_t to, Store& store) {
  if (a.blocks.count == 1)
    return multiply_block(a, 0, Panels<T, Format::INT8>::in_memory(w, -1), from, to, store);
  thread_local std::vector<uint32_t> expanded;
  grow(expanded, w.depth * PANEL);
  for (int64_t panel = from; panel < to; panel++) {
    w.expand(panel, expanded.data());
    const Panels<T, Format::PLAIN> panels{w, expanded.data(), panel, -1};
    for (int64_t b = 0; b < a.blocks.count; b++) multiply_block(a, b, panels, panel, panel + 1, store);
  }
}

// All blocks times panels [from, to).
template <class T, class Store>
void multiply_panels(const Activations<T>& a, const Weights<T>& w, int64_t from, int64_t to, Store&& store) {
  if constexpr (BY_TILES<T>) {
    if (w.format == Format::PLAIN) return multiply_by_tiles(a, w, w.panel(from), from, to, store);
    thread_local Buffer<uint32_t> expanded;
    grow(expanded, w.depth * PANEL);
    for (int64_t panel = from; panel < to; panel++) {
      w.expand(panel, expanded.data());
      multiply_by_tiles(a, w, expanded.data(), panel, panel + 1, store);
    }
  } else if (w.format == Format::PLAIN) {
    multiply_plain(a, w, from, to, store);
  } else {
    multiply_bytes(a, w, from, to, store);
  }
}

// The panels of a task, of ``all`` that the workers divide.
template <class T>
int64_t panels_of_task(const Activations<T>& a, const Weights<T>& w, int64_t all, int workers) {
  if (BY_TILES<T>) return panels_by_tiles(a.blocks.rows, all, w.depth * PANEL * sizeof(uint32_t), workers);
  constexpr int64_t RUN = 256 << 10;
  const int at_once = panels_at_once(a.blocks.height);
  const int64_t wanted = std::max<int64_t>(1, (stays(a) ? RUN : CACHE) / w.panel_bytes());
  return (wanted + at_once - 1) / at_once * at_once;
}

// store(place, panel, first vector, second vector) for all rows and panels of a * w. The workers divide it by runs
// of panels.
template <class T, class Store>
void multiply(Worker& worker, const Activations<T>& a, const Weights<T>& w, Store&& store) {
  const int64_t run = panels_of_task(a, w, w.panels, worker.workers());
  // Without rows there is no task: a chunk of a prompt may want no logits.
  const int64_t tasks = a.blocks.rows ? (w.panels + run - 1) / run : 0;
  worker.parallel(tasks, [&](int64_t task) {
    multiply_panels(a, w, task * run, std::min(w.panels, (task + 1) * run), store);
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
