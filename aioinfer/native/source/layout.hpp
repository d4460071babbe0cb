// Layout: the argument structures as text, one line each: name, name:kind@offset of every field, and size.
//
// aioinfer.native.bindings compares the text with the one that it makes of its own structures.
#pragma once

#include <cstddef>
#include <string>
#include <type_traits>

#include "interface.hpp"

namespace aioinfer {

template <class Field>
const char* kind_of() {
  if (std::is_pointer_v<Field>) return "address@";
  if (std::is_same_v<Field, int64_t>) return "int@";
  if (std::is_same_v<Field, float>) return "float@";
  if (std::is_same_v<Field, bool>) return "bool@";
  return "unknown@";
}

// FOR_EACH(macro, subject, a, b, ..) is macro(subject, a) macro(subject, b) ..; the nesting allows for 64 names.
#define AIOINFER_PARENTHESES ()
#define AIOINFER_EXPAND(...) \
  AIOINFER_EXPAND_4(AIOINFER_EXPAND_4(AIOINFER_EXPAND_4(AIOINFER_EXPAND_4(__VA_ARGS__))))
#define AIOINFER_EXPAND_4(...) \
  AIOINFER_EXPAND_16(AIOINFER_EXPAND_16(AIOINFER_EXPAND_16(AIOINFER_EXPAND_16(__VA_ARGS__))))
#define AIOINFER_EXPAND_16(...) \
  AIOINFER_EXPAND_64(AIOINFER_EXPAND_64(AIOINFER_EXPAND_64(AIOINFER_EXPAND_64(__VA_ARGS__))))
#define AIOINFER_EXPAND_64(...) __VA_ARGS__
#define AIOINFER_NEXT(macro, subject, first, ...) \
  macro(subject, first) __VA_OPT__(AIOINFER_AGAIN AIOINFER_PARENTHESES(macro, subject, __VA_ARGS__))
#define AIOINFER_AGAIN() AIOINFER_NEXT
#define AIOINFER_FOR_EACH(macro, subject, ...) AIOINFER_EXPAND(AIOINFER_NEXT(macro, subject, __VA_ARGS__))

// Out of line: compilers take long for hundreds of them.
__attribute__((noinline)) inline void add(std::string& text, const char* name, const char* kind, size_t number) {
  text.append(name).append(kind).append(std::to_string(number));
}

#define AIOINFER_FIELD(Structure, field) \
  add(text, " " #field ":", kind_of<decltype(Structure::field)>(), offsetof(Structure, field));
// The line of a structure, all of whose fields are named in order.
#define AIOINFER_STRUCTURE(name, Structure, ...)            \
  text += name;                                             \
  AIOINFER_FOR_EACH(AIOINFER_FIELD, Structure, __VA_ARGS__) \
  add(text, " size:", "", sizeof(Structure));               \
  text += "\n";
#define AIOINFER_PLAIN(Structure, ...) AIOINFER_STRUCTURE(#Structure, Structure, __VA_ARGS__)
// The layout is the same for every T: only what pointers refer to depends on it.
#define AIOINFER_TEMPLATE(Structure, ...) AIOINFER_STRUCTURE(#Structure, Structure<float>, __VA_ARGS__)

inline std::string layout() {
  std::string text;
  AIOINFER_TEMPLATE(WeightsArguments, pool, rows, bias, outputs, inner, bits, group, gated)
  AIOINFER_TEMPLATE(MappedWeightsArguments, packed, size, bias, outputs, inner, bits, group, factors, table, gated)
  AIOINFER_PLAIN(QuantisedWeightsArguments, pool, values, scales, offsets, bias, outputs, inner, bits, group, table,
                 gated)
  AIOINFER_TEMPLATE(RepackArguments, pool, weights, rows, bias)
  AIOINFER_TEMPLATE(DequantiseArguments, pool, weights, out)
  AIOINFER_TEMPLATE(LinearArguments, pool, weights, values, count, inner, gate, out)
  AIOINFER_TEMPLATE(AddNormArguments, pool, hidden, delta, count, size, weight, bias, eps, sums, out)
  AIOINFER_PLAIN(RouterArguments, weight, bias, scales, top_k, groups, top_groups, scale, sigmoid, rounds, normalize)
  AIOINFER_TEMPLATE(RouteArguments, pool, router, values, count, hidden, weights, experts)
  AIOINFER_TEMPLATE(ExpertsArguments, count, gate_up, down)
  AIOINFER_TEMPLATE(MixArguments, pool, experts, values, count, top_k, chosen, weights, gate, out)
  AIOINFER_TEMPLATE(AttendArguments, pool, queries, keys, values, query_stride, kv_stride, heads, kv_heads, head_dim,
                    norm, value_norm, shared, cos, sin, rotary_dim, kv_pool, page_size, num_pages, tokens, rows,
                    slot_mapping, cu_q, kv_len, block_table, table_width, ends, window, block, spans, scale, soft_cap,
                    sinks, norm_eps, out)
  AIOINFER_TEMPLATE(PerLayerInputsArguments, table, words, projection, norm, layers, size, table_scale,
                    projection_scale, sum_scale)
  AIOINFER_TEMPLATE(PerLayerArguments, gate, out, function, post_norm)
  AIOINFER_PLAIN(DualArguments, router_norm, experts_norm, dense_post_norm, experts_post_norm)
  AIOINFER_TEMPLATE(DecoderArguments, embedding, words, embedding_scale, position_embedding, norm, norm_bias, head,
                    logit_scale, logit_cap, positions, hidden, norm_eps, per_layer)
  AIOINFER_TEMPLATE(SelfAttentionArguments, heads, kv_heads, head_dim, kv, into, gated, head_norm, value_norm, shared,
                    whole_norm, norm_last, head_norm_eps, cos, sin, rotary_dim, out, window, block, spans, scale, soft_cap,
                    sinks, query_growth, query_length, out_scale)
  AIOINFER_TEMPLATE(LatentAttentionArguments, heads, plain, rotated, rank, value_dim, kv, into, query_norm, queries,
                    latent_norm, eps, cos, sin, absorb, expand, out, scale)
  AIOINFER_TEMPLATE(ShortConvArguments, into, weight, bias, size, out, state)
  AIOINFER_TEMPLATE(DeltaRuleArguments, key_heads, value_heads, key_dim, value_dim, into, gates, conv, size, rate, bias,
                    norm, eps, out, state)
  AIOINFER_TEMPLATE(MambaArguments, heads, head_dim, groups, state_size, into, conv, conv_bias, size, bias, rate, skip,
                    norm, eps, gate_scale, step_scale, out, out_scale, state)
  AIOINFER_TEMPLATE(LayerArguments, decoder, word_norm, mixer_norm, mixer_norm_bias, attention, latent, conv, delta_rule,
                    mamba, mixer_post_norm, mlp_norm, mlp_norm_bias, gate_up, down, router, experts, gate, shared_gate,
                    mlp_post_norm, dual, per_layer, residual_scale, part_scale, parallel)
  AIOINFER_TEMPLATE(ForwardArguments, decoder, pool, kv_pools, num_kv_pools, page_size, num_pages, tokens, rows,
                    num_logits, input_ids, positions, slot_mapping, cu_q, kv_len, block_table, table_width, ends,
                    state_pools, num_states, num_cells, read, write, replays, kept, stash_pools, num_stashes,
                    num_drafts, logits_rows, logits, adapters, num_hidden, hidden_rows, hidden, seconds,
                    num_features, feature_rows, features, num_deep, cos, sin, num_captured, captured, captures)
  AIOINFER_TEMPLATE(EmbedArguments, decoder, ids, count, out)
  AIOINFER_PLAIN(LowRankTarget, a, b, a_is_bfloat16, b_is_bfloat16, rank, start, rows, scale, rescaling)
  AIOINFER_PLAIN(AdaptedLayer, layer, part, targets, count)
  AIOINFER_TEMPLATE(AdaptArguments, decoder, adapter, layers, count)
  AIOINFER_PLAIN(SampleArguments, pool, logits, rows, vocab, stride, temperature, top_p, min_p, top_k, seeds,
                 positions, bans, banned_rows, banned_ids, bad, tokens)
  AIOINFER_PLAIN(PenaliseArguments, pool, logits, rows, vocab, stride, counts, lines, row_of, num_slots, slots, repetition,
                 presence, frequency, in_prompt, out)
  AIOINFER_PLAIN(MasksArguments, pool, logits, num_rows, vocab, stride, count, rows, masks, words)
  AIOINFER_PLAIN(LogprobsArguments, pool, logits, vocab, stride, count, top, totals, top_values, top_ids)
  return text;
}

}  // namespace aioinfer
