// The part of the interface that turns logits into tokens. Compiled without contraction of products and sums, so that
// every operation rounds on its own, as it does in torch, and the same expression gives the same bits everywhere.
#include "sampling.hpp"

#include "interface.hpp"
#include "logprobs.hpp"
#include "logits_processors.hpp"

using namespace aioinfer;

namespace {

ThreadPool& team_of(void* team) { return *static_cast<ThreadPool*>(team); }

// What greedy rows of so many tokens take is less than to wake a team.
constexpr int64_t LITTLE = 1 << 19;

}  // namespace

extern "C" {

// ``tokens`` [rows] from ``logits`` [rows, vocab], rows ``stride`` apart, and parameters [rows]; ``bad`` for rows with
// NaN or infinity, or without anything that can be sampled. Of ``bans`` pairs of row and id none is sampled; that is
// written into the logits, and undone.
bool aioinfer_sample(void* team, float* logits, int64_t rows, int64_t vocab, int64_t stride, const float* temperature,
                     const float* top_p, const float* min_p, const int64_t* top_k, const int64_t* seeds,
                     const int64_t* positions, int64_t bans, const int64_t* banned_rows, const int64_t* banned_ids,
                     int64_t bad, int64_t* tokens) {
  return guarded(false, [&] {
    static thread_local ThreadPool alone(1);
    const bool little = rows * vocab <= LITTLE && std::none_of(temperature, temperature + rows, [](float t) { return t; });
    ThreadPool& those = little ? alone : team_of(team);
    std::vector<std::unique_ptr<SampledRow>> sampled;
    for (int64_t i = 0; i < rows; i++) {
      const RowParameters asked{temperature[i], top_p[i], min_p[i], top_k[i], seeds[i], positions[i]};
      sampled.push_back(std::make_unique<SampledRow>(logits + i * stride, vocab, asked, bad, tokens + i));
    }
    std::vector<float> before(bans);
    const auto banned = [&](int64_t i) -> float& { return logits[banned_rows[i] * stride + banned_ids[i]]; };
    // What is broken stays so, for whoever looks for it: NaN, and infinity as NaN.
    for (int64_t i = 0; i < bans; i++) before[i] = banned(i), banned(i) += -INFINITY;
    those.run([&](Member& member) { sample(member, those.size(), sampled, SampledRow::stretches(vocab)); });
    for (int64_t i = bans; i--;) banned(i) = before[i];
    return true;
  });
}

// ``out`` [rows, vocab]: penalised logits. Counts [.., vocab] of a row are those of line ``lines[slots[row]]``, which
// line 0 has none of.
bool aioinfer_penalise(void* team, const float* logits, int64_t rows, int64_t vocab, int64_t stride,
                       const int32_t* counts, const int64_t* lines, const int64_t* slots, const float* repetition,
                       const float* presence, const float* frequency, int64_t in_prompt, float* out) {
  return guarded(false, [&] {
    team_of(team).run([&](Member& member) {
      member.parallel(rows * spans(vocab), [&](int64_t i) {
        const int64_t row = i / spans(vocab), from = i % spans(vocab) * SPAN;
        const Penalties penalties{repetition[row], presence[row], frequency[row]};
        penalise(logits + row * stride + from, counts + lines[slots[row]] * vocab + from, std::min(SPAN, vocab - from),
                 penalties, static_cast<int32_t>(in_prompt), out + row * vocab + from);
      });
    });
    return true;
  });
}

// Apply ``masks`` [count, words] to the rows [count] of logits that they belong to.
bool aioinfer_apply_masks(void* team, float* logits, int64_t vocab, int64_t stride, int64_t count, const int64_t* rows,
                          const uint32_t* masks, int64_t words) {
  return guarded(false, [&] {
    team_of(team).run([&](Member& member) {
      member.parallel(count * spans(vocab), [&](int64_t i) {
        const int64_t mask = i / spans(vocab), from = i % spans(vocab) * SPAN;
        forbid(logits + rows[mask] * stride, from, std::min(from + SPAN, vocab), masks + mask * words, words);
      });
    });
    return true;
  });
}

// ``totals`` [2, count]: what makes logits of the rows [count, vocab] logprobs when it is subtracted, in that order.
// ``likeliest`` [count, top] logprobs and ``ids`` of the likeliest tokens.
bool aioinfer_logprobs(void* team, const float* logits, int64_t vocab, int64_t stride, int64_t count,
                       int64_t top, float* totals, float* likeliest, int64_t* ids) {
  return guarded(false, [&] {
    const int64_t groups = Likelihoods::groups(vocab);
    const auto maxima = std::make_unique_for_overwrite<float[]>(team_of(team).size() * groups);
    team_of(team).run([&](Member& member) {
      member.parallel(count, [&](int64_t row) {
        Likelihoods likelihoods(logits + row * stride, vocab, maxima.get() + member.index() * groups);
        totals[row] = likelihoods.peak(), totals[count + row] = likelihoods.log_total();
        likelihoods.likeliest(top, likeliest + row * top, ids + row * top);
      });
    });
    return true;
  });
}
}
