// What this processor can do at most: bytes that its threads read from memory, and products that they compute in
// registers, with the instructions that the kernels were compiled for. Prints a JSON object.
//
//   roofs THREADS SECONDS
#if defined(AIOINFER_TILES)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "memory.hpp"
#include "quantised_dot.hpp"

using namespace aioinfer;

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Keeps the sum of values, so that what computes them is not left out. The values themselves may stay in registers.
template <class V, int COUNT>
AIOINFER_INLINE void keep(const V (&values)[COUNT]) {
  V sum = values[0];
  AIOINFER_UNROLL
  for (int i = 1; i < COUNT; i++) sum += values[i];
  asm volatile("" ::"m"(sum) : "memory");
}

// The most work(thread) per second that all threads reach together in a round of at least so many seconds, the best of
// several rounds: others may use the machine, too.
template <class Work>
double best_rate(int threads, double seconds, Work&& work) {
  double best = 0;
  for (int round = 0; round < 5; round++) {
    std::atomic<int> ready = 0;
    std::vector<double> rates(threads);
    std::vector<std::thread> running;
    for (int t = 0; t < threads; t++)
      running.emplace_back([&, t] {
        for (ready++; ready < threads;) continue;
        const auto start = Clock::now();
        double done = 0;
        do done += work(t);
        while (seconds_since(start) < seconds / 5);
        rates[t] = done / seconds_since(start);
      });
    for (auto& thread : running) thread.join();
    double sum = 0;
    for (const double rate : rates) sum += rate;
    best = std::max(best, sum);
  }
  return best;
}

// Bytes of a region that is read once.
double read(const char* from, int64_t bytes) {
  Ints sums[4] = {};
  for (int64_t at = 0; at < bytes; at += static_cast<int64_t>(sizeof sums))
    for (int i = 0; i < 4; i++) sums[i] ^= load<Ints>(from + at + i * sizeof(Ints));
  keep(sums);
  return static_cast<double>(bytes);
}

// Operations of as many products as keep the units busy: two for each product of two numbers.
template <class T>
double multiply() {
  constexpr int SUMS = MANY_REGISTERS ? 16 : 8, TIMES = 4096;
  // They could differ, too: each is computed.
  Floats begin[SUMS] = {}, sums[SUMS];
  asm volatile("" : "+m"(begin));
  AIOINFER_UNROLL
  for (int s = 0; s < SUMS; s++) sums[s] = begin[s];
  Ints a = Ints{} + static_cast<int32_t>(0x3f803f80), b = a;
  for (int i = 0; i < TIMES; i++) {
    // What is multiplied could be anything: products are not taken out of the loop.
    asm volatile("" : "+m"(a), "+m"(b));
    const Ints x = a, y = b;
    AIOINFER_UNROLL
    for (int s = 0; s < SUMS; s++) sums[s] = Number<T>::multiply_add(sums[s], x, y);
  }
  keep(sums);
  return 2.0 * Number<T>::PER_UNIT * LANES * SUMS * TIMES;
}

// The same of integers, with weights from the first cache: they are unpacked there.
template <int BITS>
double multiply_integers() {
  constexpr int64_t UNITS = 64, TIMES = 256;
  alignas(64) static thread_local char weights[DOT_VECTORS][UNITS * LINE];
  alignas(64) static thread_local int8_t rows[DOT_ROWS][UNITS * UNIT];
  Whole sums[DOT_ROWS][DOT_VECTORS] = {};
  const int8_t* a[DOT_ROWS];
  const char* w[DOT_VECTORS];
  for (int r = 0; r < DOT_ROWS; r++) a[r] = rows[r];
  for (int v = 0; v < DOT_VECTORS; v++) w[v] = weights[v];
  for (int i = 0; i < TIMES; i++) {
    asm volatile("" ::: "memory");
    add_products<BITS>(sums, *const_cast<const int8_t* const(*)[DOT_ROWS]>(&a),
                       *const_cast<const char* const(*)[DOT_VECTORS]>(&w), UNITS);
  }
  AIOINFER_UNROLL
  for (int r = 0; r < DOT_ROWS; r++) keep(sums[r]);
  return 2.0 * DOT_ROWS * DOT_VECTORS * DOT_LANES * UNIT * UNITS * TIMES;
}

// Of tiles: four sums, as many as the kernels have.
template <bool INTEGERS>
double multiply_tiles() {
  constexpr int TIMES = 4096;
  tiles::configure();
  tiles::zero<0>(), tiles::zero<1>(), tiles::zero<2>(), tiles::zero<3>();
  tiles::zero<4>(), tiles::zero<5>(), tiles::zero<6>(), tiles::zero<7>();
  for (int i = 0; i < TIMES; i++) {
    if constexpr (INTEGERS) {
      tiles::add_int8_product<0, 4, 6>(), tiles::add_int8_product<1, 4, 7>();
      tiles::add_int8_product<2, 5, 6>(), tiles::add_int8_product<3, 5, 7>();
    } else {
      tiles::add_bfloat16_product<0, 4, 6>(), tiles::add_bfloat16_product<1, 4, 7>();
      tiles::add_bfloat16_product<2, 5, 6>(), tiles::add_bfloat16_product<3, 5, 7>();
    }
  }
  tiles::release();
  return 2.0 * (INTEGERS ? 4 : 2) * tiles::SIDE * tiles::SIDE * tiles::SIDE * 4 * TIMES;
}

}  // namespace

int main(int count, char** values) {
  if (count != 3) return 2;
#if defined(AIOINFER_TILES)
  // A process asks for tiles itself: the permission of the one that started it ended with exec.
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA)) return 3;
#endif
  const int threads = std::max(1, std::atoi(values[1]));
  const double seconds = std::atof(values[2]);
  constexpr int64_t REGION = int64_t{256} << 20;
  std::vector<Memory> regions;
  for (int t = 0; t < threads; t++) {
    regions.emplace_back(REGION);
    std::memset(regions[t].as<char>(), 1, REGION);
  }
  const double bytes = best_rate(threads, seconds, [&](int t) { return read(regions[t].as<char>(), REGION); });
  double bf16 = best_rate(threads, seconds, [](int) { return multiply<bfloat16>(); });
  double int8 = best_rate(threads, seconds, [](int) { return multiply_integers<8>(); });
  const double int4 = best_rate(threads, seconds, [](int) { return multiply_integers<4>(); });
  if constexpr (tiles::KIND == tiles::Kind::PROCESSOR)
    bf16 = best_rate(threads, seconds, [](int) { return multiply_tiles<false>(); });
  std::printf("{\"bytes\": %.4g, \"bf16\": %.4g, \"int8\": %.4g, \"int4\": %.4g}\n", bytes, bf16, int8, int4);
}
