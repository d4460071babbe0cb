// Specimens for programs of tests: a model with layers of all kinds, and products of quantised weights, of numbers that
// are the same wherever they are compiled.
#pragma once

#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "decoder.hpp"

namespace specimens {

using namespace aioinfer;

constexpr int64_t HIDDEN = 48, HEADS = 6, KV_HEADS = 2, HEAD_DIM = 16, MIDDLE = 80, VOCABULARY = 101;
constexpr int64_t EXPERTS = 4, LAYERS = 8, PAGE = 16, PAGES = 12, POSITIONS = 64, INPUT = 16;

// Behind the first layer and one with attention.
constexpr int CONV = 2, DELTA = 3, SPARSE = 4, DUAL = 5, SHARING = 6, LATENT = 7;
constexpr int64_t SIZE = 3, CELLS = 5;
constexpr DeltaShape DELTA_SHAPE{2, 4, 16, 48};
// Of latents, and of the queries and results of their heads: no more than other layers have.
constexpr int64_t RANK = 32, LATENT_HEADS = 3;

// One layer has larger heads than the others.
constexpr int64_t head_dim(int layer) { return layer == SPARSE ? 2 * HEAD_DIM : HEAD_DIM; }

// About normal numbers, without functions of a library that may differ elsewhere.
template <class T>
std::vector<T> noise(size_t count, int seed, float size = 0.3f) {
  std::mt19937 generator(seed);
  std::vector<T> values(count);
  for (T& value : values) {
    uint64_t sum = 0;
    for (int i = 0; i < 12; i++) sum += generator() >> 12;
    value = Number<T>::make((static_cast<float>(sum) * 0x1p-20f - 6.0f) * size);
  }
  return values;
}

template <class T = float>
std::vector<float> floats(size_t count, int seed) {
  std::vector<float> values;
  for (const T value : noise<T>(count, seed, 1.0f)) values.push_back(Number<T>::read(value));
  return values;
}

// A model, and two prompts and a decode of one step.
template <class T>
struct Model {
  // ``bits`` of weights; 0: they are not rounded.
  explicit Model(ThreadPool& pool, int bits = 0)
      : format{bits, bits ? 32 : 0}, scores(pool, routes.data(), nullptr, EXPERTS, HIDDEN, false),
        router(&scores, nullptr, Rule{false, true, EXPERTS, 2, 1, 1, true, 1.0f}),
        scaled(&scores, nullptr, Rule{false, true, EXPERTS, 3, 1, 1, true, 1.0f}, norm.data()) {
    auto pack = [&](int64_t outputs, int64_t inner, bool gated, int seed) {
      const auto rows = noise<T>((gated ? 2 : 1) * outputs * inner, seed);
      weights.push_back(
          std::make_unique<Linear<T>>(Linear<T>::of(pool, rows.data(), nullptr, outputs, inner, gated, format)));
      return weights.back().get();
    };
    const Embedding<T> words{embedding.data(), nullptr, 2.0f, learned.data()};
    decoder = std::make_unique<Decoder<T>>(words, Norm{norm.data(), norm.data()}, pack(VOCABULARY, HIDDEN, false, 9),
                                           POSITIONS, HIDDEN, 1e-6f, 1.0f, 30.0f,
                                           PerLayerSource<T>{table.data(), nullptr,
                                                             pack(LAYERS * INPUT, HIDDEN, false, 90),
                                                             {norm.data(), nullptr}, LAYERS, INPUT, 4.0f, 0.2f, 0.7f});
    // The first layer has norms behind its parts, of all queries and keys, and no gates; one has sinks, gated results,
    // and experts with biases besides a shared one, which has a gate; one has normed values, and experts beside a dense
    // part; the last one has queries only. These two have inputs of their own, and scale the residual.
    const auto biases = noise<T>(2 * MIDDLE, 70), out_biases = noise<T>(HIDDEN, 71);
    std::vector<const Linear<T>*> gate_ups, downs;
    for (int64_t expert = 0; expert < EXPERTS; expert++) {
      gate_ups.push_back(pack(MIDDLE, HIDDEN, true, 50 + expert));
      weights.back()->set_bias(biases.data());
      downs.push_back(pack(HIDDEN, MIDDLE, false, 60 + expert));
      weights.back()->set_bias(out_biases.data());
    }
    experts = std::make_unique<Experts<T>>(EXPERTS, gate_ups.data(), downs.data());
    for (int layer = 0; layer < LAYERS; layer++) {
      const bool first = layer == 0, sparse = layer == SPARSE, dual = layer == DUAL, late = dual || layer == SHARING;
      const Norm plain{norm.data(), nullptr}, none{nullptr, nullptr};
      decoder->add({
          .mixer_norm = first ? none : plain,
          .mixer = mixer(layer, pack),
          .mixer_post_norm = first ? plain : none,
          .mlp_norm = plain,
          .gate_up = pack(MIDDLE, HIDDEN, !first, 30 + layer),
          .down = pack(HIDDEN, MIDDLE, false, 40 + layer),
          .router = sparse ? &router : dual ? &scaled : nullptr,
          .experts = sparse || dual ? experts.get() : nullptr,
          .gate = first || late ? Gate::GELU_TANH : sparse ? Gate::CLAMPED_SILU : Gate::SILU,
          .shared_gate = sparse ? norm.data() : nullptr,
          .mlp_post_norm = first || sparse || late ? plain : none,
          .dual = dual ? Dual{plain, plain, plain, plain} : Dual{},
          .per_layer = late ? PerLayerPart<T>{pack(INPUT, HIDDEN, false, 91 + layer),
                                              pack(HIDDEN, INPUT, false, 98 + layer), Gate::GELU_TANH, plain}
                            : PerLayerPart<T>{},
          .scale = late ? 0.75f : 1.0f,
      });
    }
  }

