// Filters: top-k and top-p as the smallest scaled logit that survives; see aioinfer.sampling.filters.
//
// A threshold is the smallest *key* whose cumulative weight reaches a target, found digit by digit with one histogram
// each. Weights are integers: sums are exact in any order.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "simd.hpp"

namespace aioinfer {

// The weights of a vector's tokens, in two registers.
struct LaneWeights {
  typedef int64_t Longs __attribute__((vector_size(LANES * 4)));

  Longs low, high;
};

// A bit for every lane of a comparison that is true.
AIOINFER_INLINE uint32_t lanes_of(Ints condition) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(cast<__m512i>(condition), cast<__m512i>(condition));
#elif defined(__AVX2__)
  const Eights eights = cast<Eights>(condition);
  uint32_t bits = 0;
  for (int i = 0; i < LANES / 8; i++) bits |= static_cast<uint32_t>(_mm256_movemask_ps(eights.part[i])) << 8 * i;
  return bits;
#elif defined(__aarch64__) && !defined(AIOINFER_MODELLED_TILES)
  return vaddvq_u32(vandq_u32(cast<uint32x4_t>(condition), uint32x4_t{1, 2, 4, 8}));
#else
  uint32_t bits = 0;
  for (int lane = 0; lane < LANES; lane++) bits |= (static_cast<uint32_t>(condition[lane]) >> 31) << lane;
  return bits;
#endif
}

// Logits from ``at`` on, out of ``count``; -inf beyond them, which changes no result.
AIOINFER_INLINE Floats piece(const float* logits, int64_t at, int64_t count) {
  if (at + LANES <= count) return load<Floats>(logits + at);
  float lanes[LANES];
  for (int lane = 0; lane < LANES; lane++) lanes[lane] = at + lane < count ? logits[at + lane] : -INFINITY;
  return load<Floats>(lanes);
}

// From logits to scaled ones: relative to the maximum of their row, divided by its temperature, at most 0.
struct Scale {
  float peak, heat;

  template <class F>
  AIOINFER_INLINE F operator()(F logit) const {
    return (logit - peak) / heat;
  }

  // The lowest logit that is at least ``floor`` when it is scaled. Scaling is monotonic: comparing logits with it has
  // the same result as comparing scaled logits with ``floor``.
  float lowest(float floor) const {
    int64_t low = ordered(cast<int32_t>(std::numeric_limits<float>::lowest())), high = ordered(cast<int32_t>(peak));
    while (low < high) {
      const int64_t middle = (low + high) >> 1;
      if ((*this)(cast<float>(ordered(static_cast<int32_t>(middle)))) >= floor)
        high = middle;
      else
        low = middle + 1;
    }
    return cast<float>(ordered(static_cast<int32_t>(low)));
  }

 private:
  // From a float's bits to a number that orders as floats do, and back.
  static int32_t ordered(int32_t bits) { return bits < 0 ? bits ^ 0x7fffffff : bits; }
};

// Weights proportional to probability.
struct Masses {
  // ``unit``: the weight of the likeliest token; sums over the vocabulary stay below 2^63.
  explicit Masses(int64_t vocab) : unit(std::ldexp(1.0f, 62 - std::bit_width(static_cast<uint64_t>(vocab - 1)))) {}

  AIOINFER_INLINE LaneWeights operator()(Floats scaled) const {
    typedef float Half __attribute__((vector_size(LANES * 2)));
    float lanes[LANES];
    store(lanes, exponential(scaled) * unit);
    return {__builtin_convertvector(load<Half>(lanes), LaneWeights::Longs),
            __builtin_convertvector(load<Half>(lanes + LANES / 2), LaneWeights::Longs)};
  }

