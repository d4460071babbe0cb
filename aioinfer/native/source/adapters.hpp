// Adapters: low-rank summands of linear layers (LoRA: Hu et al., arXiv 2106.09685), another one for each row of a step.
//
//   layer:   x ─► W ───────────────► + ─► y          A: [rank, inner], B: [outputs, rank]
//            └──► A ─► scale ─► B ───┘
//                shrink          expand
//
// To shrink is a phase in front of the layer's product, to expand is a part of its store: every panel is read once. The
// ranks of a fused layer's matrices (queries, keys and values; gates and what they gate) lie side by side, each padded
// to RANKS; a vector of outputs reads those of its own. All sums are in float and in an order of their own, so that a
// row's bits depend on nothing but the row. Where an adapter rescales outputs (DoRA: Liu et al., arXiv 2402.09353), what
// W makes is multiplied and shifted before B's is added.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "attention.hpp"
#include "interface.hpp"
#include "linear.hpp"

namespace aioinfer {

// Ranks that are computed together.
constexpr int RANKS = 16;
static_assert(RANKS % LANES == 0);

// Memory of one adapter, on huge pages where the system has any: it is freed as a whole, and shared with nothing.
class Arena {
 public:
  template <class V>
  V* take(int64_t count) {
    const size_t bytes = (count * sizeof(V) + LINE - 1) / LINE * LINE;
    if (blocks_.empty() || used_ + bytes > size_) {
      size_ = (bytes + BLOCK - 1) / BLOCK * BLOCK, used_ = 0;
      blocks_.emplace_back(static_cast<char*>(std::aligned_alloc(BLOCK, size_)), std::free);
      if (blocks_.back() == nullptr) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
      madvise(blocks_.back().get(), size_, MADV_HUGEPAGE);
#endif
    }
    char* data = blocks_.back().get() + used_;
    used_ += bytes;
    return reinterpret_cast<V*>(data);
  }

 private:
  static constexpr size_t BLOCK = size_t{1} << 21, LINE = 64;

  std::vector<std::unique_ptr<char, decltype(&std::free)>> blocks_;
  size_t size_ = 0, used_ = 0;  // of the last block
};

// The summands of one linear layer.
template <class T>
class LowRank {
 public:
  // ``rows``: outputs of the layer; gated: of both of its matrices.
  LowRank(Arena& arena, const LowRankTarget* targets, int64_t count, int64_t rows, int64_t inner)
      : inner_(inner), units_(inner / Number<T>::PER_UNIT) {
    require(inner % RANKS == 0, "the inner dimension of an adapted layer is no multiple of 16");
    std::vector<int64_t> first;  // rank of each target
    for (int64_t i = 0; i < count; i++) {
      const LowRankTarget& target = targets[i];
      require(target.rank > 0 && target.rows > 0, "a target of an adapter has no rank or no rows");
      require(target.start >= 0 && target.start + target.rows <= rows, "a target of an adapter is not in its layer");
      first.push_back(ranks_);
      ranks_ += (target.rank + RANKS - 1) / RANKS * RANKS;
      scales_.resize(ranks_, target.scale);
    }
    rescale(targets, count, (rows + LANES - 1) / LANES * LANES);
    int64_t size = 0;
    for (int64_t from = 0; from < rows; from += LANES) {
      Range range{ranks_, 0, size};
      int64_t last = 0;
      for (int64_t i = 0; i < count; i++) {
        const LowRankTarget& target = targets[i];
        if (from + LANES <= target.start || from >= target.start + target.rows) continue;
        range.first = std::min(range.first, first[i]), last = std::max(last, first[i] + target.rank);
      }
      range.count = std::max<int64_t>(0, last - range.first);
      size += range.count * LANES;
      ranges_.push_back(range);
    }
    T* down = arena.take<T>(ranks_ * inner);
    T* up = arena.take<T>(size);
    std::fill_n(down, ranks_ * inner, Number<T>::make(0.0f)), std::fill_n(up, size, Number<T>::make(0.0f));
    bool finite = true;
    for (int64_t i = 0; i < count; i++) {
      const LowRankTarget& target = targets[i];
      T* to = down + first[i] * inner;
      finite &= target.a_is_bfloat16 ? put_down(static_cast<const bfloat16*>(target.a), target.rank, to)
                                     : put_down(static_cast<const float*>(target.a), target.rank, to);
      finite &= target.b_is_bfloat16 ? put_up(static_cast<const bfloat16*>(target.b), target, first[i], up)
                                     : put_up(static_cast<const float*>(target.b), target, first[i], up);
    }
    require(finite, "an adapter has numbers that the model's type does not have");
    down_ = down, up_ = up;
  }

