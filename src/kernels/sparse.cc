#include "kernels/sparse.h"

#include <algorithm>
#include <array>
#include <cstddef>

#include "kernels/radix.h"
#include "kernels/select.h"

namespace weft {

namespace {

// both(x, y): the value where a has x and b has y. It is called in vain, too, with any values of the lists.
template <class Both>
void merge(EntriesView a, EntriesView b, Entries& out, Both both) {
  if (const std::size_t most = a.size() + b.size(); out.size() < most) out.resize(most);
  std::size_t i = 0;
  std::size_t j = 0;
  std::size_t count = 0;
  while (i < a.size() && j < b.size()) {  // no branch inside: which list is next cannot be guessed
    const std::uint32_t x = a.indices[i];
    const std::uint32_t y = b.indices[j];
    const float one = x < y ? a.values[i] : b.values[j];
    const float joined = both(a.values[i], b.values[j]);
    out.indices[count] = std::min(x, y);
    out.values[count] = x == y ? joined : one;
    ++count;
    i += x <= y ? 1 : 0;
    j += y <= x ? 1 : 0;
  }
  const auto append = [&](EntriesView rest, std::size_t from) {
    const std::size_t more = rest.size() - from;
    std::copy_n(rest.indices.begin() + static_cast<std::ptrdiff_t>(from), more,
                out.indices.begin() + static_cast<std::ptrdiff_t>(count));
    std::copy_n(rest.values.begin() + static_cast<std::ptrdiff_t>(from), more,
                out.values.begin() + static_cast<std::ptrdiff_t>(count));
    count += more;
  };
  append(a, i);
  append(b, j);
  out.resize(count);
}

}  // namespace

void merge_add(EntriesView a, EntriesView b, Entries& out) {
  merge(a, b, out, [](float x, float y) { return x + y; });
}

void merge_first(EntriesView a, EntriesView b, Entries& out) {
  merge(a, b, out, [](float x, float) { return x; });
}

void keep_largest(Entries& entries, std::int64_t k, Entries& discards) {
  discards.clear();
  kernels::Bar bar{.key = 0xffff'ffffu, .ties = 0};  // passed by none
  if (k > 0) {
    bar = kernels::find_bar(k, [&](auto&& f) {
      for (const float value : entries.values) f(magnitude_key(value));
    });
  }
  std::size_t kept = 0;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const std::uint32_t index = entries.indices[i];
    const float value = entries.values[i];
    const std::uint32_t key = magnitude_key(value);
    if (key == 0) continue;
    if (key < bar.key || (key == bar.key && bar.ties-- <= 0)) {
      discards.push_back(index, value);
      continue;
    }
    entries.indices[kept] = index;
    entries.values[kept] = value;
    ++kept;
  }
  entries.resize(kept);
}

// The places lie far apart, so that each is a wait for memory: they are asked for ahead of their turn.
void scatter_add(EntriesView entries, const Deal& deal, int block, std::span<float> dense,
                 std::span<float> before) {
  constexpr std::size_t kAhead = 32;
  std::array<float*, kAhead> places{};
  for (std::size_t i = 0; i < entries.size() + kAhead; ++i) {
    float*& place = places[i % kAhead];
    if (i >= kAhead) {
      if (!before.empty()) before[i - kAhead] = *place;
      *place += entries.values[i - kAhead];
    }
    if (i >= entries.size()) continue;
    place = &dense[static_cast<std::size_t>(deal.global(block, entries.indices[i]))];
    __builtin_prefetch(place, 1);
  }
}

void gather(std::span<const float> dense, const Deal& deal, int block, std::span<const std::uint32_t> indices,
            std::span<float> out) {
  for (std::size_t i = 0; i < indices.size(); ++i) {
    out[i] = dense[static_cast<std::size_t>(deal.global(block, indices[i]))];
  }
}

}  // namespace weft
