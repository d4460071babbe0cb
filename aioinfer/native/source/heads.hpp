// Heads: norm and rotate the queries and keys of a layer's projection, and store keys and values in their cells.
#pragma once

#include <cmath>

#include "checks.hpp"
#include "kv_pool.hpp"

namespace aioinfer {

// Sum of squares of ``size`` numbers, a multiple of SUM_LANES; so below.
template <class T>
AIOINFER_INLINE float sum_of_squares(const T* from, int64_t size) {
  return sum_over(size, [&](int64_t i, Floats sums) __attribute__((always_inline)) {
    const Floats value = Number<T>::load_lanes(from + i);
    return multiply_add(sums, value, value);
  });
}

template <class T>
AIOINFER_INLINE float inverse_rms(const T* from, int64_t size, float eps) {
  return 1.0f / std::sqrt(sum_of_squares(from, size) / static_cast<float>(size) + eps);
}

template <class T>
void norm_in_place(T* row, int64_t size, const float* weight, float eps) {
  const float factor = inverse_rms(row, size, eps);
  for (int64_t i = 0; i < size; i += LANES)
    Number<T>::store_lanes(row + i, Number<T>::load_lanes(row + i) * factor * load<Floats>(weight + i));
}

template <class T>
AIOINFER_INLINE float mean_of(const T* from, int64_t size) {
  const auto add = [&](int64_t i, Floats sums) __attribute__((always_inline)) { return sums + Number<T>::load_lanes(from + i); };
  return sum_over(size, add) / static_cast<float>(size);
}

template <class T>
AIOINFER_INLINE float inverse_deviation(const T* from, int64_t size, float mean, float eps) {
  const auto add = [&](int64_t i, Floats sums) __attribute__((always_inline)) {
    const Floats value = Number<T>::load_lanes(from + i) - mean;
    return multiply_add(sums, value, value);
  };
  return 1.0f / std::sqrt(sum_over(size, add) / static_cast<float>(size) + eps);
}

// Rotary embedding of the first ``size`` dimensions of a head; dimension d is paired with d + size / 2.
template <class T>
struct Rotary {
  const T* cos;  // [positions, size]
  const T* sin;  // [positions, size], the first half negated
  int64_t size;
};

template <class T>
struct HeadShape {
  int64_t heads, kv_heads, head_dim;
  const float* norm;  // of each head by itself, [heads + kv_heads, head_dim], or null; of shared keys without them
  float eps;
  bool value_norm = false;  // values are normed as well: [heads + 2 * kv_heads, head_dim]
  bool shared = false;      // keys and values are another layer's, which has stored them: there are queries only
  bool norm_last = false;   // heads are rotated first, by factors that keep their length

  int64_t group() const { return heads / kv_heads; }
  int64_t width() const { return (heads + (shared ? 0 : 2 * kv_heads)) * head_dim; }
  bool same_heads(const HeadShape& other) const {
    return heads == other.heads && kv_heads == other.kv_heads && head_dim == other.head_dim;
  }

  // Refuse heads that kernels cannot compute.
  void check(int64_t rotary_dim) const {
    require(heads > 0 && kv_heads > 0 && heads % kv_heads == 0, "heads is no multiple of kv_heads");
    require(head_dim > 0 && head_dim % SUM_LANES == 0, "head_dim is no multiple of a vector");
    require(rotary_dim >= 0 && rotary_dim <= head_dim && rotary_dim % 2 == 0, "rotary_dim is not within a head");
    require(!value_norm || (norm != nullptr && !shared), "a norm of values without weights, or without values");
  }
};

// Queries, keys and values of all tokens, with the heads of a token side by side, and the strides of tokens.
template <class T>
struct Projected {
  T *queries, *keys, *values;
  int64_t query_stride, kv_stride;

  // Of one matrix whose rows, ``stride`` apart, begin with [heads + 2 * kv_heads, head_dim]; of shared keys and values,
  // without them.
  static Projected of(T* all, const HeadShape<T>& shape, int64_t stride) {
    T* keys = all + shape.heads * shape.head_dim;
    return {all, keys, keys + shape.kv_heads * shape.head_dim, stride, stride};
  }
};

// Norm and rotate a head in place. ``at``: row of the rotary table.
template <class T>
void prepare_head(T* head, const HeadShape<T>& shape, const float* norm, const Rotary<T>& rotary, int64_t at,
                  float* scratch) {
  const int64_t size = shape.head_dim;
  const float factor = norm == nullptr ? 1.0f : inverse_rms(head, size, shape.eps);
  const bool first = norm != nullptr && !shape.norm_last;
  for (int64_t d = 0; d < size; d += LANES) {
    Floats value = Number<T>::load_lanes(head + d) * factor;
    if (first) value *= load<Floats>(norm + d);
    store(scratch + d, value);
  }
  const T *cos = rotary.cos + at * rotary.size, *sin = rotary.sin + at * rotary.size;
  const int64_t half = rotary.size / 2;
  if (half % LANES) {
    for (int64_t d = 0; d < rotary.size; d++) {
      const float other = scratch[d < half ? d + half : d - half];
      head[d] = Number<T>::make(scratch[d] * Number<T>::read(cos[d]) + other * Number<T>::read(sin[d]));
    }
  } else {
    for (int64_t d = 0; d < rotary.size; d += LANES) {
      const Floats value = load<Floats>(scratch + d), other = load<Floats>(scratch + (d < half ? d + half : d - half));
      Number<T>::store_lanes(head + d, value * Number<T>::load_lanes(cos + d) + other * Number<T>::load_lanes(sin + d));
    }
  }
  for (int64_t d = rotary.size; d < size; d++) head[d] = Number<T>::make(scratch[d]);
  if (norm == nullptr || first) return;
  for (int64_t d = 0; d < size; d += LANES)
    Number<T>::store_lanes(head + d, Number<T>::load_lanes(head + d) * load<Floats>(norm + d));
}

// One token's heads that share a KV head: prepare the queries in place, store key and value unless these are shared.
// Heads that are prepared already have no norm and a rotary of size 0.
template <class T>
void prepare_token(const Projected<T>& projected, const HeadShape<T>& shape, const Rotary<T>& rotary, int64_t token,
                   int64_t at, int64_t kv_head, int64_t cell, const KVPool<T>& kv, float* scratch) {
  const int64_t size = shape.head_dim, group = shape.group();
  T* queries = projected.queries + token * projected.query_stride + kv_head * group * size;
  const auto norm = [&](int64_t head) { return shape.norm == nullptr ? nullptr : shape.norm + head * size; };
  const bool prepare = shape.norm != nullptr || rotary.size != 0;
  for (int64_t i = 0; prepare && i < group; i++)
    prepare_head(queries + i * size, shape, norm(kv_head * group + i), rotary, at, scratch);
  if (shape.shared) return;
  T* key = projected.keys + token * projected.kv_stride + kv_head * size;
  T* value = projected.values + token * projected.kv_stride + kv_head * size;
  if (prepare) prepare_head(key, shape, norm(shape.heads + kv_head), rotary, at, scratch);
  if (shape.value_norm)
    norm_in_place(value, size, norm(shape.heads + shape.kv_heads + kv_head), shape.eps);
  kv.write(cell, kv_head, key, value);
}

}  // namespace aioinfer
