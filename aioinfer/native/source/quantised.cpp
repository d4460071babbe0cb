// Products of integers, rounding and packing: compiled once.
#include "quantised_product.hpp"
#include "quantised_weights.hpp"

namespace aioinfer {

template void RoundedRows::set(int64_t, const float*) const;
template void RoundedRows::set(int64_t, const bfloat16*) const;
template void QuantisedWeights::round(ThreadPool&, const float*, const float*);
template void QuantisedWeights::round(ThreadPool&, const bfloat16*, const bfloat16*);
template void QuantisedWeights::set_bias(const float*);
template void QuantisedWeights::set_bias(const bfloat16*);
template void QuantisedWeights::read(int64_t, float*) const;
template void QuantisedWeights::read(int64_t, bfloat16*) const;

}  // namespace aioinfer
