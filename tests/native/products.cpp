// The loops of products, for tests.native.instructions to count their instructions.
#include "quantised_product.hpp"
#include "weights.hpp"

using namespace aioinfer;

extern "C" {

#define AIOINFER_PACKED(ROWS)                                                                             \
  void packed_##ROWS(const Activations<bfloat16>& a, const Weights<bfloat16>& w, const Sink& sink) {      \
    multiply_tile<bfloat16, ROWS, panels_at_once(ROWS)>(a, 0, w, 0, -1, sink);                            \
  }
#define AIOINFER_ROUNDED(BITS, ROWS)                                                                      \
  void int##BITS##_##ROWS(const RoundedRows& a, const QuantisedWeights& w, float* to) {                   \
    multiply_strip<BITS, false, ROWS>(a, 0, w, 0, to);                                                    \
  }

AIOINFER_PACKED(1)
AIOINFER_PACKED(4)
AIOINFER_ROUNDED(8, 1)
AIOINFER_ROUNDED(8, 4)
AIOINFER_ROUNDED(4, 1)
AIOINFER_ROUNDED(4, 4)
}
