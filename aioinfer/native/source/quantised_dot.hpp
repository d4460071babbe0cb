// Sums of products of a group, exactly; see quantised_lanes.hpp.
#pragma once

#include "quantised.hpp"

namespace aioinfer {

// Bytes of a unit of a strip, and of a vector of it.
constexpr int LINE = STRIP * UNIT;
constexpr int DOT_BYTES = DOT_LANES * UNIT;

typedef int32_t Whole __attribute__((vector_size(DOT_LANES * 4)));
typedef uint32_t Quads __attribute__((vector_size(DOT_LANES * 4)));
typedef float Reals __attribute__((vector_size(DOT_LANES * 4)));

// a * b + c with one rounding.
AIOINFER_INLINE Reals fused(Reals a, Reals b, Reals c) {
#if defined(AIOINFER_DOT_512)
  return cast<Reals>(_mm512_fmadd_ps(cast<__m512>(a), cast<__m512>(b), cast<__m512>(c)));
#elif defined(__FMA__) && AIOINFER_PLAIN_DOT != 16
  return cast<Reals>(_mm256_fmadd_ps(cast<__m256>(a), cast<__m256>(b), cast<__m256>(c)));
#elif defined(AIOINFER_DOT_NEON)
  return vfmaq_f32(c, a, b);
#else
  for (int i = 0; i < DOT_LANES; i++) c[i] = std::fma(a[i], b[i], c[i]);
  return c;
#endif
}

// How far ahead of what is read memory is prefetched: about as far as a core reads while it waits for an access. Chosen on
// Zen 5, where from 4 to 8 KB differ by a tenth.
constexpr int64_t AHEAD = 5120;

// Prefetch what is AHEAD of bytes that are read, or do not. Behind the end of the weights it does no harm.
template <bool FETCH>
AIOINFER_INLINE void fetch(const char* from, int64_t bytes = LINE) {
  if constexpr (!FETCH) return;
  AIOINFER_UNROLL
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + AHEAD + at);
}

// DOT_LANES whole numbers of one byte or two.
template <class Narrow>
AIOINFER_INLINE Whole load_wider(const char* from) {
  typedef Narrow Vector __attribute__((vector_size(DOT_LANES * sizeof(Narrow))));
  const Vector numbers = load<Vector>(from);
  // The compiler's own conversion goes by way of halves; of plain intrinsics it warns that some bits are not initialised.
#if defined(AIOINFER_DOT_512)
  if constexpr (sizeof(Narrow) == 1) return cast<Whole>(_mm512_maskz_cvtepi8_epi32(0xffff, cast<__m128i>(numbers)));
  if constexpr (sizeof(Narrow) == 2) return cast<Whole>(_mm512_maskz_cvtepu16_epi32(0xffff, cast<__m256i>(numbers)));
#elif defined(__AVX2__) && AIOINFER_PLAIN_DOT != 16
  if constexpr (sizeof(Narrow) == 1) return cast<Whole>(_mm256_cvtepi8_epi32(_mm_set1_epi64x(load<int64_t>(from))));
  if constexpr (sizeof(Narrow) == 2) return cast<Whole>(_mm256_cvtepu16_epi32(cast<__m128i>(numbers)));
#elif defined(AIOINFER_DOT_NEON)
  if constexpr (sizeof(Narrow) == 1) return vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(load<uint32_t>(from)))));
  if constexpr (sizeof(Narrow) == 2) return cast<Whole>(vmovl_u16(cast<uint16x4_t>(numbers)));
#endif
  return __builtin_convertvector(numbers, Whole);
}

// DOT_LANES numbers of float16 that are normal or 0.
AIOINFER_INLINE Reals load_halves(const char* from) {
#if defined(AIOINFER_DOT_512)
  return cast<Reals>(_mm512_maskz_cvtph_ps(0xffff, load<__m256i>(from)));
#elif defined(__F16C__) && AIOINFER_PLAIN_DOT != 16
  return cast<Reals>(_mm256_cvtph_ps(load<__m128i>(from)));
#elif defined(AIOINFER_DOT_NEON)
  return vcvt_f32_f16(load<float16x4_t>(from));
#else
  // An exponent of float16 is 112 less than one of float32. The product is exact: see half_bits().
  const Quads bits = cast<Quads>(load_wider<uint16_t>(from));
  const Quads size = (bits & 0x7fffu) << 13, sign = (bits & 0x8000u) << 16;
  return cast<Reals>(cast<Quads>(cast<Reals>(size) * 0x1p112f) | sign);
#endif
}

