// The bits of kernels: a line for each result, "class name hash". Lines of equal class and name must have equal hashes
// wherever they are computed: see test_bits.py. Returns 1 if a result depends on its company, or on a processor where it
// may not.
//
// Classes: "exact" is the same everywhere; "float" where aioinfer_arithmetic() is not "unfused" or "tiles"; others are
// what it says.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>

#include "logprobs.hpp"
#include "specimens.hpp"

using namespace aioinfer;
using namespace specimens;

extern "C" {
const char* aioinfer_arithmetic();
const char* aioinfer_instructions();
bool aioinfer_sample(const SampleArguments*);
bool aioinfer_logprobs(const LogprobsArguments*);
}

namespace {

int wrong = 0;

void check(bool holds, const char* what, int64_t which = 0) {
  if (!holds) std::printf("wrong: %s %lld\n", what, static_cast<long long>(which)), wrong = 1;
}

class Hash {
 public:
  template <class V>
  void add(const V* from, size_t count) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(from);
    for (size_t i = 0; i < count * sizeof(V); i++) hash_ = (hash_ ^ bytes[i]) * 0x100000001b3u;
  }
  template <class V>
  void add(const std::vector<V>& values) {
    add(values.data(), values.size());
  }
  void print(const std::string& of, const std::string& name) const {
    std::printf("%s: %s: %016llx\n", of.c_str(), name.c_str(), static_cast<unsigned long long>(hash_));
  }

 private:
  uint64_t hash_ = 0xcbf29ce484222325u;
};

// The class of results of the arithmetic of vectors.
std::string vectors() {
  const std::string arithmetic = aioinfer_arithmetic();
  return arithmetic == "unfused" ? arithmetic : "float";
}

// The same of a model: tiles compute attention in an order of their own, and BFDOT packed bfloat16.
template <class T>
std::string of_model(bool packed) {
  const std::string arithmetic = aioinfer_arithmetic();
  if (Number<T>::PER_UNIT == 1) return vectors();
  return packed || arithmetic == "tiles" ? arithmetic == "fused" ? "float" : arithmetic : vectors();
}

// -- functions ------------------------------------------------------------------------------------------------------

void print_functions() {
  // Every 15,616th float, of both signs and with NaN, whose payload is not compared.
  const auto print = [](const std::string& name, auto&& function) {
    Hash hash;
    for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += 15616) {
      const float found = function(spread(cast<float>(static_cast<uint32_t>(bits))))[0], zero = 0.0f;
      hash.add(std::isnan(found) ? &zero : &found, 1);
    }
    hash.print(vectors(), name);
  };
  print("exponentials", [](Floats x) { return exponential(x); });
  print("tangents", [](Floats x) { return hyperbolic_tangent(x); });
  const NoDenormals no_denormals;
  print("exponentials without denormals", [](Floats x) { return exponential(x); });
  print("sums without denormals", [](Floats x) { return multiply_add(x, x, spread(0x1p-3f)) + rounded<bfloat16>(x * 0x1p-20f); });
}

void print_sums() {
  Hash hash;
  for (const int64_t size : {16, 48, 80, 1024}) {
    const auto numbers = noise<float>(size, 1), narrow = floats<bfloat16>(size, 2);
    const float mean = mean_of(numbers.data(), size);
    const float found[] = {mean, inverse_rms(numbers.data(), size, 1e-6f), inverse_rms(narrow.data(), size, 1e-6f),
                           inverse_deviation(numbers.data(), size, mean, 1e-6f)};
    hash.add(found, 4);
  }
  hash.print(vectors(), "norms");
}

// -- products -------------------------------------------------------------------------------------------------------

template <class T>
std::vector<T> multiplied(ThreadPool& pool, const Linear<T>& layer, const std::vector<T>& values, int64_t rows) {
  InputBuffer<T> buffer;
  buffer.reserve(layer, rows, false);
  const Inputs<T> inputs = buffer.inputs(layer, rows);
  std::vector<T> found(rows * layer.outputs);
  pool.run_model([&](Worker& worker) {
    worker.parallel_in_runs(rows, [&](int64_t row) { inputs.set(row, values.data() + row * layer.inner); });
    multiply(worker, inputs, layer, [&](const Place& place, int64_t panel, Floats one, Floats other) {
      put_pair(found.data() + place.row * layer.outputs, panel, layer.outputs, one, other);
    });
  });
  return found;
}

// a + b rounded to odd: towards 0, with the last bit set where something was lost. Denormals are 0.
float odd_sum(float a, float b) {
  const double total = double{a} + b, back = total - a, lost = (a - (total - back)) + (b - back);
  uint32_t bits = cast<uint32_t>(static_cast<float>(total));
  const double above = std::abs(double{cast<float>(bits)}) - std::abs(total), signed_lost = total < 0 ? -lost : lost;
  // Rounding away from 0 is undone.
  if (above > 0 || (above == 0 && signed_lost < 0)) bits--;
  if (above != 0 || lost != 0) bits |= 1;
  return std::abs(cast<float>(bits)) < 0x1p-126f ? 0.0f : cast<float>(bits);
}

