// Linear layers, whatever the format of their weights, and the rows that they multiply.
//
//   weights      inputs                                                       product
//   packed       blocks of rows (activations.hpp)                             weights.hpp
//   quantised    rows of T, each of which is rounded when all of it is there   quantised.hpp
//
// Vectors are put into rows, and then each row is finished, or all of them in a phase of their own. A product gives its
// results to store(place, panel, first vector, second vector), by way of a sink: two vectors of outputs, or, gated, of
// gates and of what they gate, in panels of PANEL outputs or of LANES gated ones.
#pragma once

#include <variant>

#include "quantised.hpp"

namespace aioinfer {

// How weights are stored: as they are, or rounded to ``bits`` bits with a scale for each ``group`` of the inner
// dimension (0: all of it).
struct Format {
  int64_t bits = 0;  // 0: as they are
  int64_t group = 0;
  // How scales are stored, see Linear::factors(); -1: as rounding stores them.
  int64_t factors = -1;
  const int8_t* table = nullptr;  // [16] what 4 bits stand for, or null
};

template <class T>
class Linear {
 public:
  explicit Linear(Weights<T>&& weights)
      : outputs(weights.outputs), inner(weights.inner), gated(weights.gated), weights_(std::move(weights)) {}
  explicit Linear(QuantisedWeights&& weights)
      : outputs(weights.shape.outputs), inner(weights.shape.inner), gated(weights.shape.gated),
        weights_(std::move(weights)) {}

  // Round rows [outputs, inner], or gated [2 * outputs, inner], or not, and pack them with a bias or null.
  static Linear of(ThreadPool& pool, const T* rows, const T* bias, int64_t outputs, int64_t inner, bool gated,
                   Format format) {
    if (format.bits == 0) return Linear(Weights<T>(pool, rows, bias, outputs, inner, gated));
    QuantisedWeights weights({outputs, inner, format.group, format.bits, gated});
    weights.round(pool, rows, bias);
    return Linear(std::move(weights));
  }

  // Packed weights of size bytes() in memory that the caller owns, with a bias or null.
  static Linear mapped(const char* data, const T* bias, int64_t outputs, int64_t inner, bool gated, Format format) {
    // It is only read: set() is not called.
    Linear layer = placed(const_cast<char*>(data), outputs, inner, gated, format);
    layer.set_bias(bias);
    return layer;
  }

  // One element per row, or null.
  void set_bias(const T* bias) {
    std::visit([&](auto& weights) { weights.set_bias(bias); }, weights_);
  }

  // Without a bias and without contents, in memory of size bytes() that the caller owns; set() fills it.
  static Linear placed(char* data, int64_t outputs, int64_t inner, bool gated, Format format) {
    if (format.bits == 0) return Linear(Weights<T>(data, outputs, inner, gated));
    const QuantisedShape shape(outputs, inner, format.group, format.bits, gated, format.table);
    if (format.factors < 0) return Linear(QuantisedWeights(shape, data));
    require(format.factors / 2 <= static_cast<int64_t>(Precision::POWERS), "there is no such type of scales");
    return Linear(QuantisedWeights(shape, static_cast<Precision>(format.factors / 2), format.factors % 2 != 0, data));
  }
  static int64_t bytes(int64_t outputs, int64_t inner, bool gated, Format format) {
    // Not null, which would be memory of its own.
    alignas(64) static char nothing[64];
    const Linear layer = placed(nothing, outputs, inner, gated, format);
    return layer.bytes();
  }

  const char* data() const { return std::visit([](const auto& weights) { return weights.data(); }, weights_); }
  int64_t bytes() const { return std::visit([](const auto& weights) { return weights.bytes(); }, weights_); }

  // The type of scales, and whether there are offsets: 2 * precision + offsets; of weights that are not rounded, -1.
  int64_t factors() const {
    const auto* weights = quantised();
    return weights == nullptr ? -1 : 2 * static_cast<int64_t>(weights->precision) + weights->offsets;
  }

  void set(ThreadPool& pool, const T* rows) {
    if (auto* quantised = std::get_if<QuantisedWeights>(&weights_))
      quantised->template round<T>(pool, rows, nullptr);
    else
      std::get<Weights<T>>(weights_).set(pool, rows);
  }

  // One of them is null.
  const Weights<T>* packed() const { return std::get_if<Weights<T>>(&weights_); }
  const QuantisedWeights* quantised() const { return std::get_if<QuantisedWeights>(&weights_); }

  int64_t panels() const { return quantised() ? quantised()->panels() : packed()->panels; }
  int64_t panel_bytes() const { return quantised() ? quantised()->panel_bytes() : packed()->panel_bytes(); }

  // It is in memory that the caller owns.
  bool mapped() const { return std::visit([](const auto& weights) { return weights.mapped(); }, weights_); }

  // Whether another layer can multiply the same inputs.
  bool shares_inputs_with(const Linear& other) const {
    if (inner != other.inner || (quantised() == nullptr) != (other.quantised() == nullptr)) return false;
    return quantised() == nullptr || quantised()->shape.group == other.quantised()->shape.group;
  }

  int64_t outputs, inner;
  bool gated;

 private:
  std::variant<Weights<T>, QuantisedWeights> weights_;
};

// Throws InvalidArguments unless weights have this size.
template <class T>
void require_size(const Linear<T>& weights, int64_t outputs, int64_t inner, bool gated = false) {
  require(weights.outputs == outputs && weights.inner == inner, "weights of another size");
  require(weights.gated == gated, gated ? "weights are not gated" : "weights are gated");
}

// Rows for a layer; does not own its memory.
template <class T>
class Inputs {
 public:
  // Where a row is put.
  struct Row {
    uint32_t* units;
    T* staged;
  };

