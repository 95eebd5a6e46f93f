// Entries of a sparse vector or of one block of it: an index and a value each, kept in two arrays so that
// indices can be coded, compared and merged without touching the values. Everywhere in weft a list of entries
// is sorted by strictly increasing index. Indices count inside the block (patterns/deal.h says which element
// of the vector that is).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace weft {

struct EntriesView {
  std::span<const std::uint32_t> indices;
  std::span<const float> values;  // as many

  std::size_t size() const { return indices.size(); }
  bool empty() const { return indices.empty(); }
};

// Owns its entries. Cleared and filled again, it keeps its memory.
struct Entries {
  std::vector<std::uint32_t> indices;
  std::vector<float> values;

  std::size_t size() const { return indices.size(); }
  bool empty() const { return indices.empty(); }
  void clear() {
    indices.clear();
    values.clear();
  }
  void resize(std::size_t count) {
    indices.resize(count);
    values.resize(count);
  }
  void push_back(std::uint32_t index, float value) {
    indices.push_back(index);
    values.push_back(value);
  }
  EntriesView view() const { return {indices, values}; }
  operator EntriesView() const {
    return view();
  }  // NOLINT(google-explicit-constructor): owned entries are entries
  friend bool operator==(const Entries&, const Entries&) = default;
};

}  // namespace weft
