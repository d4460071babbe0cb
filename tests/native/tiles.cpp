// Products of tiles for tests: compiled by tests.native.test_tiles with processors' tiles or their model.
#include "tiles.hpp"

using namespace aioinfer;

extern "C" {

// 1: processors' tiles, 2: the model, 0: neither
int kind() { return static_cast<int>(tiles::KIND); }

// c += a * b for ``count`` tiles of 1 KB each, one after the other; ``configured`` is false for a thread that is not
// ready for tiles.
void products(char* c, const char* a, const char* b, int64_t count, bool int8, bool configured) {
  const tiles::Session session;
  if (!configured) tiles::release();
  for (int64_t at = 0; at < count * tiles::BYTES; at += tiles::BYTES) {
    tiles::load<0>(c + at, tiles::ROW);
    tiles::load<4>(a + at, tiles::ROW);
    tiles::load<6>(b + at, tiles::ROW);
    if (int8)
      tiles::add_int8_product<0, 4, 6>();
    else
      tiles::add_bfloat16_product<0, 4, 6>();
    tiles::store<0>(c + at, tiles::ROW);
  }
}
}
