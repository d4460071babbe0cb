// Activations: the rows that products read, in blocks of rows, in the order in which a product reads them.
//
//   for products of vectors                  for products of tiles: blocks of 16 rows
//   ┌ block 0 ──────────┐                    ┌ block 0 ─────────────────────┐
//   │ unit 0: r0 r1 r2  │                    │ units 0-15: r0               │   a unit is 4 bytes: one float or
//   │ unit 1: r0 r1 r2  │                    │ units 0-15: r1               │   two bfloat16 that are neighbours
//   │ ...               │                    │ ...                          │   along the inner dimension
//   ├ block 1 ──────────┤                    │ units 16-31: r0              │
//   │ ...               │                    │ ...                          │
//
// What a product with tiles reads behind the last row may be anything: a row's sums depend on no other row. Behind the
// last number of a row there are zeros up to the end of a tile.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <new>
#include <type_traits>
#include <vector>

#include "simd.hpp"
#include "tiles.hpp"

namespace aioinfer {

// Whether products of numbers of type T are computed by tiles.
template <class T>
constexpr bool BY_TILES = tiles::ENABLED && std::is_same_v<T, bfloat16>;

// The most rows of a block for products of vectors: with two accumulators each they fill the registers, beside which
// BFMMLA needs a few for what it zips.
constexpr int MAX_ROWS = !MANY_REGISTERS ? 6 : LANES == 4 ? 12 : 14;

// Allocates whole lines of the cache: a row of a tile that lies in two of them takes twice as long to read.
template <class V>
struct Aligned {
  using value_type = V;
  static constexpr std::align_val_t LINE{64};

  Aligned() = default;
  template <class Other>
  Aligned(const Aligned<Other>&) {}
  V* allocate(size_t count) { return static_cast<V*>(::operator new(count * sizeof(V), LINE)); }
  void deallocate(V* data, size_t) { ::operator delete(data, LINE); }
  bool operator==(const Aligned&) const { return true; }
};

template <class V>
using Buffer = std::vector<V, Aligned<V>>;

// Make room for at least ``size`` elements; the contents may be lost.
template <class V, class Allocator>
void grow(std::vector<V, Allocator>& buffer, int64_t size) {
  if (static_cast<int64_t>(buffer.size()) < size) buffer.resize(size);
}

// The division of ``rows`` rows into blocks.
struct Blocks {
  // Blocks of equal height, at most MAX_ROWS.
  static Blocks equal(int64_t rows) {
    const int64_t count = (rows + MAX_ROWS - 1) / MAX_ROWS;
    return {rows, count, count ? static_cast<int>((rows + count - 1) / count) : 1};
  }

  // Blocks of ``height`` rows, the last of which may have fewer.
  static Blocks of_height(int64_t rows, int height) { return {rows, (rows + height - 1) / height, height}; }

  // The blocks of activations.
  template <class T>
  static Blocks of(int64_t rows) {
    return BY_TILES<T> ? of_height(rows, tiles::SIDE) : equal(rows);
  }

  int64_t padded() const { return count * height; }

  int64_t rows, count;
  int height;
};

// Units of ``inner`` numbers; for tiles, up to the end of the last one.
template <class T>
constexpr int64_t units_of(int64_t inner) {
  const int64_t units = (inner + Number<T>::PER_UNIT - 1) / Number<T>::PER_UNIT;
  return BY_TILES<T> ? (units + tiles::SIDE - 1) / tiles::SIDE * tiles::SIDE : units;
}

// A row: its block, its index in the block, and its index among all rows.
struct Place {
  int64_t block;
  int in_block;
  int64_t row;
};

// Activations [rows, inner] in blocks; does not own its memory.
template <class T>
struct Activations {
  // Units from one row of a block to the next, and from those of a row that lie side by side to the next of them.
  static constexpr int ROW_STEP = BY_TILES<T> ? tiles::SIDE : 1;

  Activations(uint32_t* data, int64_t rows, int64_t inner)
      : data(data), blocks(Blocks::of<T>(rows)), inner(inner), depth(units_of<T>(inner)) {}

  static int64_t units(int64_t rows, int64_t inner) { return Blocks::of<T>(rows).padded() * units_of<T>(inner); }

  const uint32_t* block(int64_t index) const { return data + index * blocks.height * depth; }

  // Where a row begins.
  AIOINFER_INLINE uint32_t* row(int64_t index) const {
    return data + index / blocks.height * blocks.height * depth + index % blocks.height * ROW_STEP;
  }

  // The same for a place in activations of as many rows.
  AIOINFER_INLINE uint32_t* row(const Place& place) const {
    return data + place.block * blocks.height * depth + place.in_block * ROW_STEP;
  }

  // LANES values of the row that begins at ``row``, from inner index ``at`` on, which is a multiple of LANES.
  AIOINFER_INLINE void put(uint32_t* row, int64_t at, Floats values) const {
    constexpr int COUNT = LANES / Number<T>::PER_UNIT;
    T numbers[LANES];
    Number<T>::store_lanes(numbers, values);
    uint32_t units[COUNT];
    std::memcpy(units, numbers, sizeof units);
    uint32_t* to = row + offset(at / Number<T>::PER_UNIT);
    if constexpr (BY_TILES<T>) {
      std::memcpy(to, units, sizeof units);
      if (at + LANES == inner && inner % (2 * LANES)) std::memset(to + COUNT, 0, sizeof units);
    } else {
      const int height = blocks.height;
      AIOINFER_UNROLL
      for (int i = 0; i < COUNT; i++) to[i * height] = units[i];
    }
  }

  // The numbers of the row that begins at ``row``, side by side.
  void copy_numbers(const uint32_t* row, T* to) const {
    constexpr int64_t PER_UNIT = Number<T>::PER_UNIT;
    const int64_t units = inner / PER_UNIT;
    for (int64_t k = 0; k < units; k += ROW_STEP)
      std::memcpy(to + k * PER_UNIT, row + offset(k), std::min<int64_t>(ROW_STEP, units - k) * sizeof(uint32_t));
  }

  // Copy the row that begins at ``from`` in other activations of the same inner size to the one that begins at ``to``.
  void copy(uint32_t* to, const Activations& other, const uint32_t* from) const {
    for (int64_t k = 0; k < depth; k += ROW_STEP)
      std::memcpy(to + offset(k), from + other.offset(k), ROW_STEP * sizeof(uint32_t));
  }

  uint32_t* data;
  Blocks blocks;
  int64_t inner, depth;

 private:
  // From the beginning of a row to one of its units.
  AIOINFER_INLINE int64_t offset(int64_t unit) const {
    if constexpr (BY_TILES<T>)
      return unit / tiles::SIDE * tiles::SIDE * tiles::SIDE + unit % tiles::SIDE;
    else
      return unit * blocks.height;
  }
};

}  // namespace aioinfer
