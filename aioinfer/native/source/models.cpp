// The entry points that exist once for every type of model: compiled with NUMBER, the type, and NAME, the suffix of
// their names. See interface.hpp for their arguments.
#include "decoder.hpp"
#include "interface.hpp"

#define JOIN(a, b) a##_##b
#define JOINED(a, b) JOIN(a, b)
#define NAMED(name) JOINED(aioinfer_##name, NAME)

using namespace aioinfer;
using T = NUMBER;

namespace {

// Rows [count, inner] in memory of their own, as the inputs of a layer; set() is the first phase of a program.
class LayerRows {
 public:
  LayerRows(const T* in, int64_t count, const Linear<T>& layer) : in_(in), inner_(layer.inner), to_(buffer_.inputs(layer, 0)) {
    require(count >= 0, "count is negative");
    require(layer.quantised() || inner_ % SUM_LANES == 0, "the inner dimension is no multiple of a vector");
    buffer_.reserve(layer, count, false);
    to_ = buffer_.inputs(layer, count);
  }

  const Inputs<T>& set(Worker& worker) const {
    worker.parallel_in_runs(to_.rows(), [&](int64_t row) { to_.set(row, in_ + row * inner_); });
    return to_;
  }

 private:
  const T* in_;
  int64_t inner_;
  InputBuffer<T> buffer_;
  Inputs<T> to_;
};

void check_shape(int64_t outputs, int64_t inner, int64_t bits, bool gated) {
  require(outputs > 0 && inner > 0, "weights need outputs and an inner dimension");
  require(bits || !gated || outputs % SUM_LANES == 0, "the outputs of gated weights are no multiple of a vector");
}

SelfAttention<T> mixer_of(const SelfAttentionArguments<T>& a) {
  require(!a.whole_norm || a.head_norm != nullptr, "a norm of all queries without weights");
  return {
      .shape = {a.heads, a.kv_heads, a.head_dim, a.whole_norm ? nullptr : a.head_norm, a.head_norm_eps,
                a.value_norm, a.shared, a.norm_last},
      .whole_norm = a.whole_norm ? a.head_norm : nullptr,
      .into = a.into,
      .gated = a.gated,
      .rotary = {a.cos, a.sin, a.rotary_dim},
      .out = a.out,
      .params = {a.scale, a.soft_cap, a.window, a.block, a.sinks, a.spans},
      .growth = {a.query_growth, a.query_length},
      .kv = a.kv,
  };
}

LatentAttention<T> mixer_of(const LatentAttentionArguments<T>& a) {
  return {
      .heads = a.heads,
      .plain = a.plain,
      .rotated = a.rotated,
      .rank = a.rank,
      .value_dim = a.value_dim,
      .into = a.into,
      .query_norm = a.query_norm,
      .queries = a.queries,
      .latent_norm = a.latent_norm,
      .eps = a.eps,
      .rotary = {a.cos, a.sin, a.rotated},
      .absorb = a.absorb,
      .expand = a.expand,
      .out = a.out,
      .params = {a.scale, 0.0f, 0, 1},
      .kv = a.kv,
  };
}

ShortConv<T> mixer_of(const ShortConvArguments<T>& a) {
  return {.into = a.into, .conv = {a.weight, a.bias, a.out->inner, a.size}, .out = a.out, .state = a.state};
}

DeltaRule<T> mixer_of(const DeltaRuleArguments<T>& a) {
  const DeltaShape shape{a.key_heads, a.value_heads, a.key_dim, a.value_dim};
  return {
      .shape = shape,
      .into = a.into,
      .gates = a.gates,
      .conv = {a.conv, nullptr, shape.channels(), a.size},
      .rate = a.rate,
      .bias = a.bias,
      .norm = a.norm,
      .eps = a.eps,
      .out = a.out,
      .state = a.state,
  };
}

Mamba2<T> mixer_of(const MambaArguments<T>& a) {
  const MambaShape shape{a.heads, a.head_dim, a.groups, a.state_size};
  return {
      .shape = shape,
      .into = a.into,
      .conv = {a.conv, a.conv_bias, shape.channels(), a.size},
      .bias = a.bias,
      .rate = a.rate,
      .skip = a.skip,
      .norm = a.norm,
      .eps = a.eps,
      .gate_scale = a.gate_scale,
      .step_scale = a.step_scale,
      .out = a.out,
      .state = a.state,
  };
}

decltype(Layer<T>::mixer) mixer_of(const LayerArguments<T>& a) {
  const int given = (a.attention != nullptr) + (a.latent != nullptr) + (a.conv != nullptr) + (a.delta_rule != nullptr) +
                    (a.mamba != nullptr);
  const bool both = a.attention != nullptr && a.mamba != nullptr;
  require(given == 1 + both, "a layer has one mixer");
  if (both)
    return SideBySide<T>{mixer_of(*a.mamba), mixer_of(*a.attention), a.mamba->out_scale, a.attention->out_scale};
  if (a.mamba != nullptr) return mixer_of(*a.mamba);
  if (a.attention != nullptr) return mixer_of(*a.attention);
  if (a.latent != nullptr) return mixer_of(*a.latent);
  if (a.conv != nullptr) return mixer_of(*a.conv);
  return mixer_of(*a.delta_rule);
}

}  // namespace