// Calls use(read), where read(lane) has DOT_LANES of a group's scales from a lane on, or of its offsets from STRIP on.
template <class Use>
AIOINFER_INLINE void with_factors(const QuantisedWeights& w, const StripGroups& at, Use&& use) {
  switch (w.precision) {
    case Precision::BFLOAT16:
      return use([&](int lane) __attribute__((always_inline)) {
        return cast<Reals>(cast<Quads>(load_wider<uint16_t>(at.factors + 2 * lane)) << 16);
      });
    case Precision::FLOAT16:
      return use([&](int lane) __attribute__((always_inline)) { return load_halves(at.factors + 2 * lane); });
    case Precision::STEPS:
      return use([&](int lane) __attribute__((always_inline)) {
        return __builtin_convertvector(load_wider<int8_t>(at.factors + lane), Reals) * load<Reals>(at.steps + 4 * lane);
      });
    case Precision::POWERS:
      return use([&](int lane) __attribute__((always_inline)) {
        return cast<Reals>(cast<Quads>(load_wider<int8_t>(at.factors + lane)) << 24 >> 1);
      });
    case Precision::FLOAT32:
      return use([&](int lane) __attribute__((always_inline)) { return load<Reals>(at.factors + 4 * lane); });
  }
}

// A number in all lanes.
AIOINFER_INLINE Reals broadcast(const float& from) {
#if defined(AIOINFER_DOT_512)
  // The compiler would load several as a vector, and permute it.
  Reals all;
  asm("vbroadcastss %1, %0" : "=v"(all) : "m"(from));
  return all;
#else
  return Reals{} + from;
#endif
}

// Weights of fewer than 8 bits lie in runs of units: of 4 bits two in the halves of a line's bytes; of 6 bits four, whose
// lower bits are two such lines, and whose upper ones are a third, at twice the number of the unit.
template <int BITS>
constexpr int RUN_UNITS = BITS == 6 ? 4 : BITS == LOOKED_UP ? 2 : 8 / BITS;
template <int BITS>
constexpr int RUN_LINES = RUN_UNITS<BITS> * (BITS == LOOKED_UP ? 4 : BITS) / 8;

// A table, in every 16 bytes; with ``zero`` of 128 its numbers plus that, without signs.
AIOINFER_INLINE Quads spread_table(const Table& table, int zero) {
  Quads all;
  for (int lane = 0; lane < DOT_LANES; lane++) all[lane] = load<uint32_t>(&table[lane % 4 * UNIT]);
  return zero == 0 ? all : all ^ 0x80808080u;
}

// The numbers of a table at places that bytes state, which are below 16.
AIOINFER_INLINE Quads looked_up(Quads table, Quads places) {
#if defined(AIOINFER_DOT_512)
  return cast<Quads>(_mm512_shuffle_epi8(cast<__m512i>(table), cast<__m512i>(places)));
#elif defined(__AVX2__) && AIOINFER_PLAIN_DOT != 16
  return cast<Quads>(_mm256_shuffle_epi8(cast<__m256i>(table), cast<__m256i>(places)));
#elif defined(AIOINFER_DOT_NEON)
  return cast<Quads>(vqtbl1q_u8(cast<uint8x16_t>(table), cast<uint8x16_t>(places)));
#else
  typedef uint8_t Bytes __attribute__((vector_size(DOT_BYTES)));
  const Bytes from = cast<Bytes>(table), at = cast<Bytes>(places);
  Bytes found;
  for (int i = 0; i < DOT_BYTES; i++) found[i] = from[at[i]];
  return cast<Quads>(found);
#endif
}

// The weights of a unit of a run, without signs, or places in a table.
template <int BITS>
AIOINFER_INLINE Quads unsigned_weights(const char* run, int unit) {
  const Quads all = load<Quads>(run + unit / 2 * LINE);
  if constexpr (BITS == 8) return all ^ 0x80808080u;
  const Quads lower = (unit % 2 ? all >> 4 : all) & 0x0f0f0f0fu;
  if constexpr (BITS == 4 || BITS == LOOKED_UP) return lower;
  const Quads upper = load<Quads>(run + 2 * LINE);
  return lower | ((unit < 2 ? upper << (4 - 2 * unit) : upper >> (2 * unit - 4)) & 0x30303030u);
}

#if defined(AIOINFER_DOT_AVX2)

// What the products of weights of 8 bits, or of a table, are taken of: the weight itself.
constexpr int EIGHT_BIT_ZERO = 0;

// sums[r][v] += products of ``units`` units of the rows with vector v of weights of 4 or 6 bits. FETCH: they come
// from memory.
template <int BITS, int ROWS, bool FETCH>
  requires(BITS == 4 || BITS == 6)
