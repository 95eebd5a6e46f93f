// By what messages and receives find each other (match_table.h).
#pragma once

#include <cstdint>

#include "base/identity.h"

namespace weft {

// Where a message belongs at its receiver: who sent it and what it is part of.
struct MatchKey {
  int source = -1;
  Identity id;
  friend bool operator==(const MatchKey&, const MatchKey&) = default;
};

constexpr std::uint64_t hash_of(const MatchKey& key) {
  std::uint64_t h = mix(key.id.group ^ (static_cast<std::uint64_t>(key.source) << 32));
  h = mix(h ^ key.id.slot ^ (static_cast<std::uint64_t>(key.id.step) << 32));
  return mix(h ^ key.id.hop);
}

}  // namespace weft
