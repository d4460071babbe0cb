// Denormals: numbers below the least normal one, which programs of a model take for 0.
//
// Instructions for products of bfloat16 do so on some processors, whatever the thread has chosen, and tiles do. Programs
// choose the same for all other instructions, so that results have the same bits wherever they are computed, and take the
// same time whatever the numbers are.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace aioinfer {

// While it lives, denormal inputs and results are 0 in this thread.
class NoDenormals {
 public:
  NoDenormals() : before_(control()) { control(before_ | FLAGS); }
  ~NoDenormals() { control(before_); }

  NoDenormals(const NoDenormals&) = delete;
  NoDenormals& operator=(const NoDenormals&) = delete;

 private:
#if defined(__x86_64__)
  // FLUSH_TO_ZERO and DENORMALS_ARE_ZERO
  static constexpr uint64_t FLAGS = 0x8000 | 0x40;

  static uint64_t control() { return _mm_getcsr(); }
  static void control(uint64_t flags) { _mm_setcsr(static_cast<unsigned>(flags)); }
#elif defined(__aarch64__)
  // FZ, which is for both
  static constexpr uint64_t FLAGS = 1 << 24;

  static uint64_t control() {
    uint64_t flags;
    asm volatile("mrs %0, fpcr" : "=r"(flags));
    return flags;
  }
  static void control(uint64_t flags) { asm volatile("msr fpcr, %0" ::"r"(flags) : "memory"); }
#else
  static constexpr uint64_t FLAGS = 0;

  static uint64_t control() { return 0; }
  static void control(uint64_t) {}
#endif

  const uint64_t before_;
};

}  // namespace aioinfer
