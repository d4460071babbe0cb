// Vectors of floats, the two types of a model, and the product that all kernels are built on.
//
// Written with the compilers' vector types, so that one source serves AVX-512, AVX2 and others; intrinsics are used
// only for instructions that compilers do not generate by themselves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__) || defined(__FMA__)
#include <immintrin.h>
#endif

#include "tiles.hpp"

#define AIOINFER_INLINE inline __attribute__((always_inline))
// Loops over registers must be unrolled, or the compiler keeps them in memory.
#define AIOINFER_UNROLL _Pragma("GCC unroll 16")

namespace aioinfer {

// Tiles have 16 columns: with a model of them compilers make vectors of 16 lanes from those that the processor has.
#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr bool MANY_REGISTERS = true;
#else
constexpr int LANES = tiles::ENABLED ? tiles::SIDE : 8;
constexpr bool MANY_REGISTERS = false;
#endif

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));

#if defined(__AVX2__) || defined(__FMA__)
// A vector as the processor has them.
struct Eights {
  __m256 part[LANES / 8];
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

// Lanes are folded by halves: a fixed order.
#define AIOINFER_FOLD(v, RESULT)                                      \
  typedef float Eight __attribute__((vector_size(32)));               \
  typedef float Four __attribute__((vector_size(16)));                \
  float lanes[LANES];                                                 \
  store(lanes, v);                                                    \
  for (int half = LANES / 2; half >= 8; half /= 2) {                  \
    const Eight a = load<Eight>(lanes), b = load<Eight>(lanes + half); \
    store(lanes, RESULT);                                             \
  }                                                                   \
  {                                                                   \
    const Four a = load<Four>(lanes), b = load<Four>(lanes + 4);      \
    store(lanes, RESULT);                                             \
  }                                                                   \
  for (int half = 2; half; half /= 2)                                 \
    for (int i = 0; i < half; i++) {                                  \
      const float a = lanes[i], b = lanes[i + half];                  \
      lanes[i] = RESULT;                                              \
    }                                                                 \
  return lanes[0];

AIOINFER_INLINE float sum(Floats v) { AIOINFER_FOLD(v, a + b) }
AIOINFER_INLINE float largest(Floats v) { AIOINFER_FOLD(v, a > b ? a : b) }

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
  const Floats n = (x * 1.44269504088896341f + magic) - magic;
  Floats r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Floats p = spread(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return scale_by_power(p, n);
}

// tanh x to 2 ulp (Cephes' polynomial near 0); NaN for NaN.
AIOINFER_INLINE Floats hyperbolic_tangent(Floats x) {
  const Floats square = x * x, size = x < 0.0f ? -x : x;
  Floats p = spread(-5.70498872745e-3f);
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  p = p * square * x + x;
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
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(cast<Floats>(a), cast<Floats>(b), sum);
#elif defined(__FMA__)
    const Eights x = cast<Eights>(a), y = cast<Eights>(b);
    Eights z = cast<Eights>(sum);
    AIOINFER_UNROLL
    for (int i = 0; i < LANES / 8; i++) z.part[i] = _mm256_fmadd_ps(x.part[i], y.part[i], z.part[i]);
    return cast<Floats>(z);
#else
    return sum + cast<Floats>(a) * cast<Floats>(b);
#endif
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
#else
    typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
    store(to, __builtin_convertvector(rounded_words(v), Halves));
#endif
  }
  // sum + a.low * b.low + a.high * b.high
  static AIOINFER_INLINE Floats multiply_add(Floats sum, Ints a, Ints b) {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sum, cast<__m512bh>(a), cast<__m512bh>(b));
#else
    const Ints high = Ints{} + static_cast<int32_t>(0xffff0000u);
    sum = Number<float>::multiply_add(sum, a << 16, b << 16);
    return Number<float>::multiply_add(sum, a & high, b & high);
#endif
  }
};

// sum + a * b, in one rounding where the processor has such an instruction: wherever it is written, the same bits.
AIOINFER_INLINE Floats multiply_add(Floats sum, Floats a, Floats b) {
  return Number<float>::multiply_add(sum, cast<Ints>(a), cast<Ints>(b));
}

// Rounded to T.
template <class T>
AIOINFER_INLINE Floats rounded(Floats value) {
  T numbers[LANES];
  Number<T>::store_lanes(numbers, value);
  return Number<T>::load_lanes(numbers);
}

}  // namespace aioinfer
