// Quantised weights of 4, 6 or 8 bits, and their products with activations of 8 bits, as integers.
//
//   activations, row by row              weights, in strips of 32 outputs or 16
//   ┌ row 0: group 0 | group 1 | .. ┐    ┌ strip 0: factors, units | factors, units | .. ┐   a unit is 4 neighbours along
//   │ row 1: group 0 | group 1 | .. │    │ strip 1: factors, units | factors, units | .. │   the inner dimension
//   └                               ┘    └                                               ┘
//
// A group is a run of the inner dimension; the last one, or the only one, is padded. Before the units of a group lie its
// scales and offsets, its factors. Where they are shorter than a line of the cache, a span of several groups has its
// factors together, if their number allows. A block is one group, or several whose factors have steps in common, which lie
// before all of them. A strip is what the vectors of a product have at once, so that it is read as one stream of memory: a
// core of Zen 5 reads two streams side by side at four fifths of the speed of one. Within a group, a weight of an output is
// scale * q + offset, and an activation of a row is factor * a, with whole numbers q and a. With the exact 32-bit sums
//   S = sum of q * a,   A = sum of a
// a result is, over the groups in ascending order,
//   total = fma(float(S) * factor, scale, fma(factor * float(A), offset, total))
// from 0 on, or fma(float(S) * factor, scale, total) without offsets, and then its bias is added. Every operation is
// one of float32 with its rounding, and the sums are exact: a result has the same bits alone and among other rows, on
// any number of threads, and on every processor. Denormal numbers are 0, as in all programs of a model.
//
// What 4 bits say may be the place of q in a table of 16 signed bytes: floats of 4 bits, or llama.cpp's numbers that lie
// closer around 0.
//
// Everything here is compiled once, by quantised.cpp: others call it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "checks.hpp"
#include "quantised_lanes.hpp"
#include "weights.hpp"

namespace aioinfer {

// Outputs of a panel; of gated weights, 16 gates and what they gate.
constexpr int QUANTISED_PANEL = 32;
// Outputs of a strip, which lie together; a panel has one or two.
constexpr int STRIP = DOT_VECTORS * DOT_LANES;
constexpr int STRIPS = QUANTISED_PANEL / STRIP;
// Numbers of the inner dimension that a product adds up at once.
constexpr int UNIT = 4;
// Groups are multiples of this; those of weights of 4 bits without a table of twice as much.
constexpr int LEAST_GROUP = 16;
// The longest group whose sums fit 32 bits.
constexpr int64_t LONGEST_GROUP = 1 << 17;

// How scales and offsets are stored: in the shortest way that has all of them. STEPS are signed numbers of 8 bits, times a
// step that the scales of a block have in common, and another of its offsets: those of llama.cpp's K-quants. POWERS are
// the 8 bits of the exponent of a power of two, or of 0.
enum class Precision { BFLOAT16, FLOAT16, STEPS, FLOAT32, POWERS };
// The numbers of an output in a block with steps.
constexpr int64_t STEP_NUMBERS = 256;

// In place of the bits of weights, where functions are made for each: 4 bits with a table.
constexpr int LOOKED_UP = 0;
using Table = std::array<int8_t, 16>;

// The shape of quantised weights.
struct QuantisedShape {
  // Throws InvalidArguments for what there are no kernels for. ``group``: 0 is one group for the whole inner dimension;
  // ``table``: what 4 bits stand for, or null.
  QuantisedShape(int64_t outputs, int64_t inner, int64_t group, int64_t bits, bool gated, const int8_t* table = nullptr);

  int64_t rows() const { return gated ? 2 * outputs : outputs; }
  int64_t groups() const { return (inner + group - 1) / group; }
  int64_t depth() const { return groups() * group; }  // the inner dimension with its padding
  // Whether several groups each fill blocks of STEP_NUMBERS.
  bool fills_blocks() const {
    return group < STEP_NUMBERS && STEP_NUMBERS % group == 0 && depth() % STEP_NUMBERS == 0;
  }

  // Their bits, or LOOKED_UP.
  int kind() const { return has_table ? LOOKED_UP : bits; }