AIOINFER_INLINE void add_products(Whole (&sums)[ROWS][DOT_VECTORS], const int8_t* const (&a)[ROWS],
                                  const char* w, int64_t units, Quads) {
  // 16 bits hold the sums of two products of 8 units, 16 * 15 * 127, or of 2 units, 4 * 63 * 127.
  constexpr int AT_ONCE = BITS == 4 ? 8 : 2, RUN = RUN_UNITS<BITS>, STEP = std::max(AT_ONCE, RUN);
  const __m256i ones = _mm256_set1_epi16(1);
  for (int64_t unit = 0; unit < units; unit += STEP) {
    __m256i halves[ROWS][DOT_VECTORS];
    AIOINFER_UNROLL
    for (int i = 0; i < STEP; i++) {
      const int64_t run = (unit + i) / RUN * RUN_LINES<BITS> * LINE;
      if (i % RUN == 0) fetch<FETCH>(w + run, RUN_LINES<BITS> * LINE);
      __m256i weights[DOT_VECTORS];
      AIOINFER_UNROLL
      for (int v = 0; v < DOT_VECTORS; v++) weights[v] = cast<__m256i>(unsigned_weights<BITS>(w + run + v * DOT_BYTES, i % RUN));
      AIOINFER_UNROLL
      for (int r = 0; r < ROWS; r++) {
        const __m256i x = _mm256_set1_epi32(load<int32_t>(a[r] + (unit + i) * UNIT));
        AIOINFER_UNROLL
        for (int v = 0; v < DOT_VECTORS; v++) {
          if (i % AT_ONCE == 0) halves[r][v] = __m256i{};
          halves[r][v] = _mm256_add_epi16(halves[r][v], _mm256_maddubs_epi16(weights[v], x));
          // Else the compiler takes all products before it adds them up, and keeps them in memory.
          asm("" : "+x"(halves[r][v]));
          if (i % AT_ONCE == AT_ONCE - 1) sums[r][v] += cast<Whole>(_mm256_madd_epi16(halves[r][v], ones));
        }
      }
    }
  }
}

// The same with weights of 8 bits, or those that a table has. The first factor must be unsigned: it is the weight without its sign, which the
// activation gets; it may be 128, and two products with activations of at most 127 fit 16 bits.
template <int BITS, int ROWS, bool FETCH>
  requires(BITS == 8 || BITS == LOOKED_UP)
AIOINFER_INLINE void add_products(Whole (&sums)[ROWS][DOT_VECTORS], const int8_t* const (&a)[ROWS],
                                  const char* w, int64_t units, Quads table) {
  constexpr int RUN = RUN_UNITS<BITS>;
  const __m256i ones = _mm256_set1_epi16(1);
  for (int64_t unit = 0; unit < units; unit += RUN, w += LINE) {
    fetch<FETCH>(w);
    AIOINFER_UNROLL
    for (int i = 0; i < RUN; i++) {
      __m256i weights[DOT_VECTORS], sizes[DOT_VECTORS];
      AIOINFER_UNROLL
      for (int v = 0; v < DOT_VECTORS; v++) {
        if constexpr (BITS == 8)
          weights[v] = load<__m256i>(w + v * DOT_BYTES);
        else
          weights[v] = cast<__m256i>(looked_up(table, unsigned_weights<BITS>(w + v * DOT_BYTES, i)));
        sizes[v] = _mm256_abs_epi8(weights[v]);
      }
      AIOINFER_UNROLL
      for (int r = 0; r < ROWS; r++) {
        const __m256i x = _mm256_set1_epi32(load<int32_t>(a[r] + (unit + i) * UNIT));
        AIOINFER_UNROLL
        for (int v = 0; v < DOT_VECTORS; v++) {
          const __m256i halves = _mm256_maddubs_epi16(sizes[v], _mm256_sign_epi8(x, weights[v]));
          sums[r][v] += cast<Whole>(_mm256_madd_epi16(halves, ones));
        }
      }
    }
  }
}

#elif defined(AIOINFER_DOT_NEON)

// What the products of weights of 8 bits, or of a table, are taken of: the weight itself.
constexpr int EIGHT_BIT_ZERO = 0;

// The weights of a unit of a run, as signed bytes.
template <int BITS>
AIOINFER_INLINE int8x16_t signed_weights(const char* run, int unit, Quads table) {
  if constexpr (BITS == 8) return load<int8x16_t>(run);
  const Quads found = unsigned_weights<BITS>(run, unit);
  return cast<int8x16_t>(BITS == LOOKED_UP ? looked_up(table, found) : found);
}

// Units whose activations fill a vector; groups have a multiple of it.
constexpr int FOUR_UNITS = 4;

