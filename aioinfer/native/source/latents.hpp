// Latents: keys whose first elements are the values (multi-head latent attention, arXiv 2405.04434), stored once.
//
//   a tile of the pool: [unit of dimensions][16 positions]    its values: [unit of positions][dimension]
//
// Of float, one is the transpose of the other. Of bfloat16, a unit has two dimensions here and two positions there: first
// two units of neighbouring positions exchange two of their numbers, then pairs of units are transposed.
#pragma once

#include <utility>

#include "simd.hpp"

namespace aioinfer {

constexpr int TILE = 16;

namespace latents {

// Elements of two vectors by constant indices, those of the second one behind those of the first.
template <class V, int... INDICES>
AIOINFER_INLINE V chosen(V a, V b, std::integer_sequence<int, INDICES...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, INDICES...);
#else
  constexpr int BYTES = sizeof(V) / sizeof...(INDICES);
  using Index = std::conditional_t<BYTES == 8, int64_t, std::conditional_t<BYTES == 4, int32_t, int16_t>>;
  typedef Index Indices __attribute__((vector_size(sizeof(V))));
  return __builtin_shuffle(a, b, Indices{INDICES...});
#endif
}

// The first halves of two vectors, element by element in turn, or the second ones.
template <int HALF, class V, int... I>
AIOINFER_INLINE V zipped(V a, V b, std::integer_sequence<int, I...>) {
  constexpr int COUNT = sizeof...(I);
  return chosen(a, b, std::integer_sequence<int, (I / 2 + I % 2 * COUNT + HALF * COUNT / 2)...>{});
}

// COUNT vectors of COUNT elements.
template <int COUNT, class V>
AIOINFER_INLINE void transpose(V (&rows)[COUNT]) {
  constexpr auto ALL = std::make_integer_sequence<int, COUNT>{};
  AIOINFER_UNROLL
  for (int stage = 1; stage < COUNT; stage *= 2) {
    V next[COUNT];
    AIOINFER_UNROLL
    for (int i = 0; i < COUNT / 2; i++) {
      next[2 * i] = zipped<0>(rows[i], rows[i + COUNT / 2], ALL);
      next[2 * i + 1] = zipped<1>(rows[i], rows[i + COUNT / 2], ALL);
    }
    AIOINFER_UNROLL
    for (int i = 0; i < COUNT; i++) rows[i] = next[i];
  }
}

// Of two units of two numbers each, side by side, the first numbers and then the second ones.
template <int... I>
AIOINFER_INLINE Ints exchanged(Ints units, std::integer_sequence<int, I...>) {
  typedef int16_t Numbers __attribute__((vector_size(LANES * 4)));
  const Numbers numbers = cast<Numbers>(units);
  constexpr int ORDER[] = {0, 2, 1, 3};
  return cast<Ints>(chosen(numbers, numbers, std::integer_sequence<int, (I / 4 * 4 + ORDER[I % 4])...>{}));
}

}  // namespace latents

// The values [units of positions, size] of the latents of a tile; 0 of those that are not known, whose keys are NaN.
// ``next``: a tile, which is prefetched, of keys of ``width`` elements. ``size`` is a multiple of 2 * SUM_LANES.
template <class T>
void values_of_latents(const uint32_t* keys, const uint32_t* next, int64_t width, int64_t size, uint32_t* values) {
  constexpr int PER_UNIT = Number<T>::PER_UNIT;
  // Elements of a vector that is transposed: units, or pairs of them.
  constexpr int COUNT = LANES / PER_UNIT;
  typedef int64_t Pairs __attribute__((vector_size(LANES * 4)));
  using Row = std::conditional_t<PER_UNIT == 1, Ints, Pairs>;
  Ints known[TILE / LANES];
  for (int g = 0; g < TILE / LANES; g++) {
    // Of a unit of bfloat16 the number in its low half.
    const Floats first = cast<Floats>(load<Ints>(keys + g * LANES) << (PER_UNIT == 1 ? 0 : 16));
    known[g] = first == first;
  }
  for (int64_t unit = size / PER_UNIT; unit < width / PER_UNIT; unit++)
    for (int g = 0; g < TILE / LANES; g++) __builtin_prefetch(next + unit * TILE + g * LANES, 0, 2);
  for (int64_t unit = 0; unit < size / PER_UNIT; unit += COUNT)
    for (int g = 0; g < TILE / LANES; g++) {
      Row rows[COUNT];
      AIOINFER_UNROLL
      for (int i = 0; i < COUNT; i++) {
        const int64_t at = (unit + i) * TILE + g * LANES;
        Ints units = load<Ints>(keys + at) & known[g];
        __builtin_prefetch(next + at, 0, 2);
        if constexpr (PER_UNIT == 2) units = latents::exchanged(units, std::make_integer_sequence<int, 2 * LANES>{});
        rows[i] = cast<Row>(units);
      }
      latents::transpose(rows);
      AIOINFER_UNROLL
      for (int i = 0; i < COUNT; i++) store(values + (g * COUNT + i) * size + unit * PER_UNIT, rows[i]);
    }
}

}  // namespace aioinfer
