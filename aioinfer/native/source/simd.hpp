// Vectors of floats, the two types of a model, and the product that all kernels are built on.
//
// Written with the compilers' vector types, so that one source serves AVX-512, AVX2, NEON and others; intrinsics are used
// only for instructions that compilers do not generate by themselves.
//
// Results have the same bits on all of them: compilers contract nothing (-ffp-contract=off), what is fused is written as
// multiply_add(), and sums over lanes are taken in SUM_LANES whatever a vector has. Two things may differ: processors
// without fused products round twice, and products of packed bfloat16 by tiles or by ARM's BFDOT have an order of their
// own; see aioinfer_arithmetic() in common.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "tiles.hpp"

#define AIOINFER_INLINE inline __attribute__((always_inline))
// Loops over registers must be unrolled, or the compiler keeps them in memory.
#define AIOINFER_UNROLL _Pragma("GCC unroll 16")

// With modelled tiles vectors are wider than these instructions', which then would only be in the way.
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && !defined(AIOINFER_MODELLED_TILES)
#define AIOINFER_ARM_BFLOAT16
#endif

namespace aioinfer {

// Tiles have 16 columns: with a model of them compilers make vectors of 16 lanes from those that the processor has.
#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr bool MANY_REGISTERS = true;
#elif defined(__aarch64__)
constexpr int LANES = tiles::ENABLED ? tiles::SIDE : 4;
constexpr bool MANY_REGISTERS = true;
#else
constexpr int LANES = tiles::ENABLED ? tiles::SIDE : 8;
constexpr bool MANY_REGISTERS = false;
#endif

// Lanes of a sum over lanes, and the vectors that have them. Sizes that are summed over are multiples of it: so are those
// that kernels accept, on every processor.
constexpr int SUM_LANES = 16, SUM_VECTORS = SUM_LANES / LANES;

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef float Four __attribute__((vector_size(16)));

// Floats as vectors of the processor.
#if defined(__AVX2__) || defined(__FMA__)
struct Eights {
  __m256 part[LANES / 8];
};
#elif defined(__aarch64__)
struct Fours {
  float32x4_t part[LANES / 4];
};
#endif

struct bfloat16 {
  uint16_t bits;
};

template <class To, class From>
AIOINFER_INLINE To cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <class V, class P>
AIOINFER_INLINE V load(const P* from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class V, class P>
AIOINFER_INLINE void store(P* to, const V& value) {
  std::memcpy(to, &value, sizeof value);
}

AIOINFER_INLINE Floats spread(float value) { return Floats{} + value; }

AIOINFER_INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// sum + a * b, in one rounding where the processor has such an instruction: wherever it is written, the same bits.
AIOINFER_INLINE Floats multiply_add(Floats sum, Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, sum);
#elif defined(__FMA__)
  const Eights x = cast<Eights>(a), y = cast<Eights>(b);
  Eights z = cast<Eights>(sum);
  AIOINFER_UNROLL
  for (int i = 0; i < LANES / 8; i++) z.part[i] = _mm256_fmadd_ps(x.part[i], y.part[i], z.part[i]);
  return cast<Floats>(z);
#elif defined(__aarch64__)
  const Fours x = cast<Fours>(a), y = cast<Fours>(b);
  Fours z = cast<Fours>(sum);
  AIOINFER_UNROLL
  for (int i = 0; i < LANES / 4; i++) z.part[i] = vfmaq_f32(z.part[i], x.part[i], y.part[i]);
  return cast<Floats>(z);
#else
  return sum + a * b;
#endif
}

// Lanes are folded by halves: a fixed order.
template <int VECTORS, class Fold>
AIOINFER_INLINE float folded(const Floats (&lanes)[VECTORS], Fold&& fold) {
  constexpr int FOURS = VECTORS * LANES / 4;
  Four four[FOURS];
  std::memcpy(four, lanes, sizeof four);
  AIOINFER_UNROLL
  for (int half = FOURS / 2; half; half /= 2)
    AIOINFER_UNROLL
    for (int i = 0; i < half; i++) four[i] = fold(four[i], four[i + half]);
  const Four ends = four[0];
  const Four two = fold(ends, Four{ends[2], ends[3], ends[2], ends[3]});
  return fold(two, Four{two[1], two[1], two[1], two[1]})[0];
}

AIOINFER_INLINE float sum(const Floats (&lanes)[SUM_VECTORS]) {
  return folded(lanes, [](Four a, Four b) __attribute__((always_inline)) { return a + b; });
}
AIOINFER_INLINE float largest(Floats v) {
  const Floats lanes[1] = {v};
  return folded(lanes, [](Four a, Four b) __attribute__((always_inline)) { return a > b ? a : b; });
}

// The sum over indices [0, size), a multiple of SUM_LANES. add(index, sums) gives the sums with those of LANES indices.
template <class Add>
AIOINFER_INLINE float sum_over(int64_t size, Add&& add) {
  Floats sums[SUM_VECTORS] = {};
  for (int64_t at = 0; at < size; at += SUM_LANES)
    AIOINFER_UNROLL
    for (int v = 0; v < SUM_VECTORS; v++) sums[v] = add(at + v * LANES, sums[v]);
  return sum(sums);
}

// 2^n * p for whole n, with infinity and 0 where that does not fit.
AIOINFER_INLINE Floats scale_by_power(Floats p, Floats n) {
#if defined(__AVX512F__)
  return _mm512_maskz_scalef_ps(0xffff, p, n);
#else
  const Ints half = __builtin_convertvector(n, Ints) >> 1, rest = __builtin_convertvector(n, Ints) - half;
  return p * cast<Floats>((half + 127) << 23) * cast<Floats>((rest + 127) << 23);
#endif
}

// e^x to 2 ulp (Cephes' polynomial); NaN for NaN.
AIOINFER_INLINE Floats exponential(Floats x) {
  // Beyond these the result is 0 or infinity. The comparisons keep NaN.
  x = x < -104.0f ? spread(-104.0f) : x;
  x = x > 89.0f ? spread(89.0f) : x;
  const Floats magic = spread(12582912.0f);  // adding it rounds to the nearest integer
  const Floats n = multiply_add(magic, x, spread(1.44269504088896341f)) - magic;
  Floats r = multiply_add(x, n, spread(-0.693359375f));
  r = multiply_add(r, n, spread(2.12194440e-4f));
  Floats p = spread(1.9875691500e-4f);
  p = multiply_add(spread(1.3981999507e-3f), p, r);
  p = multiply_add(spread(8.3334519073e-3f), p, r);
  p = multiply_add(spread(4.1665795894e-2f), p, r);
  p = multiply_add(spread(1.6666665459e-1f), p, r);
  p = multiply_add(spread(5.0000001201e-1f), p, r);
  p = multiply_add(r, p * r, r) + 1.0f;
  return scale_by_power(p, n);
}

// tanh x to 2 ulp (Cephes' polynomial near 0); NaN for NaN.
AIOINFER_INLINE Floats hyperbolic_tangent(Floats x) {
  const Floats square = x * x, size = x < 0.0f ? -x : x;
  Floats p = spread(-5.70498872745e-3f);
  p = multiply_add(spread(2.06390887954e-2f), p, square);
  p = multiply_add(spread(-5.37397155531e-2f), p, square);
  p = multiply_add(spread(1.33314422036e-1f), p, square);
  p = multiply_add(spread(-3.33332819422e-1f), p, square);
  p = multiply_add(x, p * square, x);
  const Floats far = 1.0f - 2.0f / (exponential(size + size) + 1.0f);
  return size < 0.625f ? p : x < 0.0f ? -far : far;
}

AIOINFER_INLINE Floats silu(Floats x) { return x / (1.0f + exponential(-x)); }

// Nearest, ties to even; NaN stays NaN.
AIOINFER_INLINE uint16_t rounded_bits(float value) {
  uint32_t word = cast<uint32_t>(value);
  if ((word & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return static_cast<uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
}

AIOINFER_INLINE Words rounded_words(Floats value) {
  Words word = cast<Words>(value);
  Words rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
  return (word & 0x7fffffffu) > 0x7f800000u ? Words{} + 0x7fc0u : rounded;
}

// The numbers of a model. A *unit* is the input of one lane of a product: 4 bytes, one float or two bfloat16.
template <class T>
struct Number;

template <>
struct Number<float> {
  static constexpr int PER_UNIT = 1;
  static AIOINFER_INLINE float read(float v) { return v; }
  static AIOINFER_INLINE float make(float v) { return v; }
  static AIOINFER_INLINE Floats load_lanes(const float* from) { return load<Floats>(from); }
  static AIOINFER_INLINE void store_lanes(float* to, Floats v) { store(to, v); }
  // sum + a * b
  static AIOINFER_INLINE Floats multiply_add(Floats sum, Ints a, Ints b) {
    return aioinfer::multiply_add(sum, cast<Floats>(a), cast<Floats>(b));
  }
};

template <>
struct Number<bfloat16> {
  static constexpr int PER_UNIT = 2;
  static AIOINFER_INLINE float read(bfloat16 v) { return cast<float>(static_cast<uint32_t>(v.bits) << 16); }
  static AIOINFER_INLINE bfloat16 make(float v) { return {rounded_bits(v)}; }
  static AIOINFER_INLINE Floats load_lanes(const bfloat16* from) {
    typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
    return cast<Floats>(__builtin_convertvector(load<Halves>(from), Words) << 16);
  }
  static AIOINFER_INLINE void store_lanes(bfloat16* to, Floats v) {
#if defined(__AVX512BF16__)
    store(to, _mm512_cvtneps_pbh(v));
#elif defined(AIOINFER_ARM_BFLOAT16)
    store(to, vcvt_bf16_f32(v));
#else
    typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
    store(to, __builtin_convertvector(rounded_words(v), Halves));
#endif
  }
  // (sum + a.high * b.high) + a.low * b.low, each in one rounding: the order of AVX-512's instruction.
  static AIOINFER_INLINE Floats multiply_add(Floats sum, Ints a, Ints b) {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sum, cast<__m512bh>(a), cast<__m512bh>(b));
#elif defined(AIOINFER_ARM_BFLOAT16)
    const bfloat16x8_t x = cast<bfloat16x8_t>(a), y = cast<bfloat16x8_t>(b);
    return vbfmlalbq_f32(vbfmlaltq_f32(sum, x, y), x, y);
#else
    const Ints high = Ints{} + static_cast<int32_t>(0xffff0000u);
    sum = Number<float>::multiply_add(sum, a & high, b & high);
    return Number<float>::multiply_add(sum, a << 16, b << 16);
#endif
  }
};

// Rounded to T.
template <class T>
AIOINFER_INLINE Floats rounded(Floats value) {
  T numbers[LANES];
  Number<T>::store_lanes(numbers, value);
  return Number<T>::load_lanes(numbers);
}

}  // namespace aioinfer
