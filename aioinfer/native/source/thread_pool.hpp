// ThreadPool: threads that run one program together.
//
// A step is one program. Counters divide its phases dynamically, and each phase ends at a barrier; results do not
// depend on which thread computes what. Threads sleep between programs, and after a while at a barrier: fewer cores
// may be free than the pool has workers.
//
// What a phase throws, on whichever thread, ends the phases of its program without their work and is thrown to the
// caller. A forked process has the memory of the pools and none of their threads: they are started again there.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "tiles.hpp"

namespace aioinfer {

inline void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // "yield" does nothing where a core has one thread; this takes about as long as the pause of x86
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
  // Only bodies may throw: outside of them the other workers would wait at a barrier.
  template <class Body>
  void parallel(int64_t count, Body&& body, int64_t grain = 1);

  // The same for short bodies, which are divided in runs.
  template <class Body>
  void parallel_in_runs(int64_t count, Body&& body);

  // The same for bodies that read memory one behind the other: a worker has a share of neighbours, and when that is done,
  // what others have left of theirs.
  template <class Body>
  void parallel_in_shares(int64_t count, Body&& body);

  int index() const { return index_; }

  // The number of workers of the pool.
  int workers() const;

 private:
  // Call take(), which works until there is nothing left in this phase, and wait for the others.
  template <class Take>
  void phase(Take&& take);

  ThreadPool& pool_;
  int index_;
  uint32_t phase_ = 0;
};

// The pools of the process that a fork concerns.
class Pools {
 public:
  static Pools& all() {
    static Pools* const pools = new Pools;  // never destroyed: threads may outlive static objects
    return *pools;
  }

  void add(ThreadPool* pool) {
    const std::lock_guard<std::mutex> lock(lock_);
    pools_.push_back(pool);
  }

  void remove(ThreadPool* pool) {
    const std::lock_guard<std::mutex> lock(lock_);
    std::erase(pools_, pool);
  }

 private:
  Pools() { pthread_atfork([] { all().lock_.lock(); }, [] { all().lock_.unlock(); }, [] { all().forked(); }); }

  void forked();

  std::mutex lock_;
  std::vector<ThreadPool*> pools_;
};

class ThreadPool {
 public:
  // Throws std::system_error if a thread cannot be created.
  explicit ThreadPool(int size) : size_(size) {
    try {
      start_threads();
      Pools::all().add(this);
    } catch (...) {
      close();
      throw;
    }
  }

  // A pool without threads, for the thread that makes it.
  struct Alone {};
  explicit ThreadPool(Alone) : size_(1) {}

  ~ThreadPool() {
    Pools::all().remove(this);
    close();
  }

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }

  // Run program(worker) on every thread, the caller's included. Programs of several callers run one after the other.
  // Throws what a phase threw first.
  template <class Program>
  void run(Program&& program) {
    const std::lock_guard<std::mutex> lock(busy_);
    start_threads();  // those that a fork left behind
    program_ = &program;
    call_ = [](void* program, Worker& worker) { (*static_cast<std::remove_reference_t<Program>*>(program))(worker); };
    for (int worker = 0; worker < size_; worker++)
      for (auto& next : counters_[worker].next) next.store(0, std::memory_order_relaxed);
    start_.fetch_add(1, std::memory_order_release);
    start_.notify_all();
    Worker worker(*this, 0);
    program(worker);
    barrier();
    if (failed_.load(std::memory_order_relaxed)) {
      failed_.store(false, std::memory_order_relaxed);
      std::rethrow_exception(std::exchange(problem_, nullptr));
    }
  }

  // The same for a program of a model, which may use tiles. Each thread configures them at the start and releases them
  // at the end: others may change the configuration in between, and a thread that sleeps with tiles in use keeps its
  // core from saving power.
  template <class Program>
  void run_model(Program&& program) {
    run([&](Worker& worker) {
      const tiles::Session session;
      program(worker);
    });
  }

 private:
  friend class Worker;
  friend class Pools;

  // Of a worker: what comes next in its share, or in all of a phase that has no shares, of three phases in turns.
  struct alignas(64) Counters {
    std::atomic<int64_t> next[3];
  };

  // Start what is missing of the threads.
  void start_threads() {
    for (int i = static_cast<int>(threads_.size()) + 1; i < size_; i++) try {
        threads_.emplace_back([this, i] { work(i); });
      } catch (const std::system_error& problem) {
        throw std::system_error(problem.code(),
                                "thread " + std::to_string(i) + " of " + std::to_string(size_) + " cannot be created");
      }
  }

  // In a forked process, by its only thread: all is as it was before the first program, and no thread has been started.
  // What is replaced is not destroyed: it refers to threads of the other process, and one of them may hold the lock.
  void forked() {
    new (&busy_) std::mutex;
    new (&threads_) std::vector<std::thread>;
    new (&problem_) std::exception_ptr;
    failed_.store(false), start_.store(0), generation_.store(0), arrived_.store(0);
  }

  // Called within a phase, with the exception being handled.
  void fail() {
    // The first one writes; the caller reads behind a barrier.
    if (!failed_.exchange(true, std::memory_order_relaxed)) problem_ = std::current_exception();
  }

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
      barrier();
    }
  }

  void barrier() {
    const uint32_t generation = generation_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < size_) return wait_for_change(generation_, generation);
    arrived_.store(0, std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_acq_rel);
    generation_.notify_all();
  }

  const int size_;
  std::mutex busy_;
  void* program_ = nullptr;
  void (*call_)(void*, Worker&) = nullptr;
  std::atomic<bool> closing_{false}, failed_{false};
  std::exception_ptr problem_;
  alignas(64) std::atomic<uint32_t> start_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<int> arrived_{0};
  const std::unique_ptr<Counters[]> counters_{new Counters[size_]()};
  std::vector<std::thread> threads_;
};

inline void Pools::forked() {
  for (ThreadPool* pool : pools_) pool->forked();
  lock_.unlock();
}

inline int Worker::workers() const { return pool_.size(); }

template <class Take>
void Worker::phase(Take&& take) {
  try {
    take();
  } catch (...) {
    pool_.fail();
  }
  // Its counter that is not in use: neither in this phase nor in the next.
  pool_.counters_[index_].next[(phase_ + 2) % 3].store(0, std::memory_order_relaxed);
  pool_.barrier();
  phase_++;
}

template <class Body>
void Worker::parallel(int64_t count, Body&& body, int64_t grain) {
  phase([&] {
    auto& next = pool_.counters_[0].next[phase_ % 3];
    for (int64_t from; (from = next.fetch_add(grain, std::memory_order_relaxed)) < count;) {
      if (pool_.failed_.load(std::memory_order_relaxed)) break;
      for (int64_t i = from; i < std::min(from + grain, count); i++) body(i);
    }
  });
}

template <class Body>
void Worker::parallel_in_runs(int64_t count, Body&& body) {
  parallel(count, body, std::max<int64_t>(1, count / (8 * pool_.size())));
}

template <class Body>
void Worker::parallel_in_shares(int64_t count, Body&& body) {
  const int64_t size = pool_.size();
  phase([&] {
    for (int64_t k = 0; k < size; k++) {
      const int64_t whose = (index_ + k) % size, from = count * whose / size, to = count * (whose + 1) / size;
      auto& next = pool_.counters_[whose].next[phase_ % 3];
      for (int64_t i; (i = from + next.fetch_add(1, std::memory_order_relaxed)) < to;) {
        if (pool_.failed_.load(std::memory_order_relaxed)) return;
        body(i);
      }
    }
  });
}

}  // namespace aioinfer
