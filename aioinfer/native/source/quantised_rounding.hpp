// Rounding to quantised numbers: activations while a step computes, weights when they are packed.
//
// Both give the same numbers on every processor: maxima do not depend on an order, and sums of errors have a fixed one.
#pragma once

#include "quantised.hpp"

namespace aioinfer {

// The largest numbers of a group that are 0 when rounded: the inverse of the factor would not be finite.
constexpr float NEGLIGIBLE = 1e-30f;
// Adding it rounds numbers below 2^22 to integers, ties to even; the low bits are the integer.
constexpr float MAGIC = 12582912.0f;
constexpr int32_t MAGIC_BITS = 0x4b400000;

// -- activations ----------------------------------------------------------------------------------------------------

typedef int32_t FourInts __attribute__((vector_size(16)));

// The lanes of a vector in four: fold(a, b) of their quarters, or halves.
template <class Fold>
AIOINFER_INLINE FourInts folded(Ints lanes, Fold&& fold) {
  int32_t all[LANES];
  store(all, lanes);
  FourInts result = load<FourInts>(all);
  for (int lane = 4; lane < LANES; lane += 4) result = fold(result, load<FourInts>(all + lane));
  return result;
}

AIOINFER_INLINE int32_t largest_of(Ints lanes) {
  const FourInts most = folded(lanes, [](FourInts a, FourInts b) { return a > b ? a : b; });
  return std::max(std::max(most[0], most[1]), std::max(most[2], most[3]));
}

AIOINFER_INLINE int32_t sum_of(Ints lanes) {
  const FourInts sums = folded(lanes, [](FourInts a, FourInts b) { return a + b; });
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// RUN integers as bytes.
template <int RUN>
AIOINFER_INLINE void store_bytes(int8_t* to, const Ints (&from)[RUN / LANES]) {
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(AIOINFER_MODELLED_TILES)
  // Both packings work within halves: dwords of the result are those of lanes 0-3 of all vectors, then 4-7.
  const __m256i low = _mm256_packs_epi32(cast<__m256i>(from[0]), cast<__m256i>(from[1]));
  const __m256i high = _mm256_packs_epi32(cast<__m256i>(from[RUN / 8 - 2]), cast<__m256i>(from[RUN / 8 - 1]));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
  std::memcpy(to, &bytes, RUN);
#elif defined(__aarch64__) && !defined(AIOINFER_MODELLED_TILES)
  AIOINFER_UNROLL
  for (int i = 0; i < RUN / LANES; i += 4) {
    const int16x8_t low = vmovn_high_s32(vmovn_s32(from[i]), from[i + 1]);
    const int16x8_t high = vmovn_high_s32(vmovn_s32(from[i + 2]), from[i + 3]);
    vst1q_s8(to + i * LANES, vmovn_high_s16(vmovn_s16(low), high));
  }
#else
  typedef int8_t Bytes __attribute__((vector_size(LANES)));
  for (int i = 0; i < RUN / LANES; i++) store(to + i * LANES, __builtin_convertvector(from[i], Bytes));
#endif
}

// Rounds the numbers [0, size) of ``from``, of a group, into ``to``, which has room for whole runs of RUN.
template <int RUN, class T>
AIOINFER_INLINE RowGroup round_group(const T* from, int64_t size, int8_t* to) {
  constexpr int VECTORS = RUN / LANES;
  const int64_t whole = size / RUN * RUN;
  T last[RUN];
  if (whole < size) {
    std::memset(last, 0, sizeof last);
    std::memcpy(last, from + whole, sizeof(T) * (size - whole));
  }
  auto run = [&](int64_t at) { return at < whole ? from + at : last; };
  // As integers, the sizes of floats have their order, with infinity and then NaN behind all others.
  Ints most[VECTORS] = {};
  for (int64_t at = 0; at < size; at += RUN) {
    const T* numbers = run(at);
    AIOINFER_UNROLL
    for (int i = 0; i < VECTORS; i++) {
      const Ints bits = cast<Ints>(Number<T>::load_lanes(numbers + i * LANES)) & 0x7fffffff;
      most[i] = bits > most[i] ? bits : most[i];
    }
  }
  for (int i = 1; i < VECTORS; i++) most[0] = most[i] > most[0] ? most[i] : most[0];
  const int32_t largest = largest_of(most[0]);
  const float limit = cast<float>(largest);
  if (largest >= 0x7f800000 || limit < NEGLIGIBLE) {
    std::memset(to, 0, size);
    return largest >= 0x7f800000 ? RowGroup{NAN, NAN, 0} : RowGroup{0.0f, 0.0f, 0};
  }
  const float inverse = 127.0f / limit, factor = limit / 127.0f;
  Ints sums{};
  for (int64_t at = 0; at < size; at += RUN) {
    const T* numbers = run(at);
    Ints rounded[VECTORS];
    AIOINFER_UNROLL
    for (int i = 0; i < VECTORS; i++) {
      rounded[i] = cast<Ints>(Number<T>::load_lanes(numbers + i * LANES) * inverse + MAGIC) - MAGIC_BITS;
      sums += rounded[i];
    }
    store_bytes<RUN>(to + at, rounded);
  }
  const int32_t sum = sum_of(sums);
  return {factor, factor * static_cast<float>(sum), sum};
}

template <class T>
void RoundedRows::set(int64_t row, const T* from) const {
  int8_t* values = values_ + row * depth_;
  RowGroup* groups = row_groups_ + row * groups_;
  constexpr int RUN = 2 * LEAST_GROUP;
  for (int64_t g = 0; g < groups_; g++) {
    const int64_t at = g * group_, size = std::min(group_, inner_ - at);
    groups[g] = group_ % RUN ? round_group<LEAST_GROUP>(from + at, size, values + at)
                             : round_group<RUN>(from + at, size, values + at);
  }
  std::memset(values + inner_, 0, depth_ - inner_);
}

// -- weights --------------------------------------------------------------------------------------------------------

// Sums of errors are taken in eight lanes on every processor.
typedef float Eight __attribute__((vector_size(32)));

// A group of weights: value i is scale * q[i] + offset.
struct RoundedGroup {
  float scale, offset;
};

// The number as it is stored.
inline float as_stored(float value, Precision precision) {
  return precision == Precision::BFLOAT16 ? Number<bfloat16>::read(Number<bfloat16>::make(value)) : value;
}

// ``from`` [size] to signed bytes without offset.
inline RoundedGroup round_to_8_bits(const float* from, int64_t size, Precision precision, uint8_t* to) {
  float most = 0;
  bool finite = true;
  for (int64_t i = 0; i < size; i++) most = std::max(most, std::abs(from[i])), finite &= std::isfinite(from[i]);
  const float scale = finite ? as_stored(most / 127.0f, precision) : NAN;
  if (!(most >= NEGLIGIBLE) || !std::isfinite(scale)) return std::fill_n(to, size, 0), RoundedGroup{finite ? 0 : NAN, 0};
  const float inverse = 1.0f / scale;
  for (int64_t i = 0; i < size; i++)
    to[i] = static_cast<uint8_t>(cast<int32_t>(std::clamp(from[i] * inverse, -127.0f, 127.0f) + MAGIC) - MAGIC_BITS);
  return {scale, 0.0f};
}

// Numbers 0 to 15 whose values are the nearest to ``from``.
AIOINFER_INLINE Eight nearest(Eight from, RoundedGroup group, float inverse) {
  const Eight exact = (from - group.offset) * inverse, least{}, most = least + 15.0f;
  const Eight inside = exact < least ? least : exact > most ? most : exact;
  return (inside + MAGIC) - MAGIC;
}

inline float squared_error(const float* from, int64_t size, RoundedGroup group, float inverse) {
  Eight total{};
  for (int64_t i = 0; i < size; i += 8) {
    const Eight value = load<Eight>(from + i);
    const Eight error = nearest(value, group, inverse) * group.scale + group.offset - value, squares = error * error;
    for (int lane = 0; lane < 8; lane++) total[lane] += i + lane < size ? squares[lane] : 0.0f;
  }
  float sum = 0;
  for (int lane = 0; lane < 8; lane++) sum += total[lane];
  return sum;
}

// The scale and offset whose numbers have the least squared error: of the range of ``from``, and of ranges that are cut
// off by a share at their lower end, and then at their upper end, which makes steps finer.
inline RoundedGroup best_range(const float* from, int64_t size, float least, float most, Precision precision) {
  constexpr float CUTS[] = {0.0f, 0.025f, 0.05f, 0.075f, 0.1f, 0.125f, 0.15f, 0.2f};
  RoundedGroup best{0.0f, as_stored(least / 2 + most / 2, precision)};
  float best_error = INFINITY, lower_cut = 0.0f;
  for (const bool upper : {false, true}) {
    const float found = lower_cut;
    for (const float cut : CUTS) {
      const float low = upper ? found : cut, share = 1.0f - low - (upper ? cut : 0.0f);
      const float scale = as_stored((most / 15 - least / 15) * share, precision);
      if (!(scale >= NEGLIGIBLE)) return best;
      const RoundedGroup group{scale, as_stored(least + (most - least) * low, precision)};
      const float error = squared_error(from, size, group, 1.0f / scale);
      if (best.scale > 0.0f && !(error < best_error)) continue;
      best = group, best_error = error;
      if (!upper) lower_cut = cut;
    }
  }
  return best;
}

// ``from`` [size] to numbers 0 to 15; both are followed by room for whole vectors.
inline RoundedGroup round_to_4_bits(const float* from, int64_t size, Precision precision, uint8_t* to) {
  float least = from[0], most = from[0];
  bool finite = true;
  for (int64_t i = 0; i < size; i++)
    least = std::min(least, from[i]), most = std::max(most, from[i]), finite &= std::isfinite(from[i]);
  if (!finite || !std::isfinite(most - least)) return std::fill_n(to, size, 0), RoundedGroup{NAN, NAN};
  const RoundedGroup best = best_range(from, size, least, most, precision);
  if (!std::isfinite(best.offset)) return std::fill_n(to, size, 0), RoundedGroup{NAN, NAN};
  const float inverse = best.scale > 0 ? 1.0f / best.scale : 0.0f;
  for (int64_t i = 0; i < size; i += 8) {
    const Eight numbers = nearest(load<Eight>(from + i), best, inverse);
    for (int lane = 0; lane < 8; lane++) to[i + lane] = static_cast<uint8_t>(numbers[lane]);
  }
  return best;
}

}  // namespace aioinfer
