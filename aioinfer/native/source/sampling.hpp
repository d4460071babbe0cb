// Sampling: from logits and the parameters of rows to one token per row; see aioinfer.sampling.sampler.
//
// A row is divided into stretches of tokens. A pass computes the stretches on any thread and in any order; then one
// thread settles the row:
//
//   scan     the largest logits                          ─► the maximum; greedy and broken rows have their token
//   weigh    exact mass, if there is top-p alone         ─► from the largest a bound that survivors do not fall below
//   collect  logits above the bound, with top-k or top-p ─► the floor, from these few, or from all if they are many
//   draw     noise of what is not below the floor        ─► the token
//
// The bound is tight because likely tokens rarely share a group, of which there is one per stretch and lane: about
// k + k^2 / 2N tokens are above the least of the k largest of N maxima. Rows too flat for a bound with top-p are
// searched whole.
//
// Maxima, counts and whole masses are exact in any order, and of equal sums the lower id is taken: a token is a
// function of its own row.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "filters.hpp"
#include "thread_pool.hpp"

namespace aioinfer {

// A row's noise; see aioinfer.sampling.noise for the function and its constants.
class Noise {
 public:
  // An upper bound, with a margin.
  static constexpr float MOST = 22.5f;

  Noise(int64_t seed, int64_t position) {
    const uint64_t key = mix(mix(static_cast<uint64_t>(seed) + G) + static_cast<uint64_t>(position) * G);
    low_ = static_cast<uint32_t>(key), high_ = static_cast<uint32_t>(key >> 32);
  }

  // 31 random bits for a token or a vector of them.
  template <class W>
  AIOINFER_INLINE W bits(W token) const {
    W x = token + low_;
    x = (x ^ x >> 17) * 0xED5AD4BBu + high_;
    x = (x ^ x >> 11) * 0xAC4C1B51u;
    x = (x ^ x >> 15) * 0x31848BABu;
    return (x ^ x >> 14) & 0x7fffffffu;
  }

  // Gumbel noise from the bits. It is computed for few tokens, so double precision costs little.
  static float gumbel(uint32_t bits) {
    const float u = std::min((static_cast<float>(bits) + 0.5f) * 0x1p-31f, 1.0f - 0x1p-24f);
    const float inner = -static_cast<float>(std::log1p(-static_cast<double>(u)));
    return -static_cast<float>(std::log(static_cast<double>(inner)));
  }

  float operator()(int64_t token) const { return gumbel(bits(static_cast<uint32_t>(token))); }

 private:
  static constexpr uint64_t G = 0x9E3779B97F4A7C15u;

  static uint64_t mix(uint64_t h) {
    h = (h ^ h >> 33) * 0xFF51AFD7ED558CCDu;
    h = (h ^ h >> 33) * 0xC4CEB9FE1A85EC53u;
    return h ^ h >> 33;
  }

  uint32_t low_, high_;
};

// The parameters of a row; neutral values are off.
struct RowParameters {
  float temperature, top_p, min_p;
  int64_t top_k, seed, position;
};

class SampledRow {
 public:
  // ``logits`` must not change before the token is written.
  SampledRow(const float* logits, int64_t vocab, const RowParameters& parameters, int64_t bad, int64_t* token)
      : logits_(logits),
        vocab_(vocab),
        stretches_(stretches(vocab)),
        parameters_(parameters),
        // A top-k of the whole vocabulary is off, and so is none.
        top_k_(parameters.top_k > 0 && parameters.top_k < vocab ? parameters.top_k : 0),
        bad_(bad),
        token_(token),
        masses_(vocab),
        noise_(parameters.seed, parameters.position),
        maxima_(std::make_unique_for_overwrite<float[]>(stretches_ * LANES)),
        parts_(std::make_unique<Part[]>(stretches_)),
        listed_(std::make_unique_for_overwrite<float[]>(filtered() ? LISTED : 0)) {}

  static int64_t stretches(int64_t vocab) { return (vocab + STRETCH - 1) / STRETCH; }

  void scan(int64_t stretch) {
    Floats most = Floats{} - INFINITY;
    Ints sound = ~Ints{};
    for (int64_t at = begin(stretch); at < end(stretch); at += LANES) {
      const Floats logit = piece(logits_, at, vocab_);
      sound &= logit < INFINITY;
      most = larger(logit, most);
    }
    store(maxima_.get() + stretch * LANES, most);
    parts_[stretch].best = largest(most);
    parts_[stretch].sound = lanes_of(sound) == lanes_of(~Ints{});
  }