  int64_t panels() const { return ranks_ / RANKS; }
  int64_t ranks() const { return ranks_; }
  int64_t inner() const { return inner_; }

  // Half of the sums of a panel of ranks for ROWS rows of ``inner`` numbers, over the first or the second half of these:
  // to[r][0, RANKS). Two workers may do the halves.
  template <int ROWS>
  void shrink(const T* const (&rows)[ROWS], int64_t panel, int half, float* const (&to)[ROWS]) const {
    constexpr int VECTORS = RANKS / LANES, CHAINS = 2;
    const T* weights = down_ + panel * inner_ * RANKS;
    Floats sums[ROWS][VECTORS][CHAINS] = {};
    for (int64_t k = half * units_ / 2; k < (half + 1) * units_ / 2; k += CHAINS)
      AIOINFER_UNROLL
      for (int chain = 0; chain < CHAINS; chain++)
        AIOINFER_UNROLL
        for (int v = 0; v < VECTORS; v++) {
          const Ints b = load<Ints>(weights + ((k + chain) * RANKS + v * LANES) * Number<T>::PER_UNIT);
          AIOINFER_UNROLL
          for (int r = 0; r < ROWS; r++) {
            const Ints unit = Ints{} + load<int32_t>(rows[r] + (k + chain) * Number<T>::PER_UNIT);
            sums[r][v][chain] = Number<T>::multiply_add(sums[r][v][chain], unit, b);
          }
        }
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < VECTORS; v++) store(to[r] + v * LANES, sums[r][v][0] + sums[r][v][1]);
  }

  // The ranks of a panel for a row: the sum of both halves, scaled.
  void finish(const float* first, const float* second, int64_t panel, float* to) const {
    for (int at = 0; at < RANKS; at += LANES) {
      const Floats scale = load<Floats>(&scales_[panel * RANKS + at]);
      store(to + panel * RANKS + at, (load<Floats>(first + at) + load<Floats>(second + at)) * scale);
    }
  }

  // Add what a row's ranks make of a vector of outputs, by the vector's index in the layer's matrix. The weights of
  // the one that is ``ahead`` by so many are needed next.
  void expand(const float* ranks, int64_t vector, int64_t ahead, Floats& sums) const {
    if (vector >= static_cast<int64_t>(ranges_.size())) return;
    if (!factors_.empty())
      sums = multiply_add(load<Floats>(&shifts_[vector * LANES]), sums, load<Floats>(&factors_[vector * LANES]));
    const Range& range = ranges_[vector];
    const T* weights = up_ + range.at;
    const float* from = ranks + range.first;
    if (vector + ahead < static_cast<int64_t>(ranges_.size())) {
      const char* next = reinterpret_cast<const char*>(up_ + ranges_[vector + ahead].at);
      for (int64_t at = 0; at < range.count * LANES * static_cast<int64_t>(sizeof(T)); at += 64)
        __builtin_prefetch(next + at, 0, 2);
    }
    Floats even{}, odd{};
    int64_t i = 0;
    for (; i + 1 < range.count; i += 2) {
      even = multiply_add(even, spread(from[i]), Number<T>::load_lanes(weights + i * LANES));
      odd = multiply_add(odd, spread(from[i + 1]), Number<T>::load_lanes(weights + (i + 1) * LANES));
    }
    if (i < range.count) even = multiply_add(even, spread(from[i]), Number<T>::load_lanes(weights + i * LANES));
    sums += even + odd;
  }