// One output of packed bfloat16 by BFDOT.
float dot_of(const bfloat16* a, const bfloat16* b, int64_t size) {
  float sum = 0;
  const auto product = [&](int64_t i) { return Number<bfloat16>::read(a[i]) * Number<bfloat16>::read(b[i]); };
  for (int64_t i = 0; i < size; i += 2) sum = odd_sum(sum, odd_sum(product(i), product(i + 1)));
  return sum;
}

template <class T>
void print_linear(ThreadPool& pool, const char* type) {
  constexpr int64_t OUTPUTS = 77, INNER = 208, MOST = 45;
  const auto rows = noise<T>(OUTPUTS * INNER, 3), bias = noise<T>(OUTPUTS, 4), values = noise<T>(MOST * INNER, 5, 1.0f);
  for (const int bits : {0, 8, 4})
    for (const int group : {0, 32, 64}) {
      if (!bits && group) continue;
      const auto layer = Linear<T>::of(pool, rows.data(), bias.data(), OUTPUTS, INNER, false, {bits, group});
      const auto wanted = multiplied(pool, layer, values, MOST);
      for (int64_t count = 1; count < MOST; count++)
        check(std::memcmp(multiplied(pool, layer, values, count).data(), wanted.data(), count * OUTPUTS * sizeof(T)) == 0,
              "a row depends on others", 1000 * bits + count);
      if constexpr (std::is_same_v<T, bfloat16>)
        for (int64_t i = 0; i < MOST * OUTPUTS && !bits && of_model<T>(true) == "bf16 dot"; i++) {
          const float sum = dot_of(&values[i / OUTPUTS * INNER], &rows[i % OUTPUTS * INNER], INNER);
          check(rounded_bits(sum + Number<T>::read(bias[i % OUTPUTS])) == wanted[i].bits, "BFDOT differs from its model", i);
        }
      Hash hash;
      hash.add(wanted);
      const std::string name = std::string(type) + " linear " + std::to_string(bits) + " " + std::to_string(group);
      hash.print(bits ? "exact" : of_model<T>(true), name);
    }
}

template <class T>
void print_products(ThreadPool& pool, const char* type) {
  const Products<T> products(pool);
  check(products.all_in_steps(), "factors are no steps");
  Hash hash;
  for (int64_t rows = 1; rows <= Products<T>::MOST; rows++) hash.add(products.multiply_all(pool, rows));
  hash.print("exact", std::string(type) + " products of 4, 6 and 8 bits, and by tables");
}

// -- models ---------------------------------------------------------------------------------------------------------

// Matrices whose ends are not those of vectors.
template <class T>
std::unique_ptr<Adapter<T>> adapter_for(const Model<T>& model, const std::vector<float>& a, const std::vector<float>& b) {
  auto adapter = std::make_unique<Adapter<T>>(LAYERS);
  for (int64_t layer = 0; layer < LAYERS; layer++)
    for (const AdaptedPart part : {INTO, OUT, GATE_UP, DOWN}) {
      const Linear<T>* linear = model.decoder->adapted(layer, part);
      if (linear == nullptr) continue;
      const int64_t outputs = linear->gated ? 2 * linear->outputs : linear->outputs, cut = outputs / 3 + 1;
      const LowRankTarget targets[] = {{a.data(), b.data(), false, false, 5, 0, cut, 0.5f},
                                       {a.data() + 7, b.data() + 9, false, false, 19, cut, outputs - cut - 2, 2.0f}};
      adapter->layers[layer][part] = std::make_unique<LowRank<T>>(adapter->arena, targets, 2, outputs, linear->inner);
    }
  return adapter;
}

template <class T>
void print_model(ThreadPool& pool, const char* type, int bits) {
  Model<T> model(pool, bits);
  const auto a = noise<float>(20 * 512, 11, 0.1f), b = noise<float>(20 * 512, 12, 0.1f);
  const auto adapter = adapter_for(model, a, b);
  model.decoder->set_adapter(1, adapter.get());
  const int64_t slots[] = {0, 1, 1};
  const auto plain = model.forward(pool), adapted = model.forward(pool, slots);
  check(std::all_of(plain.begin(), plain.end(), [](float x) { return std::isfinite(x); }), "not finite");
  check(!same(plain, adapted), "an adapter does nothing");
  ThreadPool alone(1);
  check(same(plain, model.forward(alone)), "a model depends on the pool", bits);
  Hash hash;
  hash.add(plain), hash.add(adapted);
  hash.print(of_model<T>(bits == 0), std::string(type) + " model " + std::to_string(bits));
}