  void settle_scan() {
    int64_t first = 0;
    bool sound = true;
    for (int64_t i = 0; i < stretches_; i++) {
      sound &= parts_[i].sound;
      if (parts_[i].best > parts_[first].best) first = i;
    }
    scale_ = {parts_[first].best, std::max(parameters_.temperature, COLDEST)};
    settled_ = true;
    if (!sound || scale_.peak == -INFINITY) return void(*token_ = bad_);
    for (likeliest_ = begin(first); logits_[likeliest_] != scale_.peak;) likeliest_++;
    *token_ = likeliest_;
    settled_ = parameters_.temperature == 0;
  }

  void weigh(int64_t stretch) {
    if (settled_ || top_k_ || !filtered()) return;
    const int64_t from = begin(stretch);
    parts_[stretch].mass = masses_.sum(logits_ + from, end(stretch) - from, scale_);
  }

  void settle_weigh() {
    whole_ = true;
    if (settled_ || !filtered()) return;
    const int64_t groups = stretches_ * LANES;
    float* maxima = maxima_.get();
    float bound = -INFINITY;
    if (top_k_) {
      if (top_k_ > groups) return;
      std::nth_element(maxima, maxima + top_k_ - 1, maxima + groups, std::greater<>());
      bound = scale_(maxima[top_k_ - 1]);
    } else {
      for (int64_t i = 0; i < stretches_; i++) mass_ += parts_[i].mass;
      if (masses_.sum(maxima, groups, scale_) < share(mass_)) return;
      bound = smallest_surviving(maxima, groups, scale_, masses_, share(mass_));
    }
    if (bound == -INFINITY) return;
    from_ = scale_.lowest(bound);
    whole_ = false;
  }

  void collect(int64_t stretch) {
    if (settled_ || whole_) return;
    for (int64_t at = begin(stretch); at < end(stretch); at += LANES) {
      const Floats logit = piece(logits_, at, vocab_);
      uint32_t above = lanes_of(logit >= from_);
      if (!above) continue;
      int64_t to = length_.fetch_add(std::popcount(above), std::memory_order_relaxed);
      if (to > LISTED - LANES) return;
      for (; above; above &= above - 1) listed_[to++] = logits_[at + std::countr_zero(above)];
    }
  }

  void settle_collect() {
    if (settled_) return;
    const int64_t length = length_.load(std::memory_order_relaxed);
    if (length > LISTED - LANES) whole_ = true;
    float floor = whole_ ? floor_among(logits_, vocab_) : floor_among(listed_.get(), length);
    if (parameters_.min_p > 0) floor = std::max(floor, static_cast<float>(std::log(double{parameters_.min_p})));
    first_ = noise_(likeliest_);
    // Tokens that no noise can lift above the likeliest token and its noise are skipped.
    from_ = scale_.lowest(std::max(floor, first_ - Noise::MOST));
  }

  void draw(int64_t stretch) {
    if (settled_) return;
    typedef uint32_t Lanes[LANES];
    Lanes order;
    for (int lane = 0; lane < LANES; lane++) order[lane] = lane;
    const float per_heat = 1.0f / scale_.heat;
    float best = first_;
    int64_t token = likeliest_;
    for (int64_t at = begin(stretch); at < end(stretch); at += LANES) {
      const Floats logit = piece(logits_, at, vocab_);
      const Ints survives = logit >= from_;
      if (!lanes_of(survives)) continue;
      const Words bits = noise_.bits(load<Words>(order) + static_cast<uint32_t>(at));
      const Floats lead = (logit - scale_.peak) * per_heat - best;
      Lanes random;
      store(random, bits);
      for (uint32_t left = lanes_of(survives & may_win(bits, lead)); left; left &= left - 1) {
        const int lane = std::countr_zero(left);
        const float sum = scale_(logits_[at + lane]) + Noise::gumbel(random[lane]);
        if (sum > best || (sum == best && at + lane < token)) best = sum, token = at + lane;
      }
    }
    parts_[stretch].best = best, parts_[stretch].token = token;
  }

  void settle_draw() {
    if (settled_) return;
    const Part* best = &parts_[0];
    for (int64_t i = 1; i < stretches_; i++)
      if (parts_[i].best > best->best || (parts_[i].best == best->best && parts_[i].token < best->token))
        best = &parts_[i];
    *token_ = best->token;
  }

 private:
  // tokens
  static constexpr int64_t STRETCH = 1024;
  // logits that are listed, with room for a vector more
  static constexpr int64_t LISTED = 8192;
  // The lowest temperature; lower ones are raised to it.
  static constexpr float COLDEST = 1e-37f;

