// The entry points that turn logits into tokens; see interface.hpp for their arguments. Compiled without contraction of
// products and sums: every operation rounds by itself, as in torch, and an expression has the same bits everywhere.
#include "sampling.hpp"

#include "interface.hpp"
#include "logprobs.hpp"
#include "logits_processors.hpp"

using namespace aioinfer;

namespace {

// Greedy rows of up to this many logits take less time than waking the pool does.
constexpr int64_t LITTLE = 1 << 19;

}  // namespace

extern "C" {

bool aioinfer_sample(const SampleArguments* a) {
  return guarded(false, [&] {
    require(a->rows >= 0 && a->vocab > 0, "there is no token to sample");
    require_below("banned_rows", a->banned_rows, a->bans, a->rows);
    require_below("banned_ids", a->banned_ids, a->bans, a->vocab);
    static thread_local ThreadPool alone{ThreadPool::Alone{}};
    const bool greedy = std::none_of(a->temperature, a->temperature + a->rows, [](float t) { return t; });
    ThreadPool& pool = greedy && a->rows * a->vocab <= LITTLE ? alone : *a->pool;
    std::vector<std::unique_ptr<SampledRow>> sampled;
    for (int64_t i = 0; i < a->rows; i++) {
      const RowParameters row{a->temperature[i], a->top_p[i], a->min_p[i], a->top_k[i], a->seeds[i], a->positions[i]};
      sampled.push_back(std::make_unique<SampledRow>(a->logits + i * a->stride, a->vocab, row, a->bad, a->tokens + i));
    }
    std::vector<float> before(a->bans);
    const auto banned = [&](int64_t i) -> float& { return a->logits[a->banned_rows[i] * a->stride + a->banned_ids[i]]; };
    // Adding -inf keeps a broken row broken: NaN stays NaN, and infinity becomes NaN.
    for (int64_t i = 0; i < a->bans; i++) before[i] = banned(i), banned(i) += -INFINITY;
    pool.run([&](Worker& worker) { sample(worker, pool.size(), sampled, SampledRow::stretches(a->vocab)); });
    for (int64_t i = a->bans; i--;) banned(i) = before[i];
    return true;
  });
}

bool aioinfer_penalise(const PenaliseArguments* a) {
  return guarded(false, [&] {
    const int64_t vocab = a->vocab;
    require(vocab > 0 && a->rows >= 0, "there are no logits");
    require_below("slots", a->slots, a->rows, a->num_slots);
    require_below("row_of", a->row_of, a->num_slots, a->lines);
    a->pool->run([&](Worker& worker) {
      worker.parallel(a->rows * spans(vocab), [&](int64_t i) {
        const int64_t row = i / spans(vocab), from = i % spans(vocab) * SPAN;
        const Penalties penalties{a->repetition[row], a->presence[row], a->frequency[row]};
        const int32_t* counts = a->counts + a->row_of[a->slots[row]] * vocab + from;
        penalise(a->logits + row * a->stride + from, counts, std::min(SPAN, vocab - from), penalties,
                 static_cast<int32_t>(a->in_prompt), a->out + row * vocab + from);
      });
    });
    return true;
  });
}

bool aioinfer_apply_masks(const MasksArguments* a) {
  return guarded(false, [&] {
    const int64_t vocab = a->vocab, words = a->words;
    require(vocab > 0 && words >= 0, "there are no logits");
    require_below("rows", a->rows, a->count, a->num_rows);
    a->pool->run([&](Worker& worker) {
      worker.parallel(a->count * spans(vocab), [&](int64_t i) {
        const int64_t mask = i / spans(vocab), from = i % spans(vocab) * SPAN;
        forbid(a->logits + a->rows[mask] * a->stride, from, std::min(from + SPAN, vocab), a->masks + mask * words, words);
      });
    });
    return true;
  });
}

bool aioinfer_logprobs(const LogprobsArguments* a) {
  return guarded(false, [&] {
    require(a->vocab > 0 && a->count >= 0, "there are no logits");
    require(a->top >= 0 && a->top <= a->vocab, "top is not in [0, vocab]");
    const int64_t groups = Likelihoods::groups(a->vocab);
    const auto maxima = std::make_unique_for_overwrite<float[]>(a->pool->size() * groups);
    a->pool->run([&](Worker& worker) {
      worker.parallel(a->count, [&](int64_t row) {
        Likelihoods likelihoods(a->logits + row * a->stride, a->vocab, maxima.get() + worker.index() * groups);
        a->totals[row] = likelihoods.peak(), a->totals[a->count + row] = likelihoods.log_total();
        likelihoods.likeliest(a->top, a->top_values + row * a->top, a->top_ids + row * a->top);
      });
    });
    return true;
  });
}
}