// use(std::integral_constant<int, i>) for i below FOUR_UNITS: instructions have the number of a lane in them.
template <class Use>
AIOINFER_INLINE void for_four_units(Use&& use) {
  use(std::integral_constant<int, 0>{}), use(std::integral_constant<int, 1>{});
  use(std::integral_constant<int, 2>{}), use(std::integral_constant<int, 3>{});
}

#if defined(__ARM_FEATURE_DOTPROD)

// sums + the products of four bytes of each lane with those of a unit of four.
template <int UNIT_OF_FOUR>
AIOINFER_INLINE Whole add_unit(Whole sums, int8x16_t w, int8x16_t a) {
  return vdotq_laneq_s32(sums, w, a, UNIT_OF_FOUR);
}

#else

// Units whose products 16 bits hold the sum of, and of two neighbours: 2 * 4 * 15 * 127, 2 * 2 * 63 * 127 and 2 * 128 * 127.
template <int BITS>
constexpr int UNITS_IN_HALVES = BITS == 4 ? 4 : BITS == 6 ? 2 : 1;

#endif

// sums[r][v] += products of ``units`` units of the rows with vector v. FETCH: weights come from memory.
template <int BITS, int ROWS, bool FETCH>
AIOINFER_INLINE void add_products(Whole (&sums)[ROWS][DOT_VECTORS], const int8_t* const (&a)[ROWS],
                                  const char* w, int64_t units, Quads table) {
  constexpr int RUN = RUN_UNITS<BITS>;
#if defined(__ARM_FEATURE_MATMUL_INT8)
  // Of each pair of rows, its sums for two outputs of a vector and for the other two.
  constexpr int PAIRS = ROWS / 2;
  int32x4_t first[PAIRS + 1][DOT_VECTORS] = {}, second[PAIRS + 1][DOT_VECTORS] = {};
#endif
  for (int64_t unit = 0; unit < units; unit += FOUR_UNITS) {
    const char* runs = w + unit / RUN * RUN_LINES<BITS> * LINE;
    fetch<FETCH>(runs, FOUR_UNITS / RUN * RUN_LINES<BITS> * LINE);
    const auto weights = [&](int i, int v) __attribute__((always_inline)) {
      return signed_weights<BITS>(runs + i / RUN * RUN_LINES<BITS> * LINE + v * DOT_BYTES, i % RUN, table);
    };
    int8x16_t rows[ROWS];
    AIOINFER_UNROLL
    for (int r = 0; r < ROWS; r++) rows[r] = vld1q_s8(a[r] + unit * UNIT);
#if defined(__ARM_FEATURE_MATMUL_INT8)
    // Both operands have two units of two rows, or of two outputs, side by side.
    int8x16_t pairs[PAIRS + 1][2];
    AIOINFER_UNROLL
    for (int p = 0; p < PAIRS; p++) {
      const auto one = cast<int64x2_t>(rows[2 * p]), other = cast<int64x2_t>(rows[2 * p + 1]);
      pairs[p][0] = cast<int8x16_t>(vzip1q_s64(one, other)), pairs[p][1] = cast<int8x16_t>(vzip2q_s64(one, other));
    }
    AIOINFER_UNROLL
    for (int i = 0; i < FOUR_UNITS; i += 2)
      AIOINFER_UNROLL
      for (int v = 0; v < DOT_VECTORS; v++) {
        const int8x16_t one = weights(i, v), other = weights(i + 1, v);
        if constexpr (PAIRS > 0) {
          const auto low = cast<int8x16_t>(vzip1q_s32(cast<int32x4_t>(one), cast<int32x4_t>(other)));
          const auto high = cast<int8x16_t>(vzip2q_s32(cast<int32x4_t>(one), cast<int32x4_t>(other)));
          AIOINFER_UNROLL
          for (int p = 0; p < PAIRS; p++) {
            first[p][v] = vmmlaq_s32(first[p][v], pairs[p][i / 2], low);
            second[p][v] = vmmlaq_s32(second[p][v], pairs[p][i / 2], high);
          }
        }
        if constexpr (ROWS % 2) {
          Whole& last = sums[ROWS - 1][v];
          const int8x16_t x = rows[ROWS - 1];
          last = i ? add_unit<3>(add_unit<2>(last, one, x), other, x) : add_unit<1>(add_unit<0>(last, one, x), other, x);
        }
      }
#elif defined(__ARM_FEATURE_DOTPROD)
    for_four_units([&](auto i) __attribute__((always_inline)) {
      AIOINFER_UNROLL
      for (int v = 0; v < DOT_VECTORS; v++) {
        const int8x16_t own = weights(i, v);
        AIOINFER_UNROLL
        for (int r = 0; r < ROWS; r++) sums[r][v] = add_unit<decltype(i)::value>(sums[r][v], own, rows[r]);
      }
    });
#else
    constexpr int AT_ONCE = UNITS_IN_HALVES<BITS>;
    AIOINFER_UNROLL
    for (int v = 0; v < DOT_VECTORS; v++) {
      int16x8_t low[ROWS], high[ROWS];
      for_four_units([&](auto i) __attribute__((always_inline)) {
        const int8x16_t own = weights(i, v);
        AIOINFER_UNROLL
        for (int r = 0; r < ROWS; r++) {
          const auto x = cast<int8x16_t>(vdupq_laneq_s32(cast<int32x4_t>(rows[r]), decltype(i)::value));
          if constexpr (decltype(i)::value % AT_ONCE == 0) {
            low[r] = vmull_s8(vget_low_s8(own), vget_low_s8(x)), high[r] = vmull_high_s8(own, x);
          } else {
            low[r] = vmlal_s8(low[r], vget_low_s8(own), vget_low_s8(x)), high[r] = vmlal_high_s8(high[r], own, x);
          }
          if constexpr (decltype(i)::value % AT_ONCE == AT_ONCE - 1)
            sums[r][v] = vpadalq_s16(sums[r][v], vpaddq_s16(low[r], high[r]));
        }
      });
    }
#endif
  }
#if defined(__ARM_FEATURE_MATMUL_INT8)
  AIOINFER_UNROLL
  for (int p = 0; p < PAIRS; p++)
    AIOINFER_UNROLL
    for (int v = 0; v < DOT_VECTORS; v++) {
      const auto one = cast<int64x2_t>(first[p][v]), other = cast<int64x2_t>(second[p][v]);
      sums[2 * p][v] += cast<Whole>(vzip1q_s64(one, other));
      sums[2 * p + 1][v] += cast<Whole>(vzip2q_s64(one, other));
    }
#endif
}

