#include "kernels/rows.h"

#include <algorithm>

namespace weft {

std::vector<std::int32_t> unique_ids(std::span<const std::int64_t> ids) {
  std::vector<std::int32_t> out(ids.size());
  std::ranges::transform(ids, out.begin(), [](std::int64_t id) { return static_cast<std::int32_t>(id); });
  std::ranges::sort(out);
  const auto rest = std::ranges::unique(out);
  out.erase(rest.begin(), rest.end());
  return out;
}

std::vector<std::int32_t> union_of(std::span<const std::span<const std::int32_t>> lists) {
  std::size_t most = 0;
  for (const auto& list : lists) most += list.size();
  std::vector<std::int32_t> out;
  out.reserve(most);
  for (const auto& list : lists) out.insert(out.end(), list.begin(), list.end());
  std::ranges::sort(out);
  const auto rest = std::ranges::unique(out);
  out.erase(rest.begin(), rest.end());
  return out;
}

SplitIds split_ids(std::span<const std::int32_t> ids, std::span<const std::int32_t> others) {
  SplitIds out;
  std::size_t other = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    while (other < others.size() && others[other] < ids[i]) ++other;
    const bool there = other < others.size() && others[other] == ids[i];
    (there ? out.in : out.out).push_back(static_cast<std::int32_t>(i));
  }
  return out;
}

std::vector<std::int32_t> ids_at(std::span<const std::int32_t> ids, std::span<const std::int32_t> places) {
  std::vector<std::int32_t> out(places.size());
  for (std::size_t i = 0; i < places.size(); ++i) out[i] = ids[static_cast<std::size_t>(places[i])];
  return out;
}

namespace {

template <class Id>
std::vector<std::int32_t> places(std::span<const Id> wanted, std::span<const std::int32_t> ids) {
  std::vector<std::int32_t> out(wanted.size());
  for (std::size_t i = 0; i < wanted.size(); ++i)
    out[i] = static_cast<std::int32_t>(std::lower_bound(ids.begin(), ids.end(), wanted[i]) - ids.begin());
  return out;
}

}  // namespace

std::vector<std::int32_t> places_of(std::span<const std::int32_t> wanted, std::span<const std::int32_t> ids) {
  return places(wanted, ids);
}
std::vector<std::int32_t> places_of(std::span<const std::int64_t> wanted, std::span<const std::int32_t> ids) {
  return places(wanted, ids);
}

template <class T>
void gather_rows(std::span<const T> from, const Columns& columns, std::span<const std::int32_t> rows,
                 std::span<T> out) {
  T* to = out.data();
  for (const std::int32_t row : rows) {
    const T* const at = from.data() + static_cast<std::size_t>(row) * columns.width + columns.first;
    to = std::copy_n(at, columns.count, to);
  }
}

template <class T>
void place_rows(std::span<const T> from, const Columns& columns, std::span<const std::int32_t> rows,
                std::span<T> out) {
  const T* at = from.data();
  for (const std::int32_t row : rows) {
    std::copy_n(at, columns.count,
                out.data() + static_cast<std::size_t>(row) * columns.width + columns.first);
    at += columns.count;
  }
}

template <class T>
void add_rows(std::span<const T> from, std::size_t width, std::span<const std::int32_t> rows,
              std::span<T> out) {
  const T* at = from.data();
  for (const std::int32_t row : rows) {
    T* const to = out.data() + static_cast<std::size_t>(row) * width;
    for (std::size_t c = 0; c < width; ++c) to[c] += at[c];
    at += width;
  }
}

template void gather_rows(std::span<const float>, const Columns&, std::span<const std::int32_t>,
                          std::span<float>);
template void gather_rows(std::span<const double>, const Columns&, std::span<const std::int32_t>,
                          std::span<double>);
template void place_rows(std::span<const float>, const Columns&, std::span<const std::int32_t>,
                         std::span<float>);
template void place_rows(std::span<const double>, const Columns&, std::span<const std::int32_t>,
                         std::span<double>);
template void add_rows(std::span<const float>, std::size_t, std::span<const std::int32_t>, std::span<float>);
template void add_rows(std::span<const double>, std::size_t, std::span<const std::int32_t>,
                       std::span<double>);

}  // namespace weft
