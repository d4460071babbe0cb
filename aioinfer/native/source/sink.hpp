// Where a product gives its results: they are stored by one call for each block of rows and run of panels, so that
// products are compiled once, whatever becomes of their results.
#pragma once

#include "activations.hpp"

namespace aioinfer {

// Outputs of a panel: two vectors.
constexpr int PANEL = 2 * LANES;

// Results of ``rows`` rows from ``first`` on and of ``count`` panels from ``panel`` on, biases included; distances are
// counted in floats.
struct Results {
  int64_t first, rows, panel, count;
  const float* sums;
  int64_t row;     // from one row to the next
  int64_t apart;   // from one panel to the next
  int64_t second;  // from the first vector of a panel to the second
};

// Gives each pair of vectors to store(place, panel, first vector, second vector): see linear.hpp. ``height``: that of the
// blocks of rows that places name.
class Sink {
 public:
  template <class Store>
  Sink(Store& store, int height) : store_(const_cast<void*>(static_cast<const void*>(&store))), height_(height) {
    call_ = [](void* to, int height, const Results& found) {
      Store& store = *static_cast<Store*>(to);
      Place place{found.first / height, static_cast<int>(found.first % height), found.first};
      for (int64_t row = 0; row < found.rows; row++) {
        const float* sums = found.sums + row * found.row;
        for (int64_t panel = 0; panel < found.count; panel++, sums += found.apart)
          store(place, found.panel + panel, load<Floats>(sums), load<Floats>(sums + found.second));
        place.row++;
        if (++place.in_block == height) place.in_block = 0, place.block++;
      }
    };
  }

  void operator()(const Results& found) const { call_(store_, height_, found); }

 private:
  void* store_;
  void (*call_)(void* store, int height, const Results& found);
  int height_;
};

}  // namespace aioinfer