  // Results of a stretch.
  struct Part {
    float best;  // logit, later scaled logit and noise
    bool sound;
    int64_t mass, token;
  };

  bool filtered() const { return top_k_ || parameters_.top_p < 1; }
  int64_t begin(int64_t stretch) const { return stretch * STRETCH; }
  int64_t end(int64_t stretch) const { return std::min(begin(stretch) + STRETCH, vocab_); }

  // The least whole mass that is top-p of ``mass``.
  int64_t share(int64_t mass) const {
    return static_cast<int64_t>(std::ceil(double{parameters_.top_p} * static_cast<double>(mass)));
  }

  // The floor of top-k and top-p, found among logits that contain all survivors.
  float floor_among(const float* logits, int64_t count) {
    float floor = -INFINITY;
    if (top_k_) floor = threshold(logits, count, Ones{}, top_k_);
    if (parameters_.top_p == 1) return floor;
    const int64_t mass = top_k_ ? masses_.sum(logits, count, scale_, floor) : mass_;
    return std::max(floor, threshold(logits, count, masses_, share(mass)));
  }

  // With many logits the list is not in use, and its memory is free.
  template <class Weigh>
  float threshold(const float* logits, int64_t count, const Weigh& weigh, int64_t target) {
    Narrowed among{logits, count, target};
    if (count > LISTED) among = narrowed(logits, count, scale_, weigh, target, listed_.get(), LISTED - LANES);
    return smallest_surviving(among.logits, among.count, scale_, weigh, among.target);
  }

  // Whether a scaled logit with noise from ``bits`` may reach the best so far, which the scaled logit is ``lead``
  // above. The noise of u is at most -log(u), so u must not exceed e^lead, nor 2^i (1 + f) for i + f =
  // lead / ln 2, which are the bits of a float. The margin covers rounding.
  static AIOINFER_INLINE Ints may_win(Words bits, Floats lead) {
    Floats power = lead * 1.44269504088896341f + 0.01f;
    power = power > -126.0f ? power : spread(-126.0f);
    power = power < 100.0f ? power : spread(100.0f);
    const Floats most = cast<Floats>(__builtin_convertvector(power * 0x1p23f, Ints) + (127 << 23));
    return __builtin_convertvector(cast<Ints>(bits), Floats) * 0x1p-31f <= most;
  }

  const float* logits_;
  int64_t vocab_, stretches_;
  RowParameters parameters_;
  int64_t top_k_, bad_;
  int64_t* token_;
  Masses masses_;
  Noise noise_;
  // by stretch, and lane
  std::unique_ptr<float[]> maxima_;
  std::unique_ptr<Part[]> parts_;
  std::unique_ptr<float[]> listed_;
  std::atomic<int64_t> length_{0};
  Scale scale_{};
  // the token is known; all logits are searched, not the list
  bool settled_ = false, whole_ = true;
  int64_t likeliest_ = 0, mass_ = 0;
  // lowest logit that is collected or drawn
  float from_ = 0;
  // scaled logit and noise of the likeliest token
  float first_ = 0;
};

// Sample rows of ``stretches`` each: row by row if there are enough rows for all workers, else by stretches.
inline void sample(Worker& worker, int workers, std::vector<std::unique_ptr<SampledRow>>& rows, int64_t stretches) {
  struct Pass {
    void (SampledRow::*part)(int64_t);
    void (SampledRow::*settle)();
  };
  static constexpr Pass PASSES[] = {
      {&SampledRow::scan, &SampledRow::settle_scan},
      {&SampledRow::weigh, &SampledRow::settle_weigh},
      {&SampledRow::collect, &SampledRow::settle_collect},
      {&SampledRow::draw, &SampledRow::settle_draw},
  };
  const int64_t count = static_cast<int64_t>(rows.size());
  if (count >= 4 * workers) {
    worker.parallel(count, [&](int64_t row) {
      for (const Pass& pass : PASSES) {
        for (int64_t i = 0; i < stretches; i++) ((*rows[row]).*pass.part)(i);
        ((*rows[row]).*pass.settle)();
      }
    });
    return;
  }
  for (const Pass& pass : PASSES) {
    worker.parallel_in_runs(count * stretches, [&](int64_t i) { ((*rows[i / stretches]).*pass.part)(i % stretches); });
    worker.parallel(count, [&](int64_t row) { ((*rows[row]).*pass.settle)(); });
  }
}

}  // namespace aioinfer
