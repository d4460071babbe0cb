// Where the time of a step goes.
#pragma once

#include <chrono>

namespace aioinfer {

// The parts of a step's time, as measured by the calling thread.
enum Part { LINEAR, ATTENTION, REST, PARTS };

class Stopwatch {
 public:
  explicit Stopwatch(double* seconds) : seconds_(seconds), last_(Clock::now()) {}
  void add(Part part) {
    const auto now = Clock::now();
    seconds_[part] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  using Clock = std::chrono::steady_clock;
  double* seconds_;
  Clock::time_point last_;
};

}  // namespace aioinfer
