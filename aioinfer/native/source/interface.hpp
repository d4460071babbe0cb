// The C interface that aioinfer.native.bindings calls.
//
// An entry point with more than three arguments takes one pointer to a structure. The structures are defined here and,
// with the same names and fields, in aioinfer/native/arguments.py and sampling_arguments.py; layout.hpp lists their
// fields for the comparison that Python makes when it loads the library.
//
// An entry point that makes an object returns null on failure, others return false; ``aioinfer_error`` gives the reason
// to the calling thread, and ``aioinfer_error_kind`` what it was about. Sizes and strides are counted in elements. The
// caller keeps everything that a pointer refers to alive during the call, and for as long as the object lives where the
// comment says "kept". Pointers are trusted; sizes and indices are checked, see checks.hpp.
#pragma once

#include <cstdint>
#include <exception>
#include <new>
#include <string>
#include <system_error>

#include "checks.hpp"

namespace aioinfer {

class ThreadPool;
template <class T>
class Linear;
template <class T>
class Router;
template <class T>
class Experts;
template <class T>
class Decoder;
template <class T>
struct Adapter;

// -- linear layers ------------------------------------------------------------------------------------------------

// Make a layer: round its weights or not, and pack them.
template <class T>
struct WeightsArguments {
  ThreadPool* pool;
  const T* rows;  // [outputs, inner]; gated: [2 * outputs, inner], gates first
  const T* bias;  // one element per row, or null
  int64_t outputs, inner;
  int64_t bits;   // 4 or 8; 0: not rounded
  int64_t group;  // rounded: numbers of the inner dimension that share a scale; 0: all
  bool gated;
};

// Make a layer of weights that are packed already, by a library of the same name.
template <class T>
struct MappedWeightsArguments {
  const char* packed;  // kept
  int64_t size;        // in bytes
  const T* bias;  // one element per row, or null
  int64_t outputs, inner, bits, group;
  int64_t factors;      // what weights_factors() was, or -1: as rounding stores them
  const int8_t* table;  // as below
  bool gated;
};

// Make a layer of weights that are quantised already: scale * value + offset.
struct QuantisedWeightsArguments {
  ThreadPool* pool;
  const uint8_t* values;  // as the rows above, one a byte; of 8 bits, signed
  const float* scales;    // [rows, groups]
  const float* offsets;   // [rows, groups], or null: 0, and for 4 bits -8 * scale
  const float* bias;      // one element per row, or null
  int64_t outputs, inner, bits, group;
  const int8_t* table;  // [16] the numbers at whose places values of 4 bits are; or null
  bool gated;
};

// Pack other rows, a bias or both into a layer that is there, in its own memory, as when it was made. Its handle stays.
template <class T>
struct RepackArguments {
  ThreadPool* pool;
  Linear<T>* weights;
  const T* rows;  // as the rows above, or null: they stay
  const T* bias;  // one element per row, or null: it stays
};

// The weights of a layer as they were rounded, or given.
template <class T>
struct DequantiseArguments {
  ThreadPool* pool;
  const Linear<T>* weights;
  float* out;  // as the rows above
};

// ``out`` = ``values`` times the weights; gated: gate(gates) * up, else gate(outputs).
template <class T>
struct LinearArguments {
  ThreadPool* pool;
  const Linear<T>* weights;
  const T* values;  // [count, inner]
  int64_t count, inner;
  int64_t gate;  // see gates.hpp
  T* out;        // [count, outputs]
};

// -- norms --------------------------------------------------------------------------------------------------------

// ``out``: the normed rows of ``hidden``, or of its sum with ``delta``, which goes to ``sums``; each may be another's memory.
template <class T>
struct AddNormArguments {
  ThreadPool* pool;
  const T* hidden;      // [count, size]
  const T* delta;       // [count, size], or null
  int64_t count, size;
  const float* weight;  // [size]
  const float* bias;    // [size] of a layer norm, or null
  float eps;
  T* sums;  // [count, size]; null without ``delta``
  T* out;   // [count, size]
};

// -- mixture of experts -------------------------------------------------------------------------------------------

// Make a router.
struct RouterArguments {
  const Linear<float>* weight;  // one output per expert, not rounded; kept
  const float* bias;             // [experts], or null
  const float* scales;           // [experts], factors of the weights of the chosen, or null
  int64_t top_k, groups, top_groups;
  float scale;
  bool sigmoid;  // the score of each expert by itself; else a softmax over all of them
  bool rounds;   // scores and weights are rounded to the type of the model
  bool normalize;
};

// Choose the experts of tokens.
template <class T>
struct RouteArguments {
  ThreadPool* pool;
  const Router<T>* router;
  const T* values;  // [count, hidden]
  int64_t count, hidden;
  float* weights;    // [count, top_k]
  int64_t* experts;  // [count, top_k]
};

// Make the experts of a layer out of linear layers, which are kept.
template <class T>
struct ExpertsArguments {
  int64_t count;
  const Linear<T>* const* gate_up;  // [count] layers from hidden to middle, all of them gated or none
  const Linear<T>* const* down;     // [count] layers from middle to hidden
};

// ``out``: the weighted sum of each token's experts.
template <class T>
struct MixArguments {
  ThreadPool* pool;
  const Experts<T>* experts;
  const T* values;  // [count, hidden]
  int64_t count, top_k;
  const int64_t* chosen;  // [count, top_k]
  const float* weights;   // [count, top_k]
  int64_t gate;           // see gates.hpp
  T* out;                 // [count, hidden]
};

// -- attention and decoders -----------------------------------------------------------------------------------------

// Attention of one layer. Queries and keys are normed and rotated in place, unless ``norm`` is null and ``rotary_dim``
// is 0; keys and values are normed and stored in the KV pool, unless they are shared.
template <class T>
struct AttendArguments {
  ThreadPool* pool;
  T* queries;  // [tokens, heads, head_dim], tokens ``query_stride`` apart
  T* keys;     // [tokens, kv_heads, head_dim], tokens ``kv_stride`` apart
  T* values;   // like the keys
  int64_t query_stride, kv_stride;
  int64_t heads, kv_heads, head_dim;
  const float* norm;  // [heads + kv_heads, head_dim], or null; below, what it is with other flags
  bool value_norm;    // [heads + 2 * kv_heads, head_dim]: values are normed as well
  bool shared;        // [heads, head_dim]: another layer has stored keys and values; keys, values may be null
  const T* cos;       // [tokens, rotary_dim]
  const T* sin;       // [tokens, rotary_dim], the first half negated
  int64_t rotary_dim;
  T* kv_pool;  // keys and values of the layer; see kv_pool.hpp
  int64_t page_size;
  int64_t num_pages;  // of the pool, the null page included
  int64_t tokens, rows;
  const int64_t* slot_mapping;  // [tokens]
  const int64_t* cu_q;          // [rows + 1]
  const int64_t* kv_len;        // [rows]
  const int64_t* block_table;   // [rows, table_width]
  int64_t table_width;
  const int64_t* ends;  // [tokens], or null; see attention.hpp
  int64_t window;       // 0: none
  int64_t block;
  bool spans;  // ``ends`` is regarded
  float scale, soft_cap;  // soft_cap 0: none
  const float* sinks;     // [heads], or null; see softmax.hpp
  float norm_eps;
  T* out;  // [tokens, heads, head_dim]
};

// The inputs of layers that every token has of its own; see per_layer.hpp. All pointers are kept.
template <class T>
struct PerLayerInputsArguments {
  const T* table;               // [vocabulary, layers * size], or null
  const Linear<T>* words;       // the same as quantised weights, or null
  const Linear<T>* projection;  // hidden to layers * size
  const float* norm;            // [size]
  int64_t layers, size;
  float table_scale, projection_scale, sum_scale;
};

// What a layer does with its inputs. All pointers are kept.
template <class T>
struct PerLayerArguments {
  const Linear<T>* gate;   // hidden to size
  const Linear<T>* out;    // size to hidden
  int64_t function;        // of gates, see gates.hpp
  const float* post_norm;  // [hidden]
};

// Experts beside a dense part; see dual.hpp. All pointers, [hidden] each, are kept.
struct DualArguments {
  const float* router_norm;
  const float* experts_norm;
  const float* dense_post_norm;
  const float* experts_post_norm;
};

// Make a decoder without layers. All pointers are kept, but for that to arguments.
template <class T>
struct DecoderArguments {
  const T* embedding;      // [vocabulary, hidden], or null
  const Linear<T>* words;  // the same as rounded weights, the head's as a rule; null with an embedding
  float embedding_scale;   // of these vectors
  const T* position_embedding;  // [positions, hidden], added to them; or null
  const float* norm;            // [hidden]
  const float* norm_bias;       // [hidden] of a layer norm, or null
  const Linear<T>* head;        // one output per token of the vocabulary
  float logit_scale;            // a factor of logits
  float logit_cap;              // they become logit_cap * tanh(logit / logit_cap); 0: none
  int64_t positions;            // of the longest sequence
  int64_t hidden;
  float norm_eps;
  const PerLayerInputsArguments<T>* per_layer;  // or null
};

// Attention, the first half of a layer. All pointers are kept, but for those to arguments; so below.
template <class T>
struct SelfAttentionArguments {
  int64_t heads, kv_heads, head_dim;
  int64_t kv;  // which pool has its keys and values
  const Linear<T>* into;   // hidden to queries, keys and values; gated, and to the gates of the results
  bool gated;              // results are multiplied by the sigmoids of their gates
  const float* head_norm;  // [heads + kv_heads, head_dim], or null; with flags as of AttendArguments
  bool value_norm;
  bool shared;             // ``kv`` is the pool of a layer before it; ``into`` makes no keys and values
  bool whole_norm;         // it norms all queries as one vector, and all keys; else each head
  bool norm_last;          // each head is rotated before it is normed
  float head_norm_eps;
  const T* cos;            // [positions, rotary_dim]
  const T* sin;            // [positions, rotary_dim], the first half negated
  int64_t rotary_dim;      // 0: nothing is rotated
  const Linear<T>* out;
  int64_t window;  // 0: none
  int64_t block;
  bool spans;             // the ends of spans are regarded
  float scale, soft_cap;  // soft_cap 0: none
  const float* sinks;     // [heads], or null
  float query_growth;     // queries grow by the logarithm of how many ``query_length`` their position is; 0: not
  int64_t query_length;
  float out_scale;  // beside a state space, of its results
};

// Attention over latents that all heads share, the first half of a layer; see latent_attention.hpp.
template <class T>
struct LatentAttentionArguments {
  int64_t heads, plain, rotated, rank, value_dim;
  int64_t kv;                // which pool has its latents, [rank + rotated] of each position
  const Linear<T>* into;     // hidden to queries, or to what they are made of, and to the latent
  const float* query_norm;   // [queries->inner], or null with queries
  const Linear<T>* queries;  // to [heads, plain + rotated]; null: ``into`` makes them
  const float* latent_norm;  // [rank]
  float eps;
  const T* cos;              // [positions, rotated]
  const T* sin;
  const Linear<T>* absorb;   // [heads * rank, plain]
  const Linear<T>* expand;   // [heads * value_dim, rank]
  const Linear<T>* out;
  float scale;
};

// A gated convolution of each channel by itself, the first half of a layer.
template <class T>
struct ShortConvArguments {
  const Linear<T>* into;  // hidden to 3 * channels
  const float* weight;    // [size, channels], the oldest input's first
  const float* bias;      // [channels], or null
  int64_t size;
  const Linear<T>* out;   // channels to hidden
  int64_t state;  // which pool has its state, [cells, size - 1, channels] of T
};

// The gated delta rule, the first half of a layer.
template <class T>
struct DeltaRuleArguments {
  int64_t key_heads, value_heads, key_dim, value_dim;
  const Linear<T>* into;   // hidden to queries, keys, values and gates of the results
  const Linear<T>* gates;  // hidden to strengths and decays, [2, value_heads]
  const float* conv;       // [size, channels] of queries, keys and values, the oldest input's first
  int64_t size;
  const float* rate;  // [value_heads]: a decay is e^(-rate * softplus(x + bias))
  const float* bias;  // [value_heads]
  const float* norm;  // [value_dim]
  float eps;
  const Linear<T>* out;
  // Which pool has the inputs of the convolution, [cells, size - 1, channels] of T; the next one has the states,
  // [cells, value_heads, key_dim, value_dim] floats.
  int64_t state;
};

// A state space with one decay for each head (Mamba-2), the first half of a layer.
template <class T>
struct MambaArguments {
  int64_t heads, head_dim, groups, state_size;
  const Linear<T>* into;   // hidden to gates of the results, x, b and c of the groups, and steps
  const float* conv;       // [size, channels] of x, b and c, the oldest input's first
  const float* conv_bias;  // [channels], or null
  int64_t size;
  const float* bias;  // [heads]: a step is softplus(step_scale * value + bias)
  const float* rate;  // [heads]: a decay is e^(-rate * step)
  const float* skip;  // [heads] factors of x in the results
  const float* norm;  // [heads * head_dim], of the gated results of each group; or null
  float eps, gate_scale, step_scale;
  const Linear<T>* out;
  float out_scale;  // beside attention, of its results
  // Which pool has the inputs of the convolution, [cells, size - 1, channels] of T; the next one has the states,
  // [cells, heads, state_size, head_dim] floats.
  int64_t state;
};

// Append a layer. All pointers but those to arguments are kept.
template <class T>
struct LayerArguments {
  Decoder<T>* decoder;
  const float* word_norm;        // [hidden] of the vectors of tokens, or null: attention does not read them
  const float* mixer_norm;       // [hidden], or null
  const float* mixer_norm_bias;  // [hidden] of a layer norm, or null; so below
  // The mixer: one of these, or attention and a state space side by side; the others are null.
  const SelfAttentionArguments<T>* attention;
  const LatentAttentionArguments<T>* latent;
  const ShortConvArguments<T>* conv;
  const DeltaRuleArguments<T>* delta_rule;
  const MambaArguments<T>* mamba;
  const float* mixer_post_norm;  // [hidden], or null: of the output, before it is added
  const float* mlp_norm;         // [hidden], or null
  const float* mlp_norm_bias;
  const Linear<T>* gate_up;   // of the dense part or the shared expert; null in a layer without, or without any part
  const Linear<T>* down;      // null with gate_up
  const Router<T>* router;    // null in a layer without experts
  const Experts<T>* experts;  // null with router
  int64_t gate;               // see gates.hpp
  const float* shared_gate;    // [hidden], of the output of the shared expert as a whole; or null
  const float* mlp_post_norm;  // [hidden], or null
  const DualArguments* dual;              // of a layer with a dense part and experts side by side, or null
  const PerLayerArguments<T>* per_layer;  // or null
  float residual_scale;                   // of the residual behind the layer
  float part_scale;                       // of what each part adds to it
  bool parallel;                          // both parts read the same residual
};

// Compute one step.
template <class T>
struct ForwardArguments {
  Decoder<T>* decoder;
  ThreadPool* pool;
  T* const* kv_pools;  // [num_kv_pools] keys and values
  int64_t num_kv_pools;
  int64_t page_size;
  int64_t num_pages;  // of each pool, the null page included
  int64_t tokens, rows, num_logits;
  const int64_t* input_ids;     // [tokens]
  const int64_t* positions;     // [tokens]
  const int64_t* slot_mapping;  // [tokens]
  const int64_t* cu_q;          // [rows + 1]
  const int64_t* kv_len;        // [rows]
  const int64_t* block_table;   // [rows, table_width]
  int64_t table_width;
  const int64_t* ends;         // [tokens] of layers that regard spans, or null; see attention.hpp
  void* const* state_pools;    // [num_states] cells of recurrent state, by tensor
  int64_t num_states;
  int64_t num_cells;           // of each pool, the null cell included
  const int64_t* read;         // [rows] cell of each row's state; or null with num_states
  const int64_t* write;
  const int64_t* replays;      // [rows + 1] see states.hpp; or null, and so the next one
  const int64_t* kept;         // [rows]
  void* const* stash_pools;    // [num_states] what drafts bring to each tensor, [num_stashes, num_drafts, inputs] of T
  int64_t num_stashes;
  int64_t num_drafts;
  const int64_t* logits_rows;  // [num_logits]
  float* logits;               // [num_logits, vocabulary]
  const int64_t* adapters;     // [rows] slot of each row's adapter, 0 for none; or null
  int64_t num_hidden;
  const int64_t* hidden_rows;  // [num_hidden] tokens whose normed residual is wanted
  float* hidden;               // [num_hidden, hidden]
  double* seconds;             // [PARTS] grow by the time of each part
  int64_t num_features;
  const int64_t* feature_rows;  // [num_features] tokens that are an image's
  const T* features;            // [1 + num_deep, num_features, hidden]
  int64_t num_deep;             // layers behind which features are added
  const T* cos;                // [tokens, rotary_dim] in place of the tables of layers, which all rotate as much; or null
  const T* sin;
  int64_t num_captured;
  const int64_t* captured;     // [num_captured] places of the residual, see decoder.hpp
  T* captures;                 // [tokens, num_captured, hidden]
};

// Read the vectors of tokens.
template <class T>
struct EmbedArguments {
  const Decoder<T>* decoder;
  const int64_t* ids;  // [count]
  int64_t count;
  T* out;  // [count, hidden]
};

// -- adapters -------------------------------------------------------------------------------------------------------

// What is added to some outputs of a layer, scale * b (a x), once they were multiplied and shifted.
struct LowRankTarget {
  const void* a;  // [rank, inner]
  const void* b;  // [rows, rank]
  bool a_is_bfloat16, b_is_bfloat16;  // not float
  int64_t rank;
  int64_t start, rows;  // which of the layer's outputs it is added to
  float scale;
  const float* rescaling;  // [2, rows] factors of these outputs, and shifts; or null
};

// The summands of one linear layer.
struct AdaptedLayer {
  int64_t layer;  // behind the last one is the head
  int64_t part;   // see adapters.hpp
  const LowRankTarget* targets;  // [count]
  int64_t count;
};

// Make the summands of layers an adapter's.
template <class T>
struct AdaptArguments {
  const Decoder<T>* decoder;
  Adapter<T>* adapter;
  const AdaptedLayer* layers;  // [count]
  int64_t count;
};

// -- from logits to tokens ------------------------------------------------------------------------------------------

// Sample one token per row. Banned logits are overwritten during the call and restored.
struct SampleArguments {
  ThreadPool* pool;
  float* logits;  // [rows, vocab], rows ``stride`` apart
  int64_t rows, vocab, stride;
  const float* temperature;  // [rows]
  const float* top_p;        // [rows]
  const float* min_p;        // [rows]
  const int64_t* top_k;      // [rows]
  const int64_t* seeds;      // [rows]
  const int64_t* positions;  // [rows]
  int64_t bans;
  const int64_t* banned_rows;  // [bans]
  const int64_t* banned_ids;   // [bans]
  int64_t bad;                 // the token of rows with NaN or infinity, or without a token that can be sampled
  int64_t* tokens;             // [rows]
};

// ``out``: logits with penalties.
struct PenaliseArguments {
  ThreadPool* pool;
  const float* logits;  // [rows, vocab], rows ``stride`` apart
  int64_t rows, vocab, stride;
  const int32_t* counts;  // [lines, vocab]; line 0 is of rows without penalties, all zero
  int64_t lines;
  const int64_t* row_of;  // [num_slots] line of each slot
  int64_t num_slots;
  const int64_t* slots;   // [rows]
  const float* repetition;
  const float* presence;
  const float* frequency;
  int64_t in_prompt;  // the bit of a count that marks a token of the prompt
  float* out;         // [rows, vocab]
};

// Set logits to -inf where the masks have no bit.
struct MasksArguments {
  ThreadPool* pool;
  float* logits;  // [num_rows, vocab], rows ``stride`` apart
  int64_t num_rows, vocab, stride, count;
  const int64_t* rows;    // [count] row of each mask
  const uint32_t* masks;  // [count, words]
  int64_t words;
};

// Logprobs of rows.
struct LogprobsArguments {
  ThreadPool* pool;
  const float* logits;  // [count, vocab], rows ``stride`` apart
  int64_t vocab, stride, count, top;
  float* totals;      // [2, count]: subtracted from a logit in this order, they give its logprob
  float* top_values;  // [count, top] logprobs of the likeliest tokens
  int64_t* top_ids;   // [count, top]
};

// -- errors ---------------------------------------------------------------------------------------------------------

// What an error is about, as aioinfer.native.bindings numbers it.
enum class ErrorKind : int { MEMORY, ARGUMENTS, THREADS, OTHER };

struct Error {
  std::string text;
  ErrorKind kind = ErrorKind::OTHER;
};

// The last error of the calling thread.
Error& last_error();

// The result of call(), or ``failed`` if it throws.
template <class Result, class Call>
Result guarded(Result failed, Call&& call) {
  try {
    return call();
  } catch (const InvalidArguments& problem) {
    last_error() = {problem.what(), ErrorKind::ARGUMENTS};
  } catch (const std::system_error& problem) {
    last_error() = {problem.what(), ErrorKind::THREADS};
  } catch (const std::bad_alloc& problem) {
    last_error() = {problem.what(), ErrorKind::MEMORY};
  } catch (const std::length_error& problem) {
    // A vector that could never be so large.
    last_error() = {problem.what(), ErrorKind::MEMORY};
  } catch (const std::exception& problem) {
    last_error() = {problem.what(), ErrorKind::OTHER};
  } catch (...) {
    last_error() = {"unknown", ErrorKind::OTHER};
  }
  return failed;
}

}  // namespace aioinfer
