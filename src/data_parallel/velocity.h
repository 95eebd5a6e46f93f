// The velocity of momentum correction (docs/recipe.md): what the gradients of a bucket have gathered on this
// rank. An operation writes into staging only; commit() makes it so.
#pragma once

#include "base/large_vector.h"

namespace weft {

struct Velocity {
  LargeVector<float> committed;  // empty: zeros
  LargeVector<float> staged;
  bool has_staged = false;

  void commit() {
    if (has_staged) committed.swap(staged);
    has_staged = false;
  }
  void roll_back() { has_staged = false; }
};

}  // namespace weft