extern "C" {

void* NAMED(weights)(const WeightsArguments<T>* a) {
  return guarded<void*>(nullptr, [&] {
    check_shape(a->outputs, a->inner, a->bits, a->gated);
    return new Linear<T>(Linear<T>::of(*a->pool, a->rows, a->bias, a->outputs, a->inner, a->gated, {a->bits, a->group}));
  });
}

void* NAMED(quantised_weights)(const QuantisedWeightsArguments* a) {
  return guarded<void*>(nullptr, [&] {
    const QuantisedShape shape(a->outputs, a->inner, a->group, a->bits, a->gated, a->table);
    return new Linear<T>(QuantisedWeights(*a->pool, shape, a->values, a->scales, a->offsets, a->bias));
  });
}

void* NAMED(mapped_weights)(const MappedWeightsArguments<T>* a) {
  return guarded<void*>(nullptr, [&] {
    check_shape(a->outputs, a->inner, a->bits, a->gated);
    const Format format{a->bits, a->group, a->factors, a->table};
    require(Linear<T>::bytes(a->outputs, a->inner, a->gated, format) == a->size, "packed weights have another size");
    return new Linear<T>(Linear<T>::mapped(a->packed, a->bias, a->outputs, a->inner, a->gated, format));
  });
}

bool NAMED(repack)(const RepackArguments<T>* a) {
  return guarded(false, [&] {
    require(!a->weights->mapped(), "the weights are in memory of the caller's");
    if (a->rows != nullptr) a->weights->set(*a->pool, a->rows);
    if (a->bias != nullptr) a->weights->set_bias(a->bias);
    return true;
  });
}

bool NAMED(exchange_weights)(void* one, void* other) {
  return guarded(false, [&] {
    auto &a = *static_cast<Linear<T>*>(one), &b = *static_cast<Linear<T>*>(other);
    require_size(b, a.outputs, a.inner, a.gated);
    require(a.shares_inputs_with(b), "weights of another format");
    std::swap(a, b);
    return true;
  });
}

void NAMED(free_weights)(void* weights) { delete static_cast<Linear<T>*>(weights); }

const char* NAMED(weights_data)(const void* weights) { return static_cast<const Linear<T>*>(weights)->data(); }

int64_t NAMED(weights_bytes)(const void* weights) { return static_cast<const Linear<T>*>(weights)->bytes(); }

int64_t NAMED(weights_factors)(const void* weights) { return static_cast<const Linear<T>*>(weights)->factors(); }

bool NAMED(dequantise)(const DequantiseArguments<T>* a) {
  return guarded(false, [&] {
    require(a->weights->quantised() != nullptr, "the weights are not quantised");
    a->weights->quantised()->dequantise(*a->pool, a->out);
    return true;
  });
}

bool NAMED(linear)(const LinearArguments<T>* a) {
  return guarded(false, [&] {
    const Linear<T>& w = *a->weights;
    const Gate gate = static_cast<Gate>(a->gate);
    check(gate, w.gated);
    require(w.inner == a->inner, "the inner dimension is not that of the weights");
    const LayerRows rows(a->values, a->count, w);
    a->pool->run_model([&, out = a->out](Worker& worker) {
      multiply(worker, rows.set(worker), w, [&](const Place& place, int64_t panel, Floats one, Floats other) {
        T* to = out + place.row * w.outputs;
        if (w.gated)
          Number<T>::store_lanes(to + panel * LANES, gated(gate, one, other));
        else
          put_pair(to, panel, w.outputs, activated(gate, one), activated(gate, other));
      });
    });
    return true;
  });
}

bool NAMED(add_norm)(const AddNormArguments<T>* a) {
  return guarded(false, [&] {
    require(a->count >= 0, "count is negative");
    require(a->size > 0 && a->size % SUM_LANES == 0, "the size is no multiple of a vector");
    require((a->delta == nullptr) == (a->sums == nullptr), "sums without a summand, or a summand without sums");
    const Norm norm{a->weight, a->bias};
    a->pool->run_model([&](Worker& worker) {
      worker.parallel_in_runs(a->count, [&](int64_t row) {
        const int64_t at = row * a->size;
        const T* from = a->hidden + at;
        if (a->delta != nullptr) {
          T* sums = a->sums + at;
          for (int64_t i = 0; i < a->size; i += LANES)
            Number<T>::store_lanes(sums + i, Number<T>::load_lanes(from + i) + Number<T>::load_lanes(a->delta + at + i));
          from = sums;
        }
        normed(norm, from, a->size, a->eps,
               [to = a->out + at](int64_t i, Floats value) { Number<T>::store_lanes(to + i, value); });
      });
    });
    return true;
  });
}

bool NAMED(attend)(const AttendArguments<T>* a) {
  return guarded(false, [&] {
    const Rows rows{a->rows, a->cu_q, a->kv_len, a->block_table, a->table_width};
    const AttentionInput input{a->tokens, a->slot_mapping, nullptr, rows, a->ends};
    const HeadShape<T> shape{a->heads, a->kv_heads, a->head_dim, a->norm, a->norm_eps, a->value_norm, a->shared};
    const Projected<T> projected{a->queries, a->keys, a->values, a->query_stride, a->kv_stride};
    const Rotary<T> rotary{a->cos, a->sin, a->rotary_dim};
    const KVPool<T> kv{a->kv_pool, a->page_size, a->kv_heads, a->head_dim};
    const AttentionParams params{a->scale, a->soft_cap, a->window, a->block, a->sinks, a->spans};
    shape.check(a->rotary_dim);
    check(params);
    check(input.rows, a->tokens, a->page_size, a->num_pages);
    require_below("slot_mapping", a->slot_mapping, a->tokens, a->num_pages * a->page_size);
    const auto tasks = divide<T>(input.rows, shape, a->pool->size());
    std::vector<AttentionScratch<T>> scratch(a->pool->size(), AttentionScratch<T>(a->head_dim));
    const auto start = [&](int64_t token) {
      return [to = a->out + token * shape.heads * shape.head_dim](int64_t at, Floats values) {
        Number<T>::store_lanes(to + at, values);
      };
    };
    a->pool->run_model([&](Worker& worker) {
      attend(worker, tasks, input, projected, shape, rotary, kv, params, scratch[worker.index()], HeadSink(start));
    });
    return true;
  });
}

void* NAMED(router)(const RouterArguments* a) {
  return guarded<void*>(nullptr, [&] {
    const int64_t experts = a->weight->outputs;
    const Rule rule{a->sigmoid, a->rounds, experts, a->top_k, a->groups, a->top_groups, a->normalize, a->scale};
    require(a->groups > 0 && experts % a->groups == 0, "the experts do not divide into so many groups");
    require(a->top_groups > 0 && a->top_groups <= a->groups, "top_groups is not in [1, groups]");
    require(a->top_k > 0 && a->top_k <= experts / a->groups * a->top_groups, "top_k is not in [1, experts of top_groups]");
    require(a->weight->packed() && !a->weight->gated, "the weights of a router are rounded, or gated");
    return new Router<T>(a->weight->packed(), a->bias, rule, a->scales);
  });
}

bool NAMED(exchange_routers)(void* one, void* other) {
  return guarded(false, [&] {
    auto &a = *static_cast<Router<T>*>(one), &b = *static_cast<Router<T>*>(other);
    require(a.weight->outputs == b.weight->outputs && a.weight->inner == b.weight->inner, "routers of other sizes");
    std::swap(a, b);
    return true;
  });
}

void NAMED(free_router)(void* router) { delete static_cast<Router<T>*>(router); }

bool NAMED(route)(const RouteArguments<T>* a) {
  return guarded(false, [&] {
    const Router<T>& router = *a->router;
    require(router.weight->inner == a->hidden, "the hidden size is not that of the router");
    require(a->count >= 0, "count is negative");
    require(a->hidden % SUM_LANES == 0, "the hidden size is no multiple of a vector");
    Routing<T> routing;
    routing.reserve(a->pool->size(), a->count, router);
    const Activations<float> tokens = routing.floats(a->count, a->hidden);
    a->pool->run_model([&](Worker& worker) {
      worker.parallel_in_runs(a->count, [&](int64_t row) {
        const T* from = a->values + row * a->hidden;
        for (int64_t i = 0; i < a->hidden; i += LANES) tokens.put(tokens.row(row), i, Number<T>::load_lanes(from + i));
      });
      routing.route(worker, router, tokens);
    });
    std::copy_n(routing.weights(), a->count * router.rule.top_k, a->weights);
    std::copy_n(routing.experts(), a->count * router.rule.top_k, a->experts);
    return true;
  });
}

void* NAMED(experts)(const ExpertsArguments<T>* a) {
  return guarded<void*>(nullptr, [&] { return new Experts<T>(a->count, a->gate_up, a->down); });
}

void NAMED(free_experts)(void* experts) { delete static_cast<Experts<T>*>(experts); }

bool NAMED(mix)(const MixArguments<T>* a) {
  return guarded(false, [&] {
    const Experts<T>& experts = *a->experts;
    const Gate gate = static_cast<Gate>(a->gate);
    check(gate, experts.gated());
    require(a->top_k > 0, "top_k is not positive");
    require_below("chosen", a->chosen, a->count * a->top_k, experts.count);
    const LayerRows tokens(a->values, a->count, experts.gate_up(0));
    Mixing<T> mixing;
    mixing.reserve(a->pool->size(), a->count, a->top_k, experts, {});
    a->pool->run_model([&, out = a->out](Worker& worker) {
      const Inputs<T>& inputs = tokens.set(worker);
      mixing.mix(worker, experts, {}, gate, inputs, [&] { return inputs; }, a->top_k, a->chosen, a->weights,
                 [&](int64_t token, int64_t at, Floats values) {
                   Number<T>::store_lanes(out + token * experts.hidden + at, values);
                 });
    });
    return true;
  });
}

void* NAMED(decoder)(const DecoderArguments<T>* a) {
  return guarded<void*>(nullptr, [&] {
    const Embedding<T> embedding{a->embedding, a->words, a->embedding_scale, a->position_embedding};
    PerLayerSource<T> by_layer{};
    if (const auto* b = a->per_layer)
      by_layer = {b->table,           b->words, b->projection, {b->norm, nullptr}, b->layers, b->size, b->table_scale,
                  b->projection_scale, b->sum_scale};
    return new Decoder<T>(embedding, {a->norm, a->norm_bias}, a->head, a->positions, a->hidden, a->norm_eps,
                          a->logit_scale, a->logit_cap, by_layer);
  });
}

void NAMED(free_decoder)(void* decoder) { delete static_cast<Decoder<T>*>(decoder); }

bool NAMED(add_layer)(const LayerArguments<T>* a) {
  return guarded(false, [&] {
    Dual dual{};
    if (const auto* b = a->dual)
      dual = {{b->router_norm, nullptr}, {b->experts_norm, nullptr}, {b->dense_post_norm, nullptr},
              {b->experts_post_norm, nullptr}};
    PerLayerPart<T> by_layer{};
    if (const auto* b = a->per_layer)
      by_layer = {b->gate, b->out, static_cast<Gate>(b->function), {b->post_norm, nullptr}};
    a->decoder->add({
        .word_norm = {a->word_norm, nullptr},
        .mixer_norm = {a->mixer_norm, a->mixer_norm_bias},
        .mixer = mixer_of(*a),
        .mixer_post_norm = {a->mixer_post_norm, nullptr},
        .mlp_norm = {a->mlp_norm, a->mlp_norm_bias},
        .gate_up = a->gate_up,
        .down = a->down,
        .router = a->router,
        .experts = a->experts,
        .gate = static_cast<Gate>(a->gate),
        .shared_gate = a->shared_gate,
        .mlp_post_norm = {a->mlp_post_norm, nullptr},
        .dual = dual,
        .per_layer = by_layer,
        .scale = a->residual_scale,
        .part_scale = a->part_scale,
        .parallel = a->parallel,
    });
    return true;
  });
}

void* NAMED(adapter)(const void* decoder) {
  return guarded<void*>(nullptr, [&] { return new Adapter<T>(static_cast<const Decoder<T>*>(decoder)->num_layers()); });
}

void NAMED(free_adapter)(void* adapter) { delete static_cast<Adapter<T>*>(adapter); }

bool NAMED(adapt)(const AdaptArguments<T>* a) {
  return guarded(false, [&] {
    for (const AdaptedLayer* layer = a->layers; layer < a->layers + a->count; layer++) {
      require_below("layer", &layer->layer, 1, a->decoder->num_layers() + 1);
      require_below("part", &layer->part, 1, ADAPTED_PARTS);
      const Linear<T>* linear = a->decoder->adapted(layer->layer, static_cast<AdaptedPart>(layer->part));
      require(linear != nullptr, "this part of the layer cannot be adapted");
      require(!linear->gated || linear->outputs % SUM_LANES == 0,
              "the outputs of gated weights are no multiple of a vector");
      const int64_t rows = linear->gated ? 2 * linear->outputs : linear->outputs;
      a->adapter->layers.at(layer->layer)[layer->part] =
          std::make_unique<LowRank<T>>(a->adapter->arena, layer->targets, layer->count, rows, linear->inner);
    }
    return true;
  });
}

bool NAMED(set_adapter)(void* decoder, int64_t slot, const void* adapter) {
  return guarded(false, [&] {
    static_cast<Decoder<T>*>(decoder)->set_adapter(slot, static_cast<const Adapter<T>*>(adapter));
    return true;
  });
}

bool NAMED(set_residual_scale)(void* decoder, int64_t layer, float scale) {
  return guarded(false, [&] {
    auto& layers = static_cast<Decoder<T>*>(decoder)->layers();
    require_below("layer", &layer, 1, static_cast<int64_t>(layers.size()));
    layers[layer].scale = scale;
    layers[layer].check_end();
    return true;
  });
}

bool NAMED(set_table)(void* decoder, const void* table) {
  return guarded(false, [&] {
    static_cast<Decoder<T>*>(decoder)->per_layer().set_table(static_cast<const T*>(table));
    return true;
  });
}

bool NAMED(forward)(const ForwardArguments<T>* a) {
  return guarded(false, [&] {
    const Rows rows{a->rows, a->cu_q, a->kv_len, a->block_table, a->table_width};
    const AttentionInput attention{a->tokens, a->slot_mapping, a->positions, rows, a->ends};
    const RowStates states{a->read, a->write, a->num_cells, a->replays, a->kept, a->num_stashes, a->num_drafts};
    const StepInput<T> step{a->input_ids, attention,      a->kv_pools,   a->num_kv_pools, a->page_size,   a->num_pages,
                            states,       a->state_pools, a->stash_pools, a->num_states, a->num_logits, a->logits_rows,
                            a->logits,    a->adapters,  a->num_hidden,  a->hidden_rows, a->hidden,
                            {a->num_features, a->feature_rows, a->features, a->num_deep}, a->cos, a->sin,
                            {a->num_captured, a->captured, a->captures}};
    a->decoder->forward(*a->pool, step, a->seconds);
    return true;
  });
}

bool NAMED(embed)(const EmbedArguments<T>* a) {
  return guarded(false, [&] {
    a->decoder->embed(a->ids, a->count, a->out);
    return true;
  });
}
}