  template <class Pack>
  decltype(Layer<T>::mixer) mixer(int layer, Pack&& pack) {
    const bool first = layer == 0;
    if (layer == CONV)
      return ShortConv<T>{
          .into = pack(3 * HIDDEN, HIDDEN, false, 10 + layer),
          .conv = {taps.data(), norm.data(), HIDDEN, SIZE},
          .out = pack(HIDDEN, HIDDEN, false, 20 + layer),
          .state = 0,
      };
    if (layer == DELTA)
      return DeltaRule<T>{
          .shape = DELTA_SHAPE,
          .into = pack(DELTA_SHAPE.width(), HIDDEN, false, 10 + layer),
          .gates = pack(2 * DELTA_SHAPE.value_heads, HIDDEN, false, 80),
          .conv = {taps.data(), nullptr, DELTA_SHAPE.channels(), SIZE},
          .rate = rates.data(),
          .bias = norm.data(),
          .norm = norm.data(),
          .eps = 1e-6f,
          .out = pack(HIDDEN, DELTA_SHAPE.values(), false, 20 + layer),
          .state = 1,
      };
    if (layer == LATENT)
      return LatentAttention<T>{
          .heads = LATENT_HEADS,
          .plain = RANK,
          .rotated = HEAD_DIM,
          .rank = RANK,
          .value_dim = RANK,
          .into = pack(2 * RANK + HEAD_DIM, HIDDEN, false, 10 + layer),
          .query_norm = norm.data(),
          .queries = pack(LATENT_HEADS * (RANK + HEAD_DIM), RANK, false, 81),
          .latent_norm = norm.data(),
          .eps = 1e-6f,
          .rotary = {cos.data(), sin.data(), HEAD_DIM},
          .absorb = pack(LATENT_HEADS * RANK, RANK, false, 82),
          .expand = pack(LATENT_HEADS * RANK, RANK, false, 83),
          .out = pack(HIDDEN, LATENT_HEADS * RANK, false, 20 + layer),
          .params = {0.25f, 0.0f, 0, 1},
          .kv = layer,
      };
    const int64_t size = head_dim(layer);
    const bool sparse = layer == SPARSE, sharing = layer == SHARING;
    return SelfAttention<T>{
        .shape = {HEADS, KV_HEADS, size, first ? nullptr : head_norm.data(), 1e-6f, layer == DUAL, sharing},
        .whole_norm = first ? head_norm.data() : nullptr,
        .into = pack((HEADS + (sharing ? 0 : 2 * KV_HEADS) + (sparse ? HEADS : 0)) * size, HIDDEN, false, 10 + layer),
        .gated = sparse,
        .rotary = first ? Rotary<T>{} : Rotary<T>{cos.data(), sin.data(), HEAD_DIM},
        .out = pack(HIDDEN, HEADS * size, false, 20 + layer),
        .params = {0.25f, first ? 20.0f : 0.0f, first ? 0 : 7, 1, sparse ? sinks.data() : nullptr},
        .kv = sharing ? DUAL : layer,
    };
  }

