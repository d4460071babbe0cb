// Memory for weights: aligned to lines of the cache, and on huge pages where the system has any.
//
// A matrix of a small model with few bits is smaller than a huge page: matrices share slabs. A slab is freed with the last
// of them; its pages are the process's from the first write on, so that the rest of the last slab costs nothing.
#pragma once

#include <sys/mman.h>

#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>

namespace aioinfer {

class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t bytes) {
    constexpr size_t LINE = 64;
    bytes = (bytes + LINE - 1) / LINE * LINE;
    if (bytes > SLAB / 4) {
      slab_ = std::make_shared<Slab>(bytes);
      data_ = slab_->data;
      return;
    }
    static std::mutex mutex;
    static std::weak_ptr<Slab> last;
    const std::lock_guard lock(mutex);
    slab_ = last.lock();
    if (slab_ == nullptr || slab_->used + bytes > SLAB) last = slab_ = std::make_shared<Slab>(SLAB);
    data_ = slab_->data + slab_->used;
    slab_->used += bytes;
  }

  template <class V>
  V* as() const {
    return reinterpret_cast<V*>(data_);
  }

 private:
  static constexpr size_t HUGE_PAGE = size_t{1} << 21, SLAB = 32 * HUGE_PAGE;

  struct Slab {
    explicit Slab(size_t bytes) {
      bytes = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
      data = static_cast<char*>(std::aligned_alloc(HUGE_PAGE, bytes));
      if (data == nullptr) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
      madvise(data, bytes, MADV_HUGEPAGE);
#endif
    }
    Slab(const Slab&) = delete;
    Slab& operator=(const Slab&) = delete;
    ~Slab() { std::free(data); }

    char* data;
    size_t used = 0;
  };

  std::shared_ptr<Slab> slab_;
  char* data_ = nullptr;
};

}  // namespace aioinfer