// Attention alone: queries in blocks of all heights, over several stretches, with windows, caps and sinks.
template <class T>
void print_attention(ThreadPool& pool, const char* type) {
  constexpr int64_t GROUP = 3, DIM = 80, LENGTH = 301, SIZE = 16, COUNT = (LENGTH + SIZE - 1) / SIZE;
  const HeadShape<T> shape{GROUP, 1, DIM, nullptr, 0.0f};
  const auto sinks = noise<float>(GROUP, 6);
  const auto projected = noise<T>(LENGTH * shape.width(), 7, 1.0f);
  std::vector<int64_t> table(COUNT), cells(LENGTH);
  for (int64_t i = 0; i < COUNT; i++) table[i] = (i * 7) % COUNT;
  for (int64_t i = 0; i < LENGTH; i++) cells[i] = table[i / SIZE] * SIZE + i % SIZE;
  Hash hash;
  for (const AttentionParams params : {AttentionParams{0.2f, 0.0f, 0, 1}, AttentionParams{0.9f, 3.0f, 130, 1, sinks.data()}}) {
    std::vector<T> wanted;
    for (const int64_t chunk : {LENGTH, int64_t{1}, int64_t{2}, int64_t{4}, int64_t{13}}) {
      std::vector<T> pages(COUNT * SIZE * 2 * DIM, Number<T>::make(NAN)), found(LENGTH * GROUP * DIM);
      const KVPool<T> kv{pages.data(), SIZE, 1, DIM};
      for (int64_t from = 0; from < LENGTH; from += chunk) {
        auto all = projected;
        const int64_t tokens = std::min(chunk, LENGTH - from), starts[] = {0, tokens}, lengths[] = {from + tokens};
        const Rows rows{1, starts, lengths, table.data(), COUNT};
        const AttentionInput input{tokens, cells.data() + from, nullptr, rows};
        const auto tasks = divide<T>(rows, shape, pool.size());
        std::vector<AttentionScratch<T>> scratch(pool.size(), AttentionScratch<T>(DIM));
        const auto start = [&](int64_t token) {
          return [to = found.data() + (from + token) * GROUP * DIM](int64_t at, Floats values) {
            Number<T>::store_lanes(to + at, values);
          };
        };
        pool.run_model([&](Worker& worker) {
          attend(worker, tasks, input, Projected<T>::of(all.data() + from * shape.width(), shape, shape.width()), shape,
                 Rotary<T>{}, kv, params, scratch[worker.index()], HeadSink(start));
        });
      }
      if (wanted.empty()) wanted = found;
      check(std::memcmp(wanted.data(), found.data(), wanted.size() * sizeof(T)) == 0, "attention depends on chunks", chunk);
    }
    hash.add(wanted);
  }
  hash.print(of_model<T>(false), std::string(type) + " attention");
}

// -- from logits to tokens ------------------------------------------------------------------------------------------

void print_sampling(ThreadPool& pool) {
  constexpr int64_t ROWS = 60, VOCAB = 5003, TOP = 20;
  auto logits = noise<float>(ROWS * VOCAB, 8, 3.0f);
  std::vector<float> temperature(ROWS), top_p(ROWS), min_p(ROWS), totals(2 * ROWS), values(ROWS * TOP);
  std::vector<int64_t> top_k(ROWS), seeds(ROWS), positions(ROWS), tokens(ROWS), ids(ROWS * TOP);
  for (int64_t row = 0; row < ROWS; row++) {
    temperature[row] = static_cast<float>(row % 4) * 0.5f, top_p[row] = row % 3 ? 1.0f - 0.07f * (row % 5) : 1.0f;
    min_p[row] = row % 7 ? 0.0f : 0.02f, top_k[row] = row % 2 ? 3 * row : 0, seeds[row] = row * row, positions[row] = row;
  }
  Hash hash;
  for (int64_t position = 0; position < 40; position++) {
    for (auto& each : positions) each++;
    const SampleArguments arguments{&pool, logits.data(), ROWS, VOCAB, VOCAB, temperature.data(), top_p.data(), min_p.data(),
                                    top_k.data(), seeds.data(), positions.data(), 0, nullptr, nullptr, -1, tokens.data()};
    check(aioinfer_sample(&arguments), "sampling");
    hash.add(tokens);
  }
  hash.print(vectors(), "tokens");
  const LogprobsArguments arguments{&pool, logits.data(), VOCAB, VOCAB, ROWS, TOP, totals.data(), values.data(), ids.data()};
  check(aioinfer_logprobs(&arguments), "logprobs");
  Hash logprobs;
  logprobs.add(totals), logprobs.add(values), logprobs.add(ids);
  logprobs.print(vectors(), "logprobs");
}

template <class T>
void print_type(ThreadPool& pool, const char* type) {
  print_linear<T>(pool, type), print_products<T>(pool, type), print_attention<T>(pool, type);
  for (const int bits : {0, 8, 4}) print_model<T>(pool, type, bits);
}

}  // namespace

int main() {
  std::printf("%s, %s\n", aioinfer_instructions(), aioinfer_arithmetic());
  ThreadPool pool(2);
  print_functions(), print_sums(), print_sampling(pool);
  print_type<float>(pool, "float"), print_type<bfloat16>(pool, "bfloat16");
  return wrong;
}
