// The vectors of products of quantised weights, on the instructions that the processor has.
//
//   AVX-512 VNNI, AVX-VNNI    unsigned weights times signed activations, four products a lane
//   AVX2                      the same in two steps by way of 16 bits, arranged so that nothing saturates
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
#endif
#endif

#if defined(AIOINFER_DOT_512) || AIOINFER_PLAIN_DOT == 16
constexpr int DOT_LANES = 16;
#else
constexpr int DOT_LANES = 8;
#endif
// The vectors that a block of rows multiplies at once.
constexpr int DOT_VECTORS = 2;
// The most rows of such a block: the sums of all fill about half of the registers.
constexpr int DOT_ROWS = DOT_LANES == 16 ? 8 : 4;

}  // namespace aioinfer