 private:
  // The factors and shifts of all outputs, ``padded`` to whole vectors; none if no target has any.
  void rescale(const LowRankTarget* targets, int64_t count, int64_t padded) {
    for (int64_t i = 0; i < count; i++) {
      const LowRankTarget& target = targets[i];
      if (target.rescaling == nullptr) continue;
      factors_.resize(padded, 1.0f), shifts_.resize(padded, 0.0f);
      for (int64_t row = 0; row < target.rows; row++) {
        const float factor = target.rescaling[row], shift = target.rescaling[target.rows + row];
        require(std::isfinite(factor) && std::isfinite(shift), "an adapter rescales by numbers that are not finite");
        factors_[target.start + row] *= factor;
        shifts_[target.start + row] = shifts_[target.start + row] * factor + shift;
      }
    }
  }

  // The ranks that a vector of outputs reads, and where their weights begin.
  struct Range {
    int64_t first, count, at;
  };

  // A number of the model's; ``finite`` stays true if it is.
  template <class From>
  static T made(From number, bool& finite) {
    const T found = Number<T>::make(Number<From>::read(number));
    finite &= std::isfinite(Number<T>::read(found));
    return found;
  }

  // The panels of a target, from [rank, inner]. Returns whether all numbers are finite.
  template <class From>
  bool put_down(const From* from, int64_t rank, T* to) const {
    constexpr int PER_UNIT = Number<T>::PER_UNIT;
    bool finite = true;
    for (int64_t panel = 0; panel < rank; panel += RANKS, to += RANKS * inner_)
      for (int64_t unit = 0; unit < units_; unit++)
        for (int64_t each = panel; each < std::min(rank, panel + RANKS); each++)
          for (int i = 0; i < PER_UNIT; i++)
            to[(unit * RANKS + each - panel) * PER_UNIT + i] = made(from[each * inner_ + unit * PER_UNIT + i], finite);
    return finite;
  }

  // The weights of a target, from [rows, rank], for all vectors of outputs. ``first``: its first rank. Returns the same.
  template <class From>
  bool put_up(const From* from, const LowRankTarget& target, int64_t first, T* to) const {
    bool finite = true;
    for (int64_t row = 0; row < target.rows; row++) {
      const int64_t output = target.start + row;
      const Range& range = ranges_[output / LANES];
      T* lane = to + range.at + (first - range.first) * LANES + output % LANES;
      for (int64_t rank = 0; rank < target.rank; rank++)
        lane[rank * LANES] = made(from[row * target.rank + rank], finite);
    }
    return finite;
  }

  int64_t inner_, units_, ranks_ = 0;
  const T* down_ = nullptr;    // [panels][units][RANKS] units
  const T* up_ = nullptr;      // of each vector, [count][LANES]
  std::vector<Range> ranges_;  // of the vectors of outputs
  std::vector<float> scales_;  // [ranks]
  std::vector<float> factors_, shifts_;  // of outputs; empty if no target has any
};

// The layers of a decoder that adapters can change. Beside: of a state space beside attention.
enum AdaptedPart { INTO, OUT, GATE_UP, DOWN, GATES, BESIDE_INTO, BESIDE_OUT, ADAPTED_PARTS };

template <class T>
struct Adapter {
  using Parts = std::array<std::unique_ptr<LowRank<T>>, ADAPTED_PARTS>;

  // The head is one more layer, with a part of INTO.
  explicit Adapter(int64_t layers) : layers(layers + 1) {}

  const LowRank<T>* part(size_t layer, AdaptedPart part) const { return layers[layer][part].get(); }

