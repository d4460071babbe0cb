// The vectors of products of quantised weights, on the instructions that the processor has.
//
//   AVX-512 VNNI, AVX-VNNI    unsigned weights times signed activations, four products a lane
//   AVX2                      the same in two steps by way of 16 bits, arranged so that nothing saturates
//   NEON i8mm                 signed weights times signed activations, eight products for each of two rows and two outputs
//   NEON dotprod              the same for one row, four products a lane
//   NEON                      by way of 16 bits
//   others                    a model of the first in plain C++, which also is its test elsewhere
//
// All of them give the same sums, exactly.
#pragma once

namespace aioinfer {

// AIOINFER_PLAIN_DOT compiles the model on any processor: with so many lanes, 8 or 16.
#if !defined(AIOINFER_PLAIN_DOT)
#if defined(__AVX512VNNI__)
#define AIOINFER_DOT_512
#elif defined(__AVXVNNI__)
#define AIOINFER_DOT_256
#elif defined(__AVX2__)
#define AIOINFER_DOT_AVX2
#elif defined(__aarch64__)
#define AIOINFER_DOT_NEON
#endif
#endif

#if defined(AIOINFER_DOT_512) || AIOINFER_PLAIN_DOT == 16
constexpr int DOT_LANES = 16;
#elif defined(AIOINFER_DOT_NEON)
constexpr int DOT_LANES = 4;
#else
constexpr int DOT_LANES = 8;
#endif
// The vectors that a block of rows multiplies at once. A unit of them fills a line of the cache, or two.
constexpr int DOT_VECTORS = DOT_LANES == 4 ? 4 : 2;
// The most rows of such a block: the sums of all fill about half of the registers.
constexpr int DOT_ROWS = DOT_LANES == 16 ? 8 : 4;

}  // namespace aioinfer
