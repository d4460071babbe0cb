// Quantised weights: packing and unpacking; see quantised.hpp for their layout.
#pragma once

#include <optional>

#include "quantised_rounding.hpp"

namespace aioinfer {

// The bits of a number as float16, if it is zero or a normal one of those. Denormal ones could not be widened while
// denormal numbers are 0, as they are with tiles.
inline std::optional<uint16_t> half_bits(float value) {
  const uint32_t word = cast<uint32_t>(value), sign = word >> 16 & 0x8000u, size = word & 0x7fffffffu;
  if (size == 0) return sign;
  const int exponent = static_cast<int>(size >> 23) - 127;
  if (exponent > 15 || exponent < -14 || size & 0x1fffu) return {};
  return sign | (size - (112u << 23)) >> 13;
}

inline float of_half_bits(uint16_t bits) {
  const uint32_t size = bits & 0x7fffu, sign = (bits & 0x8000u) << 16;
  return cast<float>(size == 0 ? sign : sign | ((size << 13) + (112u << 23)));
}

// The step of which the factors of a block are whole numbers, if there is one: a product of both is the factor itself.
// The largest is 63 steps or -128 wherever llama.cpp has chosen the others.
inline std::optional<float> step_of(const float* factors, int64_t count) {
  const float* end = factors + count;
  const float most = *std::max_element(factors, end, [](float a, float b) { return std::abs(a) < std::abs(b); });
  if (most == 0) return most;
  auto fits = [&](int number) {
    const float step = most / static_cast<float>(number);
    // A denormal step would be 0 beside tiles.
    return std::isnormal(step) && std::all_of(factors, end, [&](float x) {
      const float nearest = std::nearbyint(x / step);
      return nearest >= -128 && nearest <= 127 && nearest * step == x;
    });
  };
  for (const int number : {63, -128})
    if (fits(number)) return most / static_cast<float>(number);
  for (int number = 127; number > 0; number--)
    if (fits(number)) return most / static_cast<float>(number);
  return {};
}

inline bool all_fit(const float* numbers, const QuantisedShape& shape, Precision precision) {
  if (precision == Precision::FLOAT32 || numbers == nullptr) return true;
  const int64_t count = shape.rows() * shape.groups();
  if (precision == Precision::STEPS) {
    if (!shape.fills_blocks()) return false;
    const int64_t block = STEP_NUMBERS / shape.group;
    for (int64_t i = 0; i < count; i += block)
      if (!step_of(numbers + i, block)) return false;
    return true;
  }
  return std::all_of(numbers, numbers + count, [&](float x) {
    if (precision == Precision::POWERS) return (cast<uint32_t>(x) & 0x807fffffu) == 0;
    return precision == Precision::BFLOAT16 ? (cast<uint32_t>(x) & 0xffffu) == 0 : half_bits(x).has_value();
  });
}

// The shortest way to store all scales and offsets, [rows, groups] each; offsets may be null.
inline Precision precision_of(const float* scales, const float* offsets, const QuantisedShape& shape) {
  for (const Precision precision : {Precision::POWERS, Precision::BFLOAT16, Precision::FLOAT16, Precision::STEPS})
    if (all_fit(scales, shape, precision) && all_fit(offsets, shape, precision)) return precision;
  return Precision::FLOAT32;
}

QuantisedShape::QuantisedShape(int64_t outputs, int64_t inner, int64_t group, int64_t bits, bool gated,
                               const int8_t* table)
    : outputs(outputs), inner(inner), group(group), bits(static_cast<int>(bits)), gated(gated),
      has_table(table != nullptr) {
  require(outputs > 0 && inner > 0, "weights need outputs and an inner dimension");
  require(bits == 4 || bits == 6 || bits == 8, "weights have 4, 6 or 8 bits");
  require(!gated || outputs % (QUANTISED_PANEL / 2) == 0, "the outputs of gated weights are no multiple of 16");
  require(group >= 0 && group % LEAST_GROUP == 0, "a group is no multiple of 16");
  require(bits == 4 || table == nullptr, "weights with a table have 4 bits");
  require(bits != 4 || table != nullptr || group % (2 * LEAST_GROUP) == 0,
          "a group of weights of 4 bits is no multiple of 32");
  if (table != nullptr) std::copy_n(table, this->table.size(), this->table.begin());
  // Two products with activations fit 16 bits.
  require(std::count(this->table.begin(), this->table.end(), -128) == 0, "a number of a table is -128");
  require(inner <= LONGEST_GROUP || group > 0, "the inner dimension is too long for one group");
  require(group <= LONGEST_GROUP, "a group is too long");
  // All of it, padded to a line of the cache.
  if (group == 0) this->group = (inner + 63) / 64 * 64;
}

QuantisedWeights::QuantisedWeights(const QuantisedShape& shape, Precision precision, bool offsets, char* data)
    : shape(shape), precision(precision), offsets(offsets), data_(data) {
  require(precision != Precision::STEPS || shape.fills_blocks(), "steps need blocks of several groups");
  if (data != nullptr) return;
  memory_ = Memory(bytes());
  data_ = memory_.as<char>();
}

int64_t QuantisedWeights::source(int64_t strip, int lane) const {
  const int64_t panel = strip / STRIPS, output = strip % STRIPS * STRIP + lane;
  const int64_t row = panel * panel_outputs() + output % panel_outputs();
  if (row >= shape.outputs) return -1;
  return output < panel_outputs() ? row : shape.outputs + row;
}

template <class Put>
void QuantisedWeights::fill(ThreadPool& pool, Put&& put) {
  pool.run([&](Worker& worker) {
    worker.parallel(STRIPS * panels(), [&](int64_t strip) {
      std::memset(data_ + strip * strip_bytes(), 0, strip_bytes());
      for (int lane = 0; lane < STRIP; lane++)
        if (const int64_t row = source(strip, lane); row >= 0) put(strip, lane, row);
    });
  });
}

void QuantisedWeights::set_steps(int64_t strip, int lane, int64_t group, float scale, float offset) {
  if (precision != Precision::STEPS) return;
  char* at = data_ + steps_at(strip, group);
  store(at + lane * sizeof(float), scale);
  if (offsets) store(at + (STRIP + lane) * sizeof(float), offset);
}

void QuantisedWeights::set_factor(int64_t strip, int lane, int64_t group, int kind, float value) {
  char* at = data_ + factor_at(strip, lane, group, kind);
  if (precision == Precision::STEPS) {
    const float step = load<float>(data_ + steps_at(strip, group) + (kind * STRIP + lane) * sizeof(float));
    return store(at, static_cast<int8_t>(step == 0 ? 0 : std::nearbyint(value / step)));
  }
  if (precision == Precision::FLOAT32) return store(at, value);
  if (precision == Precision::POWERS) return store(at, static_cast<uint8_t>(cast<uint32_t>(value) >> 23));
  store(at, precision == Precision::BFLOAT16 ? rounded_bits(value) : half_bits(value).value());
}

float QuantisedWeights::factor(int64_t strip, int lane, int64_t group, int kind) const {
  const char* at = data_ + factor_at(strip, lane, group, kind);
  if (precision == Precision::STEPS) {
    const float step = load<float>(data_ + steps_at(strip, group) + (kind * STRIP + lane) * sizeof(float));
    return static_cast<float>(load<int8_t>(at)) * step;
  }
  if (precision == Precision::FLOAT32) return load<float>(at);
  if (precision == Precision::POWERS) return cast<float>(uint32_t{load<uint8_t>(at)} << 23);
  const auto bits = load<uint16_t>(at);
  return precision == Precision::BFLOAT16 ? Number<bfloat16>::read({bits}) : of_half_bits(bits);
}

// Calls part(byte, its lowest bit, mask, bit of the number) for what an output's k-th number has in a group's units.
template <class Part>
void each_part(int bits, int lane, int64_t k, Part&& part) {
  const int64_t unit = k / UNIT, upper = unit / 4 * 3 + 2;
  auto byte = [&](int64_t line) { return (line * STRIP + lane) * UNIT + k % UNIT; };
  if (bits == 8) return part(byte(unit), 0, 255, 0);
  part(byte(bits == 4 ? unit / 2 : unit / 2 + unit / 4), unit % 2 * 4, 15, 0);
  if (bits == 6) part(byte(upper), unit % 4 * 2, 3, 4);
}

void QuantisedWeights::set_group(int64_t strip, int lane, int64_t group, float scale, float offset,
                                 const uint8_t* values) {
  set_factor(strip, lane, group, 0, scale);
  if (offsets) set_factor(strip, lane, group, 1, offset);
  char* at = data_ + units_at(strip, group);
  for (int64_t k = 0; k < shape.group; k++)
    each_part(shape.bits, lane, k, [&](int64_t byte, int64_t low, int mask, int from) {
      at[byte] = static_cast<char>(at[byte] | (values[k] >> from & mask) << low);
    });
}

template <class T>
void QuantisedWeights::set_bias(const T* bias) {
  if (bias == nullptr) return;
  bias_.resize(panels() * QUANTISED_PANEL);
  for (int64_t strip = 0; strip < STRIPS * panels(); strip++)
    for (int lane = 0; lane < STRIP; lane++)
      if (const int64_t row = source(strip, lane); row >= 0) bias_[strip * STRIP + lane] = Number<T>::read(bias[row]);
}

template <class T>
void QuantisedWeights::round(ThreadPool& pool, const T* rows, const T* bias) {
  require(shape.bits != 6 && !shape.has_table, "weights are rounded to 4 or 8 bits");
  set_bias(bias);
  fill(pool, [&](int64_t strip, int lane, int64_t row) {
    thread_local std::vector<float> numbers;
    thread_local std::vector<uint8_t> values;
    grow(numbers, shape.group), grow(values, shape.group);
    for (int64_t g = 0; g < shape.groups(); g++) {
      const T* from = rows + row * shape.inner + g * shape.group;
      const int64_t size = std::min(shape.group, shape.inner - g * shape.group);
      for (int64_t i = 0; i < size; i++) numbers[i] = Number<T>::read(from[i]);
      std::fill_n(&numbers[size], shape.group - size, 0.0f);
      const auto rounding = shape.bits == 4 ? round_to_4_bits : round_to_8_bits;
      const RoundedGroup group = rounding(numbers.data(), size, precision, values.data());
      std::fill_n(&values[size], shape.group - size, 0);
      set_group(strip, lane, g, group.scale, group.offset, values.data());
    }
  });
}

QuantisedWeights::QuantisedWeights(ThreadPool& pool, const QuantisedShape& shape, const uint8_t* values,
                                   const float* scales, const float* offsets, const float* bias)
    : QuantisedWeights(shape, precision_of(scales, offsets, shape), offsets != nullptr, nullptr) {
  const int64_t groups = shape.groups();
  set_bias(bias);
  fill(pool, [&](int64_t strip, int lane, int64_t row) {
    thread_local std::vector<uint8_t> padded;
    grow(padded, shape.group);
    for (int64_t g = 0; g < groups; g++) {
      const int64_t size = std::min(shape.group, shape.inner - g * shape.group);
      std::copy_n(values + row * shape.inner + g * shape.group, size, padded.data());
      std::fill_n(&padded[size], shape.group - size, 0);
      require(*std::max_element(padded.data(), &padded[size]) < 1 << shape.bits, "a weight has more bits than stated");
      const int64_t at = row * groups + g;
      if (precision == Precision::STEPS && g % block() == 0)
        set_steps(strip, lane, g, *step_of(scales + at, block()), offsets ? *step_of(offsets + at, block()) : 0.0f);
      set_group(strip, lane, g, scales[at], offsets == nullptr ? 0.0f : offsets[at], padded.data());
    }
  });
}

template <class Put>
void QuantisedWeights::each(int64_t strip, int lane, Put&& put) const {
  for (int64_t group = 0; group < shape.groups(); group++) {
    const float scale = factor(strip, lane, group, 0), offset = offsets ? factor(strip, lane, group, 1) : 0.0f;
    const char* units = data_ + units_at(strip, group);
    const int64_t first = group * shape.group;
    const int64_t size = std::min(shape.group, shape.inner - first);
    for (int64_t k = 0; k < size; k++) {
      int number = 0;
      each_part(shape.bits, lane, k, [&](int64_t byte, int64_t low, int mask, int to) {
        number |= (static_cast<uint8_t>(units[byte]) >> low & mask) << to;
      });
      if (shape.kind() == LOOKED_UP)
        number = shape.table[number];
      else
        number = shape.bits == 8 ? static_cast<int8_t>(number) : number - (offsets ? 0 : 1 << (shape.bits - 1));
      const float value = scale * static_cast<float>(number);
      put(first + k, offsets ? value + offset : value);
    }
  }
}

void QuantisedWeights::dequantise(ThreadPool& pool, float* out) const {
  pool.run([&](Worker& worker) {
    worker.parallel(panels() * QUANTISED_PANEL, [&](int64_t output) {
      const int lane = static_cast<int>(output % STRIP);
      const int64_t row = source(output / STRIP, lane);
      if (row >= 0) each(output / STRIP, lane, [&](int64_t k, float value) { out[row * shape.inner + k] = value; });
    });
  });
}

template <class T>
void QuantisedWeights::read(int64_t row, T* out) const {
  each(row / STRIP, static_cast<int>(row % STRIP), [&](int64_t k, float value) { out[k] = Number<T>::make(value); });
}

}  // namespace aioinfer
