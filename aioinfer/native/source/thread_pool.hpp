// ThreadPool: threads that run one program together.
//
// A step is one program. A counter divides its phases dynamically, and each phase ends at a barrier; results do not
// depend on which thread computes what. Threads sleep between programs, and after a while at a barrier: fewer cores
// may be free than the pool has workers.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace aioinfer {

inline void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// Wait until ``value`` is no longer ``old``: spin for about the time of a wake-up, then sleep, which frees the core
// for another worker.
inline void wait_for_change(const std::atomic<uint32_t>& value, uint32_t old) {
  for (int i = 0; i < 1000; i++) {
    if (value.load(std::memory_order_acquire) != old) return;
    pause_briefly();
  }
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

class ThreadPool;

// A thread of the pool within a program.
class Worker {
 public:
  Worker(ThreadPool& pool, int index) : pool_(pool), index_(index) {}

  // Call body(i) for every i below count, divided among the workers ``grain`` at a time; then wait for all of them.
  template <class Body>
  void parallel(int64_t count, Body&& body, int64_t grain = 1);

  // The same for short bodies, which are divided in runs.
  template <class Body>
  void parallel_in_runs(int64_t count, Body&& body);

  int index() const { return index_; }

  // The number of workers of the pool.
  int workers() const;

 private:
  ThreadPool& pool_;
  int index_;
  uint32_t phase_ = 0;
};

class ThreadPool {
 public:
  // Throws std::system_error if a thread cannot be created.
  explicit ThreadPool(int size) : size_(size) {
    try {
      for (int i = 1; i < size; i++) threads_.emplace_back([this, i] { work(i); });
    } catch (...) {
      close();
      throw;
    }
  }

  ~ThreadPool() { close(); }

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }

  // Run program(worker) on every thread, the caller's included. Programs of several callers run one after the other.
  template <class Program>
  void run(Program&& program) {
    const std::lock_guard<std::mutex> lock(busy_);
    program_ = &program;
    call_ = [](void* program, Worker& worker) { (*static_cast<std::remove_reference_t<Program>*>(program))(worker); };
    for (auto& counter : counters_) counter.next.store(0, std::memory_order_relaxed);
    start_.fetch_add(1, std::memory_order_release);
    start_.notify_all();
    Worker worker(*this, 0);
    program(worker);
    barrier(0);
  }

 private:
  friend class Worker;

  struct alignas(64) Counter {
    std::atomic<int64_t> next{0};
  };

  void close() {
    closing_.store(true);
    start_.fetch_add(1);
    start_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  void work(int index) {
    for (uint32_t seen = 0;; seen++) {
      wait_for_change(start_, seen);
      if (closing_.load()) return;
      Worker worker(*this, index);
      call_(program_, worker);
      barrier(0);
    }
  }

  // The last to arrive clears the counter that is not in use: neither that of this phase nor that of the next.
  void barrier(uint32_t phase) {
    const uint32_t generation = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < size_) return wait_for_change(generation_, generation);
    arrived_.store(0, std::memory_order_relaxed);
    counters_[(phase + 2) % 3].next.store(0, std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_acq_rel);
    generation_.notify_all();
  }

  const int size_;
  std::mutex busy_;
  void* program_ = nullptr;
  void (*call_)(void*, Worker&) = nullptr;
  std::atomic<bool> closing_{false};
  alignas(64) std::atomic<uint32_t> start_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<int> arrived_{0};
  Counter counters_[3];
  std::vector<std::thread> threads_;
};

inline int Worker::workers() const { return pool_.size(); }

template <class Body>
void Worker::parallel(int64_t count, Body&& body, int64_t grain) {
  auto& next = pool_.counters_[phase_ % 3].next;
  for (int64_t from; (from = next.fetch_add(grain, std::memory_order_relaxed)) < count;)
    for (int64_t i = from; i < std::min(from + grain, count); i++) body(i);
  pool_.barrier(phase_++);
}

template <class Body>
void Worker::parallel_in_runs(int64_t count, Body&& body) {
  parallel(count, body, std::max<int64_t>(1, count / (8 * pool_.size())));
}

}  // namespace aioinfer