  // The weight of the logits that are not below ``floor`` when scaled.
  int64_t sum(const float* logits, int64_t count, const Scale& scale, float floor = -INFINITY) const {
    LaneWeights::Longs total{};
    for (int64_t at = 0; at < count; at += LANES) {
      const Floats scaled = scale(piece(logits, at, count));
      const LaneWeights weights = (*this)(scaled >= floor ? scaled : spread(-INFINITY));
      total += weights.low + weights.high;
    }
    int64_t whole = 0;
    for (int lane = 0; lane < LANES / 2; lane++) whole += total[lane];
    return whole;
  }

  const float unit;
};

// Every token weighs 1.
struct Ones {
  AIOINFER_INLINE LaneWeights operator()(Floats) const { return {LaneWeights::Longs{} + 1, LaneWeights::Longs{} + 1}; }
};

// The least scaled logit such that it and all above weigh at least ``target``; all logits do.
template <class Weigh>
float smallest_surviving(const float* logits, int64_t count, const Scale& scale, const Weigh& weigh, int64_t target) {
  struct Digit {
    int shift, bits;
  };
  // of keys: the bits of non-negative floats are ordered like the floats
  constexpr Digit DIGITS[] = {{20, 11}, {10, 10}, {0, 10}};
  int64_t histogram[1 << 11];
  uint32_t prefix = 0;
  for (const Digit& digit : DIGITS) {
    const uint32_t bins = 1u << digit.bits;
    std::fill_n(histogram, bins, 0);
    for (int64_t at = 0; at < count; at += LANES) {
      const Floats scaled = scale(piece(logits, at, count));
      const Words key = cast<Words>(scaled) & 0x7fffffffu;
      uint32_t inside = lanes_of((key >> (digit.shift + digit.bits)) == prefix);
      if (!inside) continue;
      const Words bin = (key >> digit.shift) & (bins - 1);
      const LaneWeights weights = weigh(scaled);
      uint32_t to[LANES];
      int64_t what[LANES];
      store(to, bin);
      store(what, weights);
      for (; inside; inside &= inside - 1) {
        const int lane = std::countr_zero(inside);
        histogram[to[lane]] += what[lane];
      }
    }
    uint32_t found = 0;
    while (found < bins - 1 && histogram[found] < target) target -= histogram[found++];
    prefix = prefix << digit.bits | found;
  }
  return -cast<float>(prefix);
}

// A subset of logits with a target for which smallest_surviving() has the same result as for all.
struct Narrowed {
  const float* logits;
  int64_t count, target;
};

// Select the logits of one small interval into ``room``, which has the size of ``most`` and a vector more: quicker for
// many logits than the digits of keys. All logits, if the interval does not narrow them down.
template <class Weigh>
Narrowed narrowed(const float* logits, int64_t count, const Scale& scale, const Weigh& weigh, int64_t target, float* room,
                  int64_t most) {
  // intervals of 1/64; a mass is 0 from 32 on, and the last interval contains everything beyond
  constexpr int BINS = 2048;
  const auto bins_of = [&](Floats scaled) {
    const Floats far = scaled * -64.0f, last = spread(BINS - 1);
    return __builtin_convertvector(far < last ? far : last, Ints);
  };
  int64_t histogram[BINS] = {};
  for (int64_t at = 0; at < count; at += LANES) {
    const Floats scaled = scale(piece(logits, at, count));
    const LaneWeights weights = weigh(scaled);
    int32_t to[LANES];
    int64_t what[LANES];
    store(to, bins_of(scaled));
    store(what, weights);
    for (int lane = 0; lane < LANES; lane++) histogram[to[lane]] += what[lane];
  }
  const Narrowed all{logits, count, target};
  int found = 0;
  while (found < BINS - 1 && histogram[found] < target) target -= histogram[found++];
  if (found == BINS - 1) return all;
  int64_t inside = 0;
  for (int64_t at = 0; at < count; at += LANES) {
    const Floats logit = piece(logits, at, count);
    uint32_t chosen = lanes_of(bins_of(scale(logit)) == found);
    for (; chosen; chosen &= chosen - 1) room[inside++] = logits[at + std::countr_zero(chosen)];
    if (inside > most) return all;
  }
  return {room, inside, target};
}

}  // namespace aioinfer
