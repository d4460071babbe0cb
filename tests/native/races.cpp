// Programs of thread pools for the race detector: decoders of all kinds of layers, by several callers at once.
//
// Compiled by tests.native.builds together with the kernels of one type (NUMBER), for weights of WEIGHT_BITS bits, or for
// weights that are not rounded (0). Returns 1 if results depend on the pool.
#include <cmath>
#include <cstdio>
#include <thread>

#include "specimens.hpp"

using namespace aioinfer;
using namespace specimens;
using T = NUMBER;

namespace {

// The bits of every number of rows by pools of all sizes, several callers at once. Returns how many differ.
int wrong_products() {
  ThreadPool alone(1);
  const Products<T> products(alone);
  std::vector<std::vector<float>> wanted;
  for (int64_t rows = 0; rows <= Products<T>::MOST; rows++) wanted.push_back(products.multiply_all(alone, rows));
  std::atomic<int> wrong{!products.all_in_steps()};
  for (int size : {2, 3, 5}) {
    ThreadPool pool(size);
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 3; caller++)
      callers.emplace_back([&, caller] {
        for (int i = 0; i < 30; i++) {
          const int64_t rows = (i + 3 * caller) % (Products<T>::MOST + 1);
          wrong += !same(products.multiply_all(pool, rows), wanted[rows]);
        }
      });
    for (auto& caller : callers) caller.join();
  }
  return wrong;
}

// What a share throws ends its program; the next program computes everything.
int wrong_after_errors() {
  int wrong = 0;
  for (int i = 0; i < 200; i++) {
    ThreadPool pool(1 + i % 5);
    try {
      pool.run([&](Worker& worker) {
        worker.parallel_in_shares(20, [&](int64_t at) {
          if (at == i % 20) throw std::runtime_error("meant");
        });
        worker.parallel_in_shares(20, [&](int64_t) {});
      });
      wrong++;
    } catch (const std::runtime_error&) {
    }
    std::vector<int> done(20);
    pool.run([&](Worker& worker) { worker.parallel_in_shares(20, [&](int64_t at) { done[at]++; }); });
    for (int count : done) wrong += count != 1;
  }
  return wrong;
}

}  // namespace

int main() {
  ThreadPool alone(1);
  const auto wanted = Model<T>(alone, WEIGHT_BITS).forward(alone);
  for (const float value : wanted)
    if (!std::isfinite(value)) return std::puts("not finite"), 1;
  std::atomic<int> wrong{wrong_products() + wrong_after_errors()};
  for (int size : {2, 3, 5}) {
    ThreadPool pool(size);
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 3; caller++)
      callers.emplace_back([&] {
        Model<T> model(pool, WEIGHT_BITS);
        for (int i = 0; i < 15; i++) {
          if (!same(model.forward(pool), wanted)) wrong++;
        }
      });
    for (auto& caller : callers) caller.join();
  }
  // Pools of a short life, and programs that end before all workers have begun.
  for (int i = 0; i < 200; i++) {
    ThreadPool pool(1 + i % 4);
    for (int j = 0; j < i % 3; j++) {
      std::vector<int> done(7);
      pool.run([&](Worker& worker) {
        worker.parallel(7, [&](int64_t at) { done[at]++; });
        worker.parallel(7, [&](int64_t at) { done[6 - at]++; });
        worker.parallel(0, [&](int64_t) { wrong++; });
        worker.parallel_in_runs(7, [&](int64_t at) { done[at]++; });
        worker.parallel_in_shares(7, [&](int64_t at) { done[at]++; });
        worker.parallel_in_shares(2, [&](int64_t at) { done[at]++; });
        worker.parallel(5, [&](int64_t at) { done[2 + at]++; });
        worker.parallel_in_shares(7, [&](int64_t at) { done[at]++; });
      });
      for (int count : done) wrong += count != 6;
    }
  }
  std::printf("%d wrong\n", wrong.load());
  return wrong != 0;
}
