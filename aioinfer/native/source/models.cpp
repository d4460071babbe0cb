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

Team& team_of(void* team) { return *static_cast<Team*>(team); }
const Weights<T>& weights_of(const void* weights) { return *static_cast<const Weights<T>*>(weights); }

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
    std::vector<uint32_t> units(Activations<T>::units(count, inner));
    const Activations<T> activations(units.data(), count, inner);
    team_of(team).run([&](Member& member) {
      member.parallel_in_runs(count, [&](int64_t row) {
        uint32_t* to = activations.row(row);
        for (int64_t i = 0; i < inner; i += LANES)
          activations.put(to, i, Number<T>::load_lanes(in + row * inner + i));
      });
      multiply(member, activations, w, [&](const Place& place, int64_t panel, Floats one, Floats other) {
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
             Scoring{scale, soft_cap, window, block}, scratch[member.index()],
             [&](int64_t token) {
               return [to = out + token * heads * head_dim](int64_t at, Floats values) {
                 Number<T>::store_lanes(to + at, values);
               };
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

bool NAMED(add_layer)(void* decoder, const T* attention_norm, const void* qkv, const T* head_norm, const void* out,
                      const T* mlp_norm, const void* gate_up, const void* down, float scale, float soft_cap,
                      int64_t window, int64_t block) {
  return guarded(false, [&] {
    static_cast<Decoder<T>*>(decoder)->add({attention_norm, &weights_of(qkv), head_norm, &weights_of(out), mlp_norm,
                                            &weights_of(gate_up), &weights_of(down),
                                            Scoring{scale, soft_cap, window, block}});
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