  int64_t outputs, inner, group;
  int bits;
  bool gated, has_table;
  Table table{};
};

// What a row's activations of one group have in common.
struct RowGroup {
  float factor;
  float offset_factor;  // factor * float(sum)
  int32_t sum;          // of the activations, without their factor
};

// Activations [rows, inner] rounded to 8 bits, in groups, without offsets: the largest of a group is 127 times its
// factor. Padding is 0. A group with infinity or NaN has the factor NaN, and so have all results of its row. Does not own
// its memory, which has ``shape.depth()`` values and ``shape.groups()`` groups for each row.
class RoundedRows {
 public:
  RoundedRows() = default;
  RoundedRows(int8_t* values, RowGroup* groups, int64_t rows, const QuantisedShape& shape)
      : values_(values), row_groups_(groups), rows_(rows), inner_(shape.inner), group_(shape.group),
        depth_(shape.depth()), groups_(shape.groups()) {}

  // Round a row of ``inner`` numbers.
  template <class T>
  void set(int64_t row, const T* from) const;

  // The same row of others for weights of the same inner dimension and group.
  void copy(int64_t row, const RoundedRows& others, int64_t their_row) const {
    std::memcpy(values_ + row * depth_, others.values(their_row), depth_);
    std::copy_n(others.groups(their_row), groups_, row_groups_ + row * groups_);
  }

  int64_t rows() const { return rows_; }
  int64_t depth() const { return depth_; }
  const int8_t* values(int64_t row) const { return values_ + row * depth_; }
  const RowGroup* groups(int64_t row) const { return row_groups_ + row * groups_; }

 private:
  int8_t* values_ = nullptr;
  RowGroup* row_groups_ = nullptr;
  int64_t rows_ = 0, inner_ = 0, group_ = 0, depth_ = 0, groups_ = 0;
};

// Weights in strips, with a bias or without. Those of 8 bits are signed, and numbers of tables. Others of 4 and 6 bits are
// unsigned, and without offsets a weight is scale * (q - 8), or scale * (q - 32).
class QuantisedWeights {
 public:
  // For weights that round() rounds, in memory of size bytes() that the caller owns, or in its own if that is null.
  // The caller's may hold rounded weights already.
  explicit QuantisedWeights(const QuantisedShape& shape, char* data = nullptr)
      : QuantisedWeights(shape, shape.groups() == 1 ? Precision::FLOAT32 : Precision::BFLOAT16, shape.bits == 4, data) {}

  // The same with scales, and offsets or none, of another type than round() gives them: what data() of weights was that
  // were quantised already.
  QuantisedWeights(const QuantisedShape& shape, Precision precision, bool offsets, char* data);

  // Pack numbers [shape.rows(), inner], one a byte, with scales and offsets [shape.rows(), groups], without loss.
  // ``offsets`` and ``bias`` may be null. Throws InvalidArguments for a number beyond their bits.
  QuantisedWeights(ThreadPool& pool, const QuantisedShape& shape, const uint8_t* values, const float* scales,
                   const float* offsets, const float* bias);

  // Round rows [shape.rows(), inner], with a bias of as many elements, or null.
  //
  // To 8 bits without offsets, the largest of a group 127 times its scale; to 4 bits with scale and offset, between
  // about the least and the largest of a group. The results of a group with infinity or NaN are NaN. Throws InvalidArguments
  // for other bits.
  template <class T>
  void round(ThreadPool& pool, const T* rows, const T* bias);

  // ``bias``: one element per row, or null.
  template <class T>
  void set_bias(const T* bias);

  // The weights as float, [shape.rows(), inner]: scale * q + offset, with two roundings.
  void dequantise(ThreadPool& pool, float* out) const;

  // One row of that, as T; ``row`` of weights that are not gated.
  template <class T>
  void read(int64_t row, T* out) const;

  int64_t bytes() const { return panels() * panel_bytes(); }
  int64_t panels() const { return (shape.outputs + panel_outputs() - 1) / panel_outputs(); }
  int panel_outputs() const { return shape.gated ? QUANTISED_PANEL / 2 : QUANTISED_PANEL; }
  int64_t panel_bytes() const { return STRIPS * strip_bytes(); }
  int64_t strip_bytes() const { return shape.groups() / block() * block_bytes(); }
  // The groups of a block.
  int64_t block() const { return precision == Precision::STEPS ? STEP_NUMBERS / shape.group : 1; }
  int64_t block_bytes() const { return steps_bytes() + block() * (factors_bytes() + units_bytes()); }
  // The groups whose factors lie together: a whole number of spans is a block, or the inner dimension.
  int64_t span() const {
    const int64_t groups = precision == Precision::STEPS ? block() : shape.groups();
    int64_t count = std::max<int64_t>(1, 64 / factors_bytes());
    while (groups % count) count /= 2;
    return count;
  }
  int64_t span_bytes() const { return span() * (factors_bytes() + units_bytes()); }
  // Of scales, and of offsets if there are any.
  int64_t steps_bytes() const { return precision == Precision::STEPS ? kinds() * STRIP * sizeof(float) : 0; }
  int64_t factors_bytes() const { return kinds() * STRIP * factor_bytes(); }
  int64_t factor_bytes() const {
    if (precision == Precision::STEPS || precision == Precision::POWERS) return 1;
    return precision == Precision::FLOAT32 ? 4 : 2;
  }
  int64_t units_bytes() const { return shape.group * STRIP * shape.bits / 8; }
  int kinds() const { return offsets ? 2 : 1; }

