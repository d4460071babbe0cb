// What exists once for every type of model: compiled with NUMBER, the type, and NAME, what names end with.
//
// See interface.hpp for what all functions of the interface have in common.
#include "decoder.hpp"
#include "interface.hpp"

#define JOIN(a, b) a##_##b
#define JOINED(a, b) JOIN(a, b)
#define NAMED(name) JOINED(aioinfer_##name, NAME)

using namespace aioinfer;
using T = NUMBER;

namespace {

ThreadPool& team_of(void* team) { return *static_cast<ThreadPool*>(team); }
const Weights<T>& weights_of(const void* weights) { return *static_cast<const Weights<T>*>(weights); }

// Rows [count, inner] that become activations, of the type V, as the first thing a team does.
template <class From, class V = From>
class Packing {
 public:
  Packing(const From* in, int64_t count, int64_t inner)
      : in_(in), inner_(inner), units_(Activations<V>::units(count, inner)), to_(units_.data(), count, inner) {}

  const Activations<V>& pack(Member& member) const {
    member.parallel_in_runs(to_.blocks.rows, [&](int64_t row) {
      uint32_t* to = to_.row(row);
      for (int64_t i = 0; i < inner_; i += LANES) to_.put(to, i, Number<From>::load_lanes(in_ + row * inner_ + i));
    });
    return to_;
  }

 private:
  const From* in_;
  int64_t inner_;
  std::vector<uint32_t> units_;
  Activations<V> to_;
};

}  // namespace

