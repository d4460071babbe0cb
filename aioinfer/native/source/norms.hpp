// Norms of vectors of the residual's size, and of others.
#pragma once

#include "heads.hpp"

namespace aioinfer {

// None if ``weight`` is null.
struct Norm {
  const float* weight;  // [size]
  const float* bias;    // [size] of a layer norm (Ba et al., arXiv 1607.06450); null: a root mean square norm
};

// put(index, LANES values): a vector of ``size`` numbers, normed. Elements are not read again once they are put.
template <class T, class Put>
AIOINFER_INLINE void normed(const Norm& norm, const T* from, int64_t size, float eps, Put&& put) {
  if (norm.weight == nullptr) {
    for (int64_t i = 0; i < size; i += LANES) put(i, Number<T>::load_lanes(from + i));
  } else if (norm.bias == nullptr) {
    const float factor = inverse_rms(from, size, eps);
    for (int64_t i = 0; i < size; i += LANES)
      put(i, Number<T>::load_lanes(from + i) * factor * load<Floats>(norm.weight + i));
  } else {
    const float mean = mean_of(from, size), factor = inverse_deviation(from, size, mean, eps);
    for (int64_t i = 0; i < size; i += LANES) {
      const Floats value = (Number<T>::load_lanes(from + i) - mean) * factor;
      put(i, value * load<Floats>(norm.weight + i) + load<Floats>(norm.bias + i));
    }
  }
}

}  // namespace aioinfer
