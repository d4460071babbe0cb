// Dual: a dense part and experts side by side, with norms of their own (Gemma 4); see aioinfer.model.moe.dual.
//
//              ┌ mlp_norm ─► gate, up ─► down ─► dense_post ─┐
//   residual ─►│                                             + ─► mlp_post_norm ─► + residual
//              └ experts ──► chosen experts ─► experts_post ─┘
//                router ───► choose
#pragma once

#include "norms.hpp"

namespace aioinfer {

struct Dual {
  Norm router;  // of what the router reads; null: the layer has no such parts
  Norm experts;
  Norm dense_post, experts_post;

  bool any() const { return router.weight != nullptr; }

  void check() const {
    require(experts.weight != nullptr && dense_post.weight != nullptr && experts_post.weight != nullptr,
            "parts side by side lack their norms");
  }

  // The outputs of one token, normed and added up in place of the dense part's.
  template <class T>
  void add(T* dense, const T* mixed, int64_t size, float eps) const {
    normed(dense_post, dense, size, eps, [&](int64_t i, Floats value) { Number<T>::store_lanes(dense + i, value); });
    normed(experts_post, mixed, size, eps, [&](int64_t i, Floats value) {
      Number<T>::store_lanes(dense + i, Number<T>::load_lanes(dense + i) + rounded<T>(value));
    });
  }
};

}  // namespace aioinfer