  std::vector<Parts> layers;
  Arena arena;
};

// The adapters of a decoder, and which token of a step has which.
template <class T>
class Adapting {
 public:
  // ``adapter`` is that of ``slot`` from now on, or null.
  void set(int64_t slot, const Adapter<T>* adapter) {
    require(slot > 0, "adapters have slots from 1 on");
    if (slot >= static_cast<int64_t>(slots_.size())) slots_.resize(slot + 1, nullptr);
    slots_[slot] = adapter;
  }

  // Throws InvalidArguments if a row's slot is empty. ``slots``: [rows], 0 for none; or null.
  void begin(const int64_t* slots, const Rows& rows, int64_t tokens, size_t layers) {
    groups_.clear();
    if (slots == nullptr) return;
    of_token_.assign(tokens, nullptr);
    chosen_.clear();
    for (int64_t row = 0; row < rows.count; row++) {
      const int64_t slot = slots[row];
      if (slot == 0) continue;
      const bool known = slot > 0 && slot < static_cast<int64_t>(slots_.size()) && slots_[slot] != nullptr;
      require(known, "a row's adapter is not there");
      for (int64_t token = rows.starts[row]; token < rows.starts[row + 1]; token++) {
        of_token_[token] = slots_[slot];
        chosen_.push_back(token);
      }
    }
    group(tokens, 0, layers);
  }

  // The same of some tokens of a step, [count], for its layer ``last``.
  void begin(const Adapting& step, const int64_t* tokens, int64_t count, size_t last) {
    groups_.clear();
    if (!step.any()) return;
    of_token_.assign(count, nullptr);
    chosen_.clear();
    for (int64_t i = 0; i < count; i++) {
      const Adapter<T>* adapter = step.of_token_[tokens[i]];
      if (adapter == nullptr || adapter->part(last, INTO) == nullptr) continue;
      of_token_[i] = adapter;
      chosen_.push_back(i);
    }
    group(count, last, last + 1);
  }

  bool any() const { return !groups_.empty(); }

  // A phase, if any row has an adapter: what adapters make of a layer's inputs.
  void shrink(Worker& worker, size_t layer, AdaptedPart part, const Inputs<T>& inputs) {
    if (groups_.empty()) return;
    int64_t panels = 0;
    for (const Group& group : groups_)
      if (const LowRank<T>* low = group.adapter->part(layer, part)) panels = std::max(panels, low->panels());
    const int64_t pairs = groups_.size() * panels;
    // Few of them would leave workers without any.
    const bool apart = pairs < 2 * worker.workers() && pairs % worker.workers() != 0;
    worker.parallel_in_runs(apart ? 2 * pairs : pairs, [&](int64_t task) {
      const int64_t pair = apart ? task / 2 : task;
      const Group& group = groups_[pair / panels];
      const LowRank<T>* low = group.adapter->part(layer, part);
      const int64_t panel = pair % panels;
      if (low == nullptr || panel >= low->panels()) return;
      if (!apart) {
        sum(*low, group, panel, pair, 0, inputs), sum(*low, group, panel, pair, 1, inputs);
      } else {
        sum(*low, group, panel, pair, task % 2, inputs);
        // The second to be done has both halves.
        if (done_[pair].fetch_add(1, std::memory_order_acq_rel) % 2 == 0) return;
      }
      for (int r = 0; r < group.size; r++)
        low->finish(half(pair, 0, r), half(pair, 1, r), panel, ranks(group.tokens[r]));
    });
  }

  // The store of a layer's product, with the summands of the adapters.
  template <class Store>
  auto expanding(size_t layer, AdaptedPart part, const Linear<T>& linear, Store&& store) const {
    // From the first vector of a panel to the second, and to the next panel's.
    const int64_t other_from = linear.gated ? linear.outputs / LANES : 1, step = linear.gated ? 1 : 2;
    return [this, layer, part, other_from, step, any = any(), store = std::forward<Store>(store)](
               const Place& place, int64_t panel, Floats one, Floats other) mutable {
      if (any) add(place.row, layer, part, panel * step, panel * step + other_from, AHEAD * step, one, other);
      store(place, panel, one, other);
    };
  }