extern "C" {

// Packed weights: ``rows`` [outputs, inner], or [2 * outputs, inner] of gates and what they gate; ``bias`` or null.
// ``bytes``: rounded to 8 bits.
void* NAMED(weights)(void* team, const T* rows, const T* bias, int64_t outputs, int64_t inner, bool gated, bool bytes) {
  return guarded<void*>(nullptr, [&] {
    const Format format = bytes ? Format::INT8 : Format::PLAIN;
    return new Weights<T>(team_of(team), rows, bias, outputs, inner, gated, format);
  });
}

void NAMED(free_weights)(void* weights) { delete static_cast<Weights<T>*>(weights); }

// ``out`` [count, outputs] from ``in`` [count, inner]; of gated weights silu(gate) * up.
bool NAMED(linear)(void* team, const void* weights, const T* in, int64_t count, int64_t inner, T* out) {
  return guarded(false, [&] {
    const Weights<T>& w = weights_of(weights);
    const Packing<T> activations(in, count, inner);
    team_of(team).run([&](Member& member) {
      multiply(member, activations.pack(member), w, [&](const Place& place, int64_t panel, Floats one, Floats other) {
        T* to = out + place.row * w.outputs;
        if (w.gated)
          Number<T>::store_lanes(to + panel * LANES, silu(one) * other);
        else
          put_pair(to, panel, w.outputs, one, other);
      });
    });
    return true;
  });
}

// Attention of one layer, [tokens, heads * head_dim] into ``out``. Queries, keys and values are row-major with
// strides; queries and keys are normed and rotated in place, unless ``norm`` is null and rotary_dim 0.
bool NAMED(attend)(void* team, T* queries, T* keys, T* values, int64_t query_stride, int64_t kv_stride, int64_t heads,
                   int64_t kv_heads, int64_t head_dim, const T* norm, float eps, const T* cos, const T* sin,
                   int64_t rotary_dim, T* pool, int64_t page_size, float scale, float soft_cap, int64_t window,
                   int64_t block, int64_t tokens, const int64_t* cells, int64_t rows, const int64_t* starts,
                   const int64_t* lengths, const int64_t* tables, int64_t width, T* out) {
  return guarded(false, [&] {
    const AttentionInput input{tokens, cells, nullptr, {rows, starts, lengths, tables, width}};
    const HeadShape<T> shape{heads, kv_heads, head_dim, norm, eps};
    const auto tasks = divide(input.rows, kv_heads, shape.group());
    std::vector<AttentionScratch<T>> scratch(team_of(team).size(), AttentionScratch<T>(head_dim));
    team_of(team).run([&](Member& member) {
      attend(member, tasks, input, Projected<T>{queries, keys, values, query_stride, kv_stride}, shape,
             Rotary<T>{cos, sin, rotary_dim}, Pool<T>{pool, page_size, kv_heads, head_dim},
             AttentionParams{scale, soft_cap, window, block}, scratch[member.index()],
             [&](int64_t token) {
               return [to = out + token * heads * head_dim](int64_t at, Floats values) {
                 Number<T>::store_lanes(to + at, values);
               };
             });
    });
    return true;
  });
}

// Which experts a token goes to. ``weight`` are packed float32 weights, ``bias`` [experts] or null.
void* NAMED(router)(const void* weight, const float* bias, bool sigmoid, int64_t top_k, int64_t groups,
                    int64_t top_groups, bool normalize, float scale) {
  return guarded<void*>(nullptr, [&] {
    const auto* packed = static_cast<const Weights<float>*>(weight);
    return new Router<T>(packed, bias, Rule{sigmoid, packed->outputs, top_k, groups, top_groups, normalize, scale});
  });
}

void NAMED(free_router)(void* router) { delete static_cast<Router<T>*>(router); }

// ``weights`` and ``experts`` [count, top_k] of tokens [count, hidden].
bool NAMED(route)(void* team, const void* router, const T* in, int64_t count, int64_t hidden, float* weights,
                  int64_t* experts) {
  return guarded(false, [&] {
    const auto& rule = *static_cast<const Router<T>*>(router);
    const Packing<T, float> tokens(in, count, hidden);
    Routing<T> routing;
    routing.reserve(team_of(team).size(), count, rule);
    team_of(team).run([&](Member& member) { routing.route(member, rule, tokens.pack(member)); });
    std::copy_n(routing.weights(), count * rule.rule.top_k, weights);
    std::copy_n(routing.experts(), count * rule.rule.top_k, experts);
    return true;
  });
}

// Room for ``count`` experts, to be filled one by one.
void* NAMED(experts)(int64_t count, int64_t hidden, int64_t middle, bool bytes) {
  return guarded<void*>(nullptr, [&] {
    return new Experts<T>(count, hidden, middle, bytes ? Format::INT8 : Format::PLAIN);
  });
}

void NAMED(free_experts)(void* experts) { delete static_cast<Experts<T>*>(experts); }

// One expert: ``gate_up`` [2 * middle, hidden], gates first, and ``down`` [hidden, middle].
bool NAMED(set_expert)(void* team, void* experts, int64_t index, const T* gate_up, const T* down) {
  return guarded(false, [&] {
    static_cast<Experts<T>*>(experts)->set(team_of(team), index, gate_up, down);
    return true;
  });
}

// ``out`` [count, hidden]: what tokens get of their ``chosen`` experts [count, top_k], by these weights.
bool NAMED(mix)(void* team, const void* experts, const T* in, int64_t count, int64_t top_k, const int64_t* chosen,
                const float* weights, T* out) {
  return guarded(false, [&] {
    const auto& all = *static_cast<const Experts<T>*>(experts);
    const Packing<T> tokens(in, count, all.hidden);
    Mixing<T> mixing;
    mixing.reserve(team_of(team).size(), count, top_k, all, {});
    team_of(team).run([&](Member& member) {
      mixing.mix(member, all, {}, tokens.pack(member), top_k, chosen, weights,
                 [&](int64_t token, int64_t at, Floats values) {
                   Number<T>::store_lanes(out + token * all.hidden + at, values);
                 });
    });
    return true;
  });
}

// A decoder without layers. ``head`` are packed weights; rotary tables are [positions, rotary_dim].
void* NAMED(decoder)(const T* embedding, const T* norm, const void* head, int64_t heads, int64_t kv_heads,
                     int64_t head_dim, float head_eps, const T* cos, const T* sin, int64_t rotary_dim, int64_t hidden,
                     int64_t middle, float eps) {
  return guarded<void*>(nullptr, [&] {
    return new Decoder<T>(embedding, norm, &weights_of(head), HeadShape<T>{heads, kv_heads, head_dim, nullptr, head_eps},
                          Rotary<T>{cos, sin, rotary_dim}, hidden, middle, eps);
  });
}

void NAMED(free_decoder)(void* decoder) { delete static_cast<Decoder<T>*>(decoder); }

// A layer. gate_up and down are what every token passes, router and experts of what it passes some: one of both may
// be null.
bool NAMED(add_layer)(void* decoder, const T* attention_norm, const void* qkv, const T* head_norm, const void* out,
                      const T* mlp_norm, const void* gate_up, const void* down, const void* router,
                      const void* experts, float scale, float soft_cap, int64_t window, int64_t block) {
  return guarded(false, [&] {
    static_cast<Decoder<T>*>(decoder)->add(
        {attention_norm, &weights_of(qkv), head_norm, &weights_of(out), mlp_norm,
         static_cast<const Weights<T>*>(gate_up), static_cast<const Weights<T>*>(down),
         static_cast<const Router<T>*>(router), static_cast<const Experts<T>*>(experts),
         AttentionParams{scale, soft_cap, window, block}});
    return true;
  });
}

// ``logits`` [num_logits, vocabulary] of the tokens ``logits_rows``. ``seconds`` [parts] grow by what each part took.
bool NAMED(forward)(void* decoder, void* team, T* const* pools, int64_t page_size, int64_t tokens, const int64_t* ids,
                    const int64_t* positions, const int64_t* cells, int64_t rows, const int64_t* starts,
                    const int64_t* lengths, const int64_t* tables, int64_t width, int64_t num_logits,
                    const int64_t* logits_rows, float* logits, double* seconds) {
  return guarded(false, [&] {
    const AttentionInput attention{tokens, cells, positions, {rows, starts, lengths, tables, width}};
    const StepInput<T> step{ids, attention, pools, page_size, num_logits, logits_rows, logits};
    static_cast<Decoder<T>*>(decoder)->forward(team_of(team), step, seconds);
    return true;
  });
}
}
