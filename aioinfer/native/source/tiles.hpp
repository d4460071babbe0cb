// Tiles: registers of 16 rows x 64 bytes and their products (Intel AMX), of the processor or of a model of it.
//
// A product adds to C [16 rows][16 columns] that of A [16 rows][16 units] and B [16 units][16 columns], where a unit is
// 4 bytes: two bfloat16 or four int8 that are neighbours along the inner dimension. One element of a product of bfloat16:
//
//   even = odd = 0
//   for every unit: even = fma(a.low, b.low, even), odd = fma(a.high, b.high, odd)
//   c = c + (even + odd)
//
// in float, rounded to nearest even, with denormals as 0: inputs, results and sums. That of int8 is a sum of int32 that
// wraps around. The model computes the same in every bit but for the payloads of NaN (measured on a Xeon). It is compiled
// with AIOINFER_MODELLED_TILES; processors' tiles with AIOINFER_TILES, which says that the system permits them, if the
// compiler knows that the processor has them.
//
// Instructions are written in assembler: of g++'s own functions some are macros that paste a number's text, one
// tells the optimiser that it reads 8 of 64 bytes, and another that it reads no memory.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "denormals.hpp"

namespace aioinfer::tiles {

enum class Kind { NONE, PROCESSOR, MODEL };

#if defined(AIOINFER_MODELLED_TILES)
constexpr Kind KIND = Kind::MODEL;
#elif defined(AIOINFER_TILES) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && \
    defined(__AVX512F__)
#define AIOINFER_PROCESSOR_TILES
constexpr Kind KIND = Kind::PROCESSOR;
#else
constexpr Kind KIND = Kind::NONE;
#endif
constexpr bool ENABLED = KIND != Kind::NONE;

// Rows, columns and units of a tile.
constexpr int SIDE = 16;
// Bytes of a row, and of a tile.
constexpr int ROW = 64, BYTES = SIDE * ROW;

#if defined(AIOINFER_PROCESSOR_TILES)

// All 8 tiles of full size. A thread must do so before it uses them; the system must have permitted it.
inline void configure() {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {ROW, ROW, ROW, ROW, ROW, ROW, ROW, ROW};
    uint8_t rows[16] = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE};
  } static const configuration;
  asm volatile("ldtilecfg (%0)" ::"r"(&configuration) : "memory");
}

inline void release() { asm volatile("tilerelease"); }

template <int TILE>
inline void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}

// Rows that are ``stride`` bytes apart.
template <int TILE>
inline void load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE>
inline void store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
}

// C += A * B. The three must differ.
template <int C, int A, int B>
inline void add_bfloat16_product() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

template <int C, int A, int B>
inline void add_int8_product() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#else

// The tiles of a thread.
struct State {
  bool configured;
  alignas(64) char tiles[8][SIDE][ROW];
};

inline State& state() {
  thread_local State state{};
  return state;
}

inline void configure() { state() = {.configured = true, .tiles = {}}; }

// A processor would end the process at the next use of a tile. Here every product is NaN, or -1.
inline void release() { state().configured = false; }

template <int TILE>
inline void zero() {
  std::memset(state().tiles[TILE], 0, BYTES);
}

template <int TILE>
inline void load(const void* from, int64_t stride) {
  auto& rows = state().tiles[TILE];
  for (int i = 0; i < SIDE; i++) std::memcpy(rows[i], static_cast<const char*>(from) + i * stride, ROW);
}

template <int TILE>
inline void store(void* to, int64_t stride) {
  const auto& rows = state().tiles[TILE];
  for (int i = 0; i < SIDE; i++) std::memcpy(static_cast<char*>(to) + i * stride, rows[i], ROW);
}

// Not inlined, so that nothing of it moves to where denormals are numbers.
__attribute__((noinline)) inline void multiply_bfloat16(char* to, const char* a, const char* b) {
  float c[SIDE][SIDE], low[SIDE][SIDE], high[SIDE][SIDE];
  std::memcpy(c, to, BYTES);
  const auto widened = [](const char* unit, float& low, float& high) {
    uint32_t both, one, other;
    std::memcpy(&both, unit, sizeof both);
    one = both << 16, other = both & 0xffff0000u;
    std::memcpy(&low, &one, sizeof low), std::memcpy(&high, &other, sizeof high);
  };
  for (int k = 0; k < SIDE; k++)
    for (int n = 0; n < SIDE; n++) widened(b + k * ROW + 4 * n, low[k][n], high[k][n]);
  for (int m = 0; m < SIDE; m++) {
    float even[SIDE] = {}, odd[SIDE] = {};
    for (int k = 0; k < SIDE; k++) {
      float first, second;
      widened(a + m * ROW + 4 * k, first, second);
      for (int n = 0; n < SIDE; n++) {
        even[n] = std::fma(first, low[k][n], even[n]);
        odd[n] = std::fma(second, high[k][n], odd[n]);
      }
    }
    for (int n = 0; n < SIDE; n++) c[m][n] += even[n] + odd[n];
  }
  std::memcpy(to, c, BYTES);
}

inline void multiply_int8(char* to, const char* a, const char* b) {
  uint32_t c[SIDE][SIDE];
  std::memcpy(c, to, BYTES);
  for (int m = 0; m < SIDE; m++)
    for (int k = 0; k < SIDE; k++)
      for (int n = 0; n < SIDE; n++)
        for (int i = 0; i < 4; i++)
          c[m][n] += static_cast<uint32_t>(static_cast<int8_t>(a[m * ROW + 4 * k + i]) *
                                           static_cast<int8_t>(b[k * ROW + 4 * n + i]));
  std::memcpy(to, c, BYTES);
}

template <int C, int A, int B>
inline void add_product(void (*multiply)(char*, const char*, const char*)) {
  static_assert(C != A && C != B && A != B);
  auto& [configured, tiles] = state();
  if (configured)
    multiply(tiles[C][0], tiles[A][0], tiles[B][0]);
  else
    std::memset(tiles[C], 0xff, BYTES);
}

template <int C, int A, int B>
inline void add_bfloat16_product() {
  add_product<C, A, B>(multiply_bfloat16);
}

template <int C, int A, int B>
inline void add_int8_product() {
  add_product<C, A, B>(multiply_int8);
}

#endif

// A program of a thread in which tiles may be used. Other code of the thread, torch's for example, may have its own
// configuration before and after.
class Session {
 public:
  Session() {
    if constexpr (ENABLED) configure();
  }
  ~Session() {
    if constexpr (ENABLED) release();
  }

  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

 private:
  // Vectors treat them as tiles do, so that either can compute a result.
  const NoDenormals no_denormals_;
};

}  // namespace aioinfer::tiles