 private:
  // Rows that read the weights together; and panels from one to that whose weights are fetched meanwhile, as many as
  // are multiplied at once.
  static constexpr int ROWS = 4, AHEAD = 4;

  struct Group {
    const Adapter<T>* adapter;
    int size;
    std::array<int64_t, ROWS> tokens;
  };

  // Tokens of one adapter in groups, and memory for the ranks of the layers [first, last).
  void group(int64_t tokens, size_t first, size_t last) {
    std::stable_sort(chosen_.begin(), chosen_.end(),
                     [&](int64_t a, int64_t b) { return std::less<>()(of_token_[a], of_token_[b]); });
    for (int64_t token : chosen_) {
      if (groups_.empty() || groups_.back().size == ROWS || groups_.back().adapter != of_token_[token])
        groups_.push_back({of_token_[token], 0, {}});
      Group& group = groups_.back();
      group.tokens[group.size++] = token;
    }
    width_ = 0;
    for (const Group& group : groups_)
      for (size_t layer = first; layer < last; layer++)
        for (const auto& part : group.adapter->layers[layer])
          if (part != nullptr) width_ = std::max(width_, part->ranks());
    grow(ranks_, tokens * width_);
    const int64_t pairs = groups_.size() * (width_ / RANKS);
    grow(halves_, pairs * 2 * ROWS * RANKS);
    if (static_cast<int64_t>(done_.size()) < pairs) done_ = std::vector<std::atomic<uint32_t>>(pairs);
  }

  // Half of the sums of a panel for the rows of a group.
  void sum(const LowRank<T>& low, const Group& group, int64_t panel, int64_t pair, int which, const Inputs<T>& inputs) {
    thread_local Buffer<T> numbers;
    grow(numbers, ROWS * low.inner());
    with_height<ROWS>(group.size, [&](auto height) {
      constexpr int HEIGHT = decltype(height)::value;
      const T* rows[HEIGHT];
      float* to[HEIGHT];
      for (int r = 0; r < HEIGHT; r++) {
        rows[r] = inputs.numbers(group.tokens[r], numbers.data() + r * low.inner());
        to[r] = half(pair, which, r);
      }
      low.template shrink<HEIGHT>(rows, panel, which, to);
    });
  }

  float* half(int64_t pair, int which, int row) { return halves_.data() + ((pair * 2 + which) * ROWS + row) * RANKS; }

  // Kept out of the products of rows without adapters.
  __attribute__((noinline)) void add(int64_t token, size_t layer, AdaptedPart part, int64_t first, int64_t second,
                                     int64_t ahead, Floats& one, Floats& other) const {
    const Adapter<T>* adapter = of_token_[token];
    const LowRank<T>* low = adapter == nullptr ? nullptr : adapter->part(layer, part);
    if (low == nullptr) return;
    low->expand(ranks(token), first, ahead, one);
    low->expand(ranks(token), second, ahead, other);
  }

  float* ranks(int64_t token) { return ranks_.data() + token * width_; }
  const float* ranks(int64_t token) const { return ranks_.data() + token * width_; }

  std::vector<const Adapter<T>*> slots_;     // by slot; 0 is none
  std::vector<const Adapter<T>*> of_token_;  // null for none
  std::vector<int64_t> chosen_;              // tokens with adapters
  std::vector<Group> groups_;
  Buffer<float> ranks_;  // [tokens, width_], of the layer that is computed
  Buffer<float> halves_;  // [pairs of a group and a panel, 2, ROWS, RANKS]
  std::vector<std::atomic<uint32_t>> done_;  // halves of a pair; of an even number, both
  int64_t width_ = 0;
};

}  // namespace aioinfer
