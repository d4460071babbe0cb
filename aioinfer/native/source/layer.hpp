// Layer: a mixer and a feed-forward part, each with the norms around it; see decoder.hpp.
#pragma once

#include <variant>

#include "delta_rule.hpp"
#include "dual.hpp"
#include "experts.hpp"
#include "gates.hpp"
#include "latent_attention.hpp"
#include "mamba2.hpp"
#include "norms.hpp"
#include "per_layer.hpp"
#include "self_attention.hpp"
#include "short_conv.hpp"

namespace aioinfer {

// A state space and attention that read the same normed residual (Falcon-H1).
template <class T>
struct SideBySide {
  Mamba2<T> mamba;
  SelfAttention<T> attention;
  float mamba_scale, attention_scale;  // factors of their results

  void check(int64_t hidden) const { mamba.check(hidden), attention.check(hidden); }
};

template <class T>
struct Layer {
  Norm word_norm;  // of a token's own vector, which the mixer reads in front of the normed residual; or none
  Norm mixer_norm;
  std::variant<SelfAttention<T>, LatentAttention<T>, ShortConv<T>, DeltaRule<T>, Mamba2<T>, SideBySide<T>> mixer;
  Norm mixer_post_norm;
  Norm mlp_norm;
  // The dense part or the shared expert; null in a layer without. A dense part may have no gates. Without both it and
  // experts there is no second part.
  const Linear<T>* gate_up;
  const Linear<T>* down;
  // Null in a layer without experts.
  const Router<T>* router;
  const Experts<T>* experts;
  Gate gate;
  const float* shared_gate;  // [hidden], of the output of the shared expert as a whole; or null
  Norm mlp_post_norm;
  // With experts beside the dense part, whose norm in front is ``mlp_norm``.
  Dual dual{};
  PerLayerPart<T> per_layer{};
  float scale = 1.0f;       // of the residual, behind all parts
  float part_scale = 1.0f;  // of what each part adds to it
  bool parallel = false;    // both parts read the residual in front of the layer

  Shared<T> shared(const float* shares = nullptr) const {
    return dual.any() ? Shared<T>{} : Shared<T>{gate_up, down, shares};
  }
  bool has_mlp() const { return gate_up != nullptr || experts != nullptr; }
  // Null in a layer without.
  const SelfAttention<T>* attention() const {
    if (const auto* both = std::get_if<SideBySide<T>>(&mixer)) return &both->attention;
    return std::get_if<SelfAttention<T>>(&mixer);
  }
  const Mamba2<T>* mamba() const {
    if (const auto* both = std::get_if<SideBySide<T>>(&mixer)) return &both->mamba;
    return std::get_if<Mamba2<T>>(&mixer);
  }
  // Of the residual behind the feed-forward part.
  float mlp_scale() const { return per_layer.gate == nullptr ? scale : 1.0f; }

  // Throws InvalidArguments unless a part can do what follows it.
  void check_end() const {
    require(mlp_scale() == 1.0f || mlp_post_norm.weight != nullptr,
            "a residual is scaled behind a part without a norm");
    require(!parallel || (mixer_post_norm.weight == nullptr && mlp_post_norm.weight == nullptr),
            "parts that read the same residual have norms behind them");
    require(has_mlp() || (mlp_norm.weight == nullptr && mlp_post_norm.weight == nullptr && !parallel),
            "a layer without a second part has norms for one, or reads beside it");
    if (!dual.any()) return;
    dual.check();
    require(gate_up != nullptr && experts != nullptr, "a dense part or experts lack what is beside them");
    require(mlp_norm.weight != nullptr && mlp_post_norm.weight != nullptr, "parts side by side lack their norms");
  }
};

}  // namespace aioinfer