#else

// What the products of weights of 8 bits, or of a table, are taken of: the weight plus 128, which has no sign.
constexpr int EIGHT_BIT_ZERO = 128;

// sums + the products of four unsigned bytes of each lane with the four signed ones of ``a``; wraps at 32 bits.
AIOINFER_INLINE Whole dot(Whole sums, Quads w, int32_t a) {
#if defined(AIOINFER_DOT_512)
  return cast<Whole>(_mm512_dpbusd_epi32(cast<__m512i>(sums), cast<__m512i>(w), _mm512_set1_epi32(a)));
#elif defined(AIOINFER_DOT_256)
  return cast<Whole>(_mm256_dpbusd_avx_epi32(cast<__m256i>(sums), cast<__m256i>(w), _mm256_set1_epi32(a)));
#else
  int8_t bytes[UNIT];
  std::memcpy(bytes, &a, sizeof bytes);
  Quads total = cast<Quads>(sums);
  for (int i = 0; i < UNIT; i++) total += ((w >> (8 * i)) & 255u) * static_cast<uint32_t>(int32_t{bytes[i]});
  return cast<Whole>(total);
#endif
}

// sums[r][v] += products of ``units`` units of the rows with vector v. FETCH: weights come from memory.
template <int BITS, int ROWS, bool FETCH>
AIOINFER_INLINE void add_products(Whole (&sums)[ROWS][DOT_VECTORS], const int8_t* const (&a)[ROWS],
                                  const char* w, int64_t units, Quads table) {
  constexpr int RUN = RUN_UNITS<BITS>;
  for (int64_t unit = 0; unit < units; unit += RUN) {
    const int64_t run = unit / RUN * RUN_LINES<BITS> * LINE;
    fetch<FETCH>(w + run, RUN_LINES<BITS> * LINE);
    AIOINFER_UNROLL
    for (int i = 0; i < RUN; i++) {
      Quads weights[DOT_VECTORS];
      AIOINFER_UNROLL
      for (int v = 0; v < DOT_VECTORS; v++) {
        weights[v] = unsigned_weights<BITS>(w + run + v * DOT_BYTES, i);
        if constexpr (BITS == LOOKED_UP) weights[v] = looked_up(table, weights[v]);
      }
      AIOINFER_UNROLL
      for (int r = 0; r < ROWS; r++) {
        const int32_t x = load<int32_t>(a[r] + (unit + i) * UNIT);
        AIOINFER_UNROLL
        for (int v = 0; v < DOT_VECTORS; v++) sums[r][v] = dot(sums[r][v], weights[v], x);
      }
    }
  }
}

#endif

}  // namespace aioinfer
