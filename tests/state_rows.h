// Rows of snapshots as tests look at them and spoil them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "state/rows.h"

namespace weft::testing {

inline StateValue& row_of(StateSnapshot& s, std::string_view kind, std::string_view name) {
  StateValue* const found = s.find(kind, name);
  if (found == nullptr) throw std::out_of_range("no " + std::string(kind) + " of " + std::string(name));
  return *found;
}
inline const StateValue& row_of(const StateSnapshot& s, std::string_view kind, std::string_view name) {
  return row_of(const_cast<StateSnapshot&>(s), kind, name);
}

// Its values; zeros where nothing is kept. Empty where there is no such row.
template <class T = float>
std::vector<T> values_of(const StateSnapshot& s, std::string_view kind, std::string_view name) {
  const StateValue* const found = s.find(kind, name);
  if (found == nullptr) return {};
  std::vector<T> out(static_cast<std::size_t>(found->row.shard.num_elements()));
  if (!found->bytes.empty()) std::memcpy(out.data(), found->bytes.data(), found->bytes.size());
  return out;
}
template <class T>
void set_values(StateValue& value, const std::vector<T>& values) {
  const std::span<const std::byte> bytes = std::as_bytes(std::span(values));
  value.bytes.assign(bytes.begin(), bytes.end());
}

// The step that a registry counts.
inline std::int64_t step_of(const StateSnapshot& s) {
  return values_of<std::int64_t>(s, "step", "committed").at(0);
}

inline void forget(StateSnapshot& s, std::string_view kind) {
  std::erase_if(s.rows, [&](const StateValue& v) { return v.row.key.kind == kind; });
}

}  // namespace weft::testing