  explicit Inputs(const Activations<T>& blocks) : blocks_(blocks) {}
  // ``staged`` may be null where whole rows are set or copied.
  Inputs(T* staged, const RoundedRows& rounded, int64_t inner)
      : blocks_(nullptr, rounded.rows(), inner), staged_(staged), rounded_(rounded), rounds_(true) {}

  int64_t rows() const { return blocks_.blocks.rows; }
  const Activations<T>& blocks() const { return blocks_; }
  const RoundedRows& rounded() const { return rounded_; }

  Row row(int64_t index) const {
    if (rounds_) return {nullptr, staged_ + index * blocks_.inner};
    return {blocks_.row(index), nullptr};
  }
  AIOINFER_INLINE Row row(const Place& place) const {
    if (rounds_) return {nullptr, staged_ + place.row * blocks_.inner};
    return {blocks_.row(place), nullptr};
  }

  // LANES values from inner index ``at`` on, which is a multiple of LANES.
  AIOINFER_INLINE void put(const Row& row, int64_t at, Floats values) const {
    if (row.staged != nullptr)
      Number<T>::store_lanes(row.staged + at, values);
    else
      blocks_.put(row.units, at, values);
  }

  // After all of a row was put.
  void finish(int64_t index) const {
    if (rounds_) rounded_.set(index, staged_ + index * blocks_.inner);
  }

  // Put a row and finish it. For packed weights, LANES divides the inner dimension.
  void set(int64_t index, const T* from) const {
    if (rounds_) return rounded_.set(index, from);
    uint32_t* to = blocks_.row(index);
    for (int64_t i = 0; i < blocks_.inner; i += LANES) blocks_.put(to, i, Number<T>::load_lanes(from + i));
  }

  // Finish all rows, as a phase of a program, or none if that is nothing.
  void finish(Worker& worker) const {
    if (rounds_) worker.parallel_in_runs(rows(), [&](int64_t index) { finish(index); });
  }

  // The numbers of a row that was put, side by side: where they are, or copied to ``to``.
  const T* numbers(int64_t index, T* to) const {
    if (rounds_) return staged_ + index * blocks_.inner;
    blocks_.copy_numbers(blocks_.row(index), to);
    return to;
  }

  // Copy a finished row of others for a layer that can multiply the same inputs.
  void copy(int64_t index, const Inputs& others, int64_t theirs) const {
    if (rounds_)
      rounded_.copy(index, others.rounded_, theirs);
    else
      blocks_.copy(blocks_.row(index), others.blocks_, others.blocks_.row(theirs));
  }

 private:
  Activations<T> blocks_;  // of quantised weights, without memory
  T* staged_ = nullptr;
  RoundedRows rounded_;
  bool rounds_ = false;  // the weights are quantised
};

// Memory for the inputs of one layer at a time.
template <class T>
class InputBuffer {
 public:
  // Make room for so many rows, and for so many with the padding of blocks; for rows that are put, not set or copied.
  // Of this class only reserve() throws.
  void reserve(const Linear<T>& layer, int64_t rows, int64_t padded, bool put) {
    if (layer.quantised() == nullptr) return grow(units_, padded * units_of<T>(layer.inner));
    const QuantisedShape& shape = layer.quantised()->shape;
    if (put) grow(staged_, rows * shape.inner);
    grow(values_, rows * shape.depth());
    grow(groups_, rows * shape.groups());
  }
  void reserve(const Linear<T>& layer, int64_t rows, bool put = true) {
    reserve(layer, rows, Blocks::of<T>(rows).padded(), put);
  }

  // Rows behind others: ``first`` of them, or ``padded_first`` with the padding of their blocks.
  Inputs<T> inputs(const Linear<T>& layer, int64_t rows, int64_t first = 0, int64_t padded_first = 0) {
    const int64_t inner = layer.inner;
    if (layer.quantised() == nullptr)
      return Inputs<T>(Activations<T>(units_.data() + padded_first * units_of<T>(inner), rows, inner));
    const QuantisedShape& shape = layer.quantised()->shape;
    const RoundedRows rounded(values_.data() + first * shape.depth(), groups_.data() + first * shape.groups(), rows, shape);
    return Inputs<T>(staged_.empty() ? nullptr : staged_.data() + first * inner, rounded, inner);
  }

 private:
  Buffer<uint32_t> units_;
  Buffer<T> staged_;
  Buffer<int8_t> values_;
  std::vector<RowGroup> groups_;
};

// All rows times panels [from, to) of the weights, counted in panels of their format.
template <class T, class Store>
void multiply_panels(const Inputs<T>& a, const Linear<T>& w, int64_t from, int64_t to, Store&& store) {
  const Sink sink(store, a.blocks().blocks.height);
  if (w.quantised() == nullptr) return multiply_panels(a.blocks(), *w.packed(), from, to, sink);
  multiply_rounded(a.rounded(), *w.quantised(), 0, a.rows(), from, to, sink);
}

// All rows times all panels, as a phase of a program.
template <class T, class Store>
void multiply(Worker& worker, const Inputs<T>& a, const Linear<T>& w, Store&& store) {
  const Sink sink(store, a.blocks().blocks.height);
  if (w.quantised() == nullptr) return multiply(worker, a.blocks(), *w.packed(), sink);
  multiply_rounded(worker, a.rounded(), *w.quantised(), sink);
}

}  // namespace aioinfer