  // ``adapters``: of the three rows; or null.
  std::vector<float> forward(ThreadPool& pool, const int64_t* adapters = nullptr) {
    const int64_t lengths[] = {33, 17, 1}, tables[] = {3, 7, 1, 5, 2, 0, 9, 0, 0};
    std::vector<int64_t> starts{0}, ids, positions, cells, chosen;
    for (int row = 0; row < 3; row++) {
      for (int64_t at = 0; at < lengths[row]; at++) {
        ids.push_back((7 * at + row) % VOCABULARY);
        positions.push_back(at);
        cells.push_back(tables[3 * row + at / PAGE] * PAGE + at % PAGE);
      }
      starts.push_back(static_cast<int64_t>(ids.size()));
    }
    for (size_t at = 0; at < ids.size(); at++) chosen.push_back(static_cast<int64_t>(at));
    std::vector<std::vector<T>> cells_of;
    std::vector<T*> kv_pools;
    for (int layer = 0; layer < LAYERS; layer++)
      cells_of.emplace_back(PAGES * PAGE * KV_HEADS * 2 * head_dim(layer), Number<T>::make(NAN));
    for (auto& kv : cells_of) kv_pools.push_back(kv.data());
    std::vector<float> logits(ids.size() * VOCABULARY);
    const AttentionInput attention{static_cast<int64_t>(ids.size()), cells.data(), positions.data(),
                                   Rows{3, starts.data(), lengths, tables, 3}};
    double seconds[PARTS] = {};
    // The first row starts from zeros, the second writes the cell that it reads, and the third another one.
    const int64_t read[] = {0, 2, 4}, write[] = {1, 2, 3};
    auto conv_state = noise<T>(CELLS * (SIZE - 1) * HIDDEN, 90);
    auto delta_inputs = noise<T>(CELLS * (SIZE - 1) * DELTA_SHAPE.channels(), 91);
    auto delta_state = floats<T>(CELLS * DELTA_SHAPE.state_size(), 92);
    void* const states[] = {conv_state.data(), delta_inputs.data(), delta_state.data()};
    const auto count = static_cast<int64_t>(chosen.size());
    decoder->forward(pool, {ids.data(), attention, kv_pools.data(), LAYERS, PAGE, PAGES, {read, write, CELLS}, states,
                            nullptr, 3, count, chosen.data(), logits.data(), adapters, 0, nullptr, nullptr},
                     seconds);
    logits.insert(logits.end(), delta_state.begin(), delta_state.end());
    return logits;
  }

  Format format;
  std::vector<T> embedding = noise<T>(VOCABULARY * HIDDEN, 1), learned = noise<T>(POSITIONS * HIDDEN, 7);
  std::vector<T> table = noise<T>(VOCABULARY * LAYERS * INPUT, 89);
  std::vector<float> norm = floats<T>(HIDDEN, 2), head_norm = floats<T>((HEADS + 2 * KV_HEADS) * 2 * HEAD_DIM, 3);
  std::vector<float> sinks = floats<T>(HEADS, 8), taps = floats<T>(SIZE * DELTA_SHAPE.channels(), 9);
  std::vector<float> rates = std::vector<float>(DELTA_SHAPE.value_heads, 0.05f);
  std::vector<T> cos = noise<T>(POSITIONS * HEAD_DIM, 4), sin = noise<T>(POSITIONS * HEAD_DIM, 5);
  std::vector<float> routes = floats<T>(EXPERTS * HIDDEN, 6);
  Weights<float> scores;
  Router<T> router, scaled;
  std::unique_ptr<Experts<T>> experts;
  std::vector<std::unique_ptr<Linear<T>>> weights;
  std::unique_ptr<Decoder<T>> decoder;
};

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), sizeof(float) * a.size()) == 0;
}

// Products of few rows with quantised weights, whose scales and offsets are steps, one behind the other in a program.
template <class T>
struct Products {
  static constexpr int64_t OUTPUTS = 70, INNER = 512, MOST = 25;

  explicit Products(ThreadPool& pool) {
    const Table numbers{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    for (const auto& [bits, group, table] :
         {std::tuple{4, 32, false}, {6, 16, false}, {8, 128, false}, {4, 16, true}, {4, 64, true}}) {
      const QuantisedShape shape(OUTPUTS, INNER, group, bits, false, table ? numbers.data() : nullptr);
      std::mt19937 generator(bits);
      std::vector<uint8_t> values(OUTPUTS * INNER);
      for (auto& value : values) value = generator() % (1 << bits);
      std::vector<float> scales(OUTPUTS * shape.groups());
      for (auto& scale : scales) scale = static_cast<float>(generator() % 64) * 0.001f;
      layers.emplace_back(QuantisedWeights(pool, shape, values.data(), scales.data(), scales.data(), nullptr));
    }
  }

  bool all_in_steps() const {
    return std::all_of(layers.begin(), layers.end(),
                       [](const Linear<T>& layer) { return layer.quantised()->precision == Precision::STEPS; });
  }

  std::vector<float> multiply_all(ThreadPool& pool, int64_t rows) const {
    std::vector<InputBuffer<T>> buffers(layers.size());
    std::vector<std::vector<T>> found(layers.size(), std::vector<T>(rows * OUTPUTS));
    for (size_t at = 0; at < layers.size(); at++) buffers[at].reserve(layers[at], rows, false);
    pool.run_model([&](Worker& worker) {
      for (size_t at = 0; at < layers.size(); at++) {
        const Inputs<T> inputs = buffers[at].inputs(layers[at], rows);
        worker.parallel_in_runs(rows, [&](int64_t row) { inputs.set(row, values.data() + row * INNER); });
        multiply(worker, inputs, layers[at], [&](const Place& place, int64_t panel, Floats one, Floats other) {
          put_pair(found[at].data() + place.row * OUTPUTS, panel, OUTPUTS, one, other);
        });
      }
    });
    std::vector<float> results;
    for (const auto& each : found)
      for (const T value : each) results.push_back(Number<T>::read(value));
    return results;
  }

  std::vector<Linear<T>> layers;
  std::vector<T> values = noise<T>(MOST * INNER, 1);
};

}  // namespace specimens
