// Linear layers in integers, and their entry points: compiled once, with operations that are not contracted.
#include "quantised.hpp"

#include "interface.hpp"
#include "quantised_product.hpp"
#include "quantised_weights.hpp"

namespace aioinfer {

template void RoundedRows::set(int64_t, const float*);
template void RoundedRows::set(int64_t, const bfloat16*);

namespace {

template <class T>
QuantisedWeights* round_weights(const RoundWeightsArguments<T>& a) {
  const QuantisedShape shape(a.outputs, a.inner, a.group, a.bits, a.gated);
  return QuantisedWeights::rounded(*a.pool, shape, a.rows, a.bias);
}

// Write the results of a row for a panel.
template <class T>
void put_row(T* to, const QuantisedWeights& w, int64_t panel, const float* sums) {
  const int64_t left = std::min<int64_t>(w.panel_outputs(), w.shape.outputs - panel * w.panel_outputs());
  T values[QUANTISED_PANEL];
  for (int i = 0; i < w.panel_outputs(); i += LANES) {
    const Floats one = load<Floats>(sums + i);
    Number<T>::store_lanes(values + i, w.shape.gated ? silu(one) * load<Floats>(sums + STRIP + i) : one);
  }
  std::memcpy(to + panel * w.panel_outputs(), values, sizeof(T) * left);
}

template <class T>
bool apply(const QuantisedLinearArguments<T>& a) {
  const QuantisedWeights& w = *a.weights;
  require(a.count >= 0, "count is negative");
  require(a.inner == w.shape.inner, "the inner dimension is not that of the weights");
  RoundedRows rows;
  rows.reserve(a.count, w.shape);
  auto take = [&, out = a.out](int64_t first, int64_t count, int64_t panel, const float* sums) {
    for (int64_t row = 0; row < count; row++)
      put_row(out + (first + row) * w.shape.outputs, w, panel, sums + row * QUANTISED_PANEL);
  };
  a.pool->run([&](Worker& worker) {
    rows.set(worker, a.values, a.inner);
    multiply(worker, rows, w, take);
  });
  return true;
}

}  // namespace
}  // namespace aioinfer

using namespace aioinfer;

extern "C" {

void* aioinfer_round_weights_float32(const RoundWeightsArguments<float>* a) {
  return guarded<void*>(nullptr, [&] { return round_weights(*a); });
}

void* aioinfer_round_weights_bfloat16(const RoundWeightsArguments<bfloat16>* a) {
  return guarded<void*>(nullptr, [&] { return round_weights(*a); });
}

void* aioinfer_quantised_weights(const QuantisedWeightsArguments* a) {
  return guarded<void*>(nullptr, [&] {
    const QuantisedShape shape(a->outputs, a->inner, a->group, a->bits, a->gated);
    return QuantisedWeights::given(*a->pool, shape, a->values, a->scales, a->offsets, a->bias);
  });
}

void aioinfer_free_quantised_weights(void* weights) { delete static_cast<QuantisedWeights*>(weights); }

bool aioinfer_dequantise(const DequantiseArguments* a) {
  return guarded(false, [&] { return a->weights->dequantise(*a->pool, a->out), true; });
}

bool aioinfer_quantised_linear_float32(const QuantisedLinearArguments<float>* a) {
  return guarded(false, [&] { return apply(*a); });
}

bool aioinfer_quantised_linear_bfloat16(const QuantisedLinearArguments<bfloat16>* a) {
  return guarded(false, [&] { return apply(*a); });
}
}