  const char* data() const { return data_; }
  bool mapped() const { return memory_.as<char>() == nullptr; }
  const char* strip(int64_t index) const { return data_ + index * strip_bytes(); }
  // Of the outputs of a panel; null if there is none.
  const float* bias(int64_t panel) const { return bias_.empty() ? nullptr : &bias_[panel * QUANTISED_PANEL]; }

  QuantisedShape shape;
  Precision precision;
  bool offsets;

 private:
  // All weights of an output of a strip: put(index, value).
  template <class Put>
  void each(int64_t strip, int lane, Put&& put) const;
  // Row of the matrix that an output of a strip is; -1 for padding.
  int64_t source(int64_t strip, int lane) const;
  // Call put(strip, lane, row) for all outputs but padding.
  template <class Put>
  void fill(ThreadPool& pool, Put&& put);
  void set_group(int64_t strip, int lane, int64_t group, float scale, float offset, const uint8_t* values);
  // Steps of the block of a group: nothing where factors have none.
  void set_steps(int64_t strip, int lane, int64_t group, float scale, float offset);
  // The scale of a group, or its offset.
  void set_factor(int64_t strip, int lane, int64_t group, int kind, float value);
  float factor(int64_t strip, int lane, int64_t group, int kind) const;
  int64_t steps_at(int64_t strip, int64_t group) const { return strip * strip_bytes() + group / block() * block_bytes(); }
  int64_t units_at(int64_t strip, int64_t group) const {
    return span_at(strip, group) + span() * factors_bytes() + group % span() * units_bytes();
  }
  int64_t span_at(int64_t strip, int64_t group) const {
    return strip * strip_bytes() + (group / block() + 1) * steps_bytes() + group / span() * span_bytes();
  }
  int64_t factor_at(int64_t strip, int lane, int64_t group, int kind) const {
    return span_at(strip, group) + group % span() * factors_bytes() + (kind * STRIP + lane) * factor_bytes();
  }

  Memory memory_;
  char* data_;
  std::vector<float> bias_;
};

// The groups of a strip, one after the other, in the order of memory.
class StripGroups {
 public:
  StripGroups(const QuantisedWeights& w, int64_t strip)
      : next_(w.strip(strip)), in_block_(w.block() - 1), in_span_(w.span() - 1), steps_bytes_(w.steps_bytes()),
        factors_bytes_(w.factors_bytes()), units_bytes_(w.units_bytes()) {}

  // Go to the next group, the first one at first; call passed(from, bytes) for steps and factors that come before it.
  template <class Passed>
  AIOINFER_INLINE void advance(Passed&& passed) {
    if ((index_ & in_block_) == 0) passed(next_, steps_bytes_), steps = next_, next_ += steps_bytes_;
    if ((index_ & in_span_) == 0) {
      const int64_t bytes = (in_span_ + 1) * factors_bytes_;
      passed(next_, bytes), factors = next_, next_ += bytes;
    } else {
      factors += factors_bytes_;
    }
    units = next_, next_ += units_bytes_, index_++;
  }

  const char *steps = nullptr, *factors = nullptr, *units = nullptr;

 private:
  const char* next_;
  int64_t index_ = 0, in_block_, in_span_, steps_bytes_, factors_bytes_, units_bytes_;
};

// Rows [first, last) times panels [from, to) of QUANTISED_PANEL outputs, given to the sink as those of PANEL.
void multiply_rounded(const RoundedRows& a, const QuantisedWeights& w, int64_t first, int64_t last, int64_t from,
                     int64_t to, const Sink& sink);

// All rows times all panels, as a phase of a program.
void multiply_rounded(Worker& worker, const RoundedRows& a, const QuantisedWeights& w, const Sink& sink);

}  // namespace aioinfer
