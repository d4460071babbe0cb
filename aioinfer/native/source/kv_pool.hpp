// KVPool: keys and values of one layer by page, in the layout that the products of attention need.
//
// A *tile* is 16 positions of one head, keys and then values. Its keys are [unit of the head's dimensions][position],
// so that one vector holds a dimension of all positions; its values are [unit of positions][dimension]. A page holds
// all tiles of a head, then those of the next head. Pages whose size is no multiple of a tile are stored cell
// by cell, [cell][head][key and value][dimension], and converted to tiles when they are read: slower, same bits.
//
// Values that are not finite are stored as 0, under a key of NaN: the scores, hence the results, of queries that see
// the position are NaN. Products have a weight of 0 for those that do not, and 0 times infinity or NaN is NaN.
//
// Where values are the first elements of the keys (latents), keys alone are stored, and their values are made of them
// when they are read, tile by tile.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "latents.hpp"

namespace aioinfer {

// Of a number of elements that is a multiple of SUM_LANES.
template <class T>
AIOINFER_INLINE bool finite(const T* elements, int64_t count) {
  return sum_over(count, [&](int64_t i, Floats sums) __attribute__((always_inline)) {
           return sums + Number<T>::load_lanes(elements + i) * 0.0f;
         }) == 0.0f;
}

template <class T>
struct KVPool {
  static constexpr int PER_UNIT = Number<T>::PER_UNIT;

  T* data;
  int64_t page_size, heads, head_dim;
  int64_t latent = 0;  // values are so many first elements of the keys, and not stored; 0: they are

  bool tiled() const { return page_size % TILE == 0; }
  int64_t value_dim() const { return latent == 0 ? head_dim : latent; }
  // What is stored of a position, in keys.
  int64_t stored() const { return latent == 0 ? 2 : 1; }

  // Elements of the keys of a tile; the values follow.
  int64_t half() const { return TILE * head_dim; }

  // A tile; for page sizes that are a multiple of a tile.
  AIOINFER_INLINE T* tile(int64_t page, int64_t head, int64_t index) const {
    return data + ((page * heads + head) * (page_size / TILE) + index) * stored() * half();
  }

  // Key and value of one head at a KV cell; for other page sizes.
  T* cell(int64_t index, int64_t head) const { return data + (index * heads + head) * stored() * head_dim; }

  // Store the key and the value [head_dim] of one head at a KV cell; of a latent ``value`` is ``key``.
  void write(int64_t index, int64_t head, const T* key, const T* value) const {
    finite(value, head_dim) ? put(index, head, key, value) : write_unknown(index, head);
  }

  void put(int64_t index, int64_t head, const T* key, const T* value) const {
    if (tiled()) {
      const int64_t offset = index % page_size;
      write_to_tile(tile(index / page_size, head, offset / TILE), static_cast<int>(offset % TILE), key, value);
    } else {
      std::memcpy(cell(index, head), key, sizeof(T) * head_dim);
      if (latent == 0) std::memcpy(cell(index, head) + head_dim, value, sizeof(T) * head_dim);
    }
  }

  // Not inlined: it is rare.
  __attribute__((noinline)) void write_unknown(int64_t index, int64_t head) const {
    const std::vector<T> key(head_dim, Number<T>::make(NAN)), value(head_dim);
    put(index, head, key.data(), value.data());
  }

  // Write one of the numbers of each of head_dim units; the others may be written at the same time.
  void put_in_units(T* units, int which, const T* values) const {
    int64_t d = 0;
#if defined(__AVX512BW__)
    if constexpr (PER_UNIT == 2) {
      const __mmask32 mask = which ? 0xaaaaaaaau : 0x55555555u;
      for (; d < head_dim; d += LANES) {
        typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
        const Words wide = __builtin_convertvector(load<Halves>(values + d), Words);
        _mm512_mask_storeu_epi16(units + d * PER_UNIT, mask, cast<__m512i>(which ? wide << 16 : wide));
      }
    }
#endif
    for (; d < head_dim; d++) units[d * PER_UNIT + which] = values[d];
  }

  void write_to_tile(T* tile, int at, const T* key, const T* value) const {
    for (int64_t d = 0; d < head_dim; d += PER_UNIT)
      std::memcpy(tile + (d / PER_UNIT * TILE + at) * PER_UNIT, key + d, sizeof(uint32_t));
    if (latent == 0) put_in_units(tile + half() + at / PER_UNIT * head_dim * PER_UNIT, at % PER_UNIT, value);
  }
};

// Keys and values of one sequence, for one head.
template <class T>
class Context {
 public:
  // ``pages`` is the sequence's page table, ``length`` the number of its positions.
  Context(const KVPool<T>& kv, const int64_t* pages, int64_t length, int64_t head)
      : kv_(kv), pages_(pages), length_(length), head_(head), tiles_per_page_(kv.page_size / TILE) {}

  // A tile, keys and then values: in place, or assembled in ``scratch``, which has the size of one.
  AIOINFER_INLINE const uint32_t* tile(int64_t index, T* scratch) const {
    if (!kv_.tiled()) return assembled(index, scratch);
    const int64_t page = index / tiles_per_page_;
    return reinterpret_cast<const uint32_t*>(kv_.tile(pages_[page], head_, index - page * tiles_per_page_));
  }

  // The values of a tile: behind its keys, or made of them in ``scratch``, while the same part of ``next`` is prefetched.
  AIOINFER_INLINE const uint32_t* values(const uint32_t* tile, const uint32_t* next, void* scratch) const {
    if (kv_.latent == 0) return tile + kv_.half() / KVPool<T>::PER_UNIT;
    uint32_t* made = static_cast<uint32_t*>(scratch);
    values_of_latents<T>(tile, next, kv_.head_dim, kv_.latent, made);
    return made;
  }

  int64_t value_dim() const { return kv_.value_dim(); }
  bool latent() const { return kv_.latent != 0; }

  // Tiles exist in memory and can be prefetched.
  bool lies() const { return kv_.tiled(); }

 private:
  const uint32_t* assembled(int64_t index, T* scratch) const {
    for (int i = 0; i < TILE; i++) {
      const int64_t position = std::min(index * TILE + i, length_ - 1);
      const int64_t cell = pages_[position / kv_.page_size] * kv_.page_size + position % kv_.page_size;
      const T* key = kv_.cell(cell, head_);
      kv_.write_to_tile(scratch, i, key, key + kv_.head_dim);
    }
    return reinterpret_cast<const uint32_t*>(scratch);
  }

  const KVPool<T>& kv_;
  const int64_t* pages_;
  const int64_t length_, head_, tiles_per_page_;
};

}  // namespace aioinfer
