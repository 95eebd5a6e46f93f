// What a row has after a move to another layout: the four rules of rows.h, for snapshots and files alike.
#include <algorithm>
#include <cstring>
#include <optional>

#include "state/rows.h"
#include "weft/error.h"

namespace weft {

namespace {

[[noreturn]] void refuse(const StateSource& source, const std::string& what) {
  throw UsageError(source.where() + ": " + what);
}

std::string number(std::int64_t n) { return std::to_string(n); }

void check_type(const StateRow& wanted, const StateRow& saved, const StateSource& source) {
  if (saved.dtype == wanted.dtype && saved.rule == wanted.rule) return;
  refuse(source, describe(wanted.key) + " was saved as " + std::string(name_of(saved.dtype)) + " (" +
                     std::string(name_of(saved.rule)) + "), here it is " +
                     std::string(name_of(wanted.dtype)) + " (" + std::string(name_of(wanted.rule)) + ")");
}

void check_shape(const StateRow& wanted, const StateRow& saved, const StateSource& source) {
  if (saved.shard.shape == wanted.shard.shape) return;
  const std::int64_t before = saved.shard.tensor_elements();
  const std::int64_t here = wanted.shard.tensor_elements();
  if (before != here) {
    refuse(source, describe(wanted.key) + " has " + number(before) + " elements in the snapshot and " +
                       number(here) + " here");
  }
  refuse(source, describe(wanted.key) + " has the shape " + text_of(Shard::whole(saved.shard.shape)) +
                     " in the snapshot and " + text_of(Shard::whole(wanted.shard.shape)) + " here");
}

// Of the shards in `saved`, each box once (replicas have it more than once).
std::vector<std::size_t> distinct(const StateSource& source, std::span<const std::size_t> saved) {
  std::vector<std::size_t> out;
  for (const std::size_t i : saved) {
    const Shard& mine = source.rows()[i].row.shard;
    const auto is_mine = [&](std::size_t j) { return source.rows()[j].row.shard == mine; };
    if (std::none_of(out.begin(), out.end(), is_mine)) out.push_back(i);
  }
  return out;
}

// Those of `saved`, boxes that differ, in which the wanted shard has elements. Every element must come from
// exactly one of them.
std::vector<std::size_t> needed_for(const StateRow& wanted, const StateSource& source,
                                    std::span<const std::size_t> saved) {
  std::vector<std::size_t> needed;
  std::int64_t filled = 0;
  for (const std::size_t i : saved) {
    const Shard& box = source.rows()[i].row.shard;
    const std::int64_t common = common_elements(box, wanted.shard);
    if (common == 0) continue;
    for (const std::size_t j : needed) {
      if (common_elements(box, source.rows()[j].row.shard) > 0) {
        refuse(source, "two shards of " + describe(wanted.key) + " overlap: " + text_of(box) + " and " +
                           text_of(source.rows()[j].row.shard));
      }
    }
    filled += common;
    needed.push_back(i);
  }
  if (filled != wanted.shard.num_elements()) {
    refuse(source, number(wanted.shard.num_elements() - filled) + " of the " +
                       number(wanted.shard.num_elements()) + " elements of " + describe(wanted.key) + " (" +
                       text_of(wanted.shard) + ") are missing");
  }
  return needed;
}

template <class T>
void add(std::span<std::byte> into, std::span<const std::byte> more) {
  T* const sums = reinterpret_cast<T*>(into.data());
  const T* const summands = reinterpret_cast<const T*>(more.data());
  for (std::size_t i = 0; i < into.size() / sizeof(T); ++i) sums[i] += summands[i];
}

// What a summand is multiplied by, so that the sum over the divisor stays.
struct Ratio {
  double here = 1, there = 1;
  bool keeps_bits() const { return here == there; }
};

Ratio ratio_of(const StateRow& wanted, const StateRow& saved) {
  if (wanted.rule != LayoutRule::sum) return {};
  if (wanted.divisor > 0 && saved.divisor > 0) return {wanted.divisor, saved.divisor};
  // Not told. Divisors grow as groups do, unless groups are of another kind: those of experts that are dealt to
  // more ranks are smaller, and the divisor stays.
  if (wanted.key.owner != saved.key.owner || !(wanted.shard == saved.shard)) return {};
  return {static_cast<double>(wanted.peers.size), static_cast<double>(saved.peers.size)};
}

template <class T>
void multiply(std::span<std::byte> values, const Ratio& ratio) {
  T* const all = reinterpret_cast<T*>(values.data());
  for (std::size_t i = 0; i < values.size() / sizeof(T); ++i)
    all[i] = static_cast<T>(static_cast<double>(all[i]) * ratio.here / ratio.there);
}

// What row `i` has of the wanted shard goes into `out` (empty: zeros), in place of what is there or on top.
void take(const StateRow& wanted, const StateSource& source, std::size_t i, bool on_top,
          std::vector<std::byte>& out) {
  if (source.rows()[i].zeros) return;
  out.resize(wanted.num_bytes());
  const std::size_t width = size_of(wanted.dtype);
  const Ratio ratio = ratio_of(wanted, source.rows()[i].row);
  const bool is_float = wanted.dtype == DType::float32;
  std::vector<std::byte> summands;
  const auto run = [&](std::int64_t from, std::int64_t to, std::int64_t count) {
    const std::span<std::byte> place =
        std::span(out).subspan(static_cast<std::size_t>(to) * width, static_cast<std::size_t>(count) * width);
    if (on_top) summands.resize(place.size());
    const std::span<std::byte> read = on_top ? std::span(summands) : place;
    source.read(i, static_cast<std::size_t>(from) * width, read);
    // Before it is added: where ranks leave, a sum of theirs may be too large for the type when its mean is not.
    if (!ratio.keeps_bits()) is_float ? multiply<float>(read, ratio) : multiply<double>(read, ratio);
    if (on_top) is_float ? add<float>(place, read) : add<double>(place, read);
  };
  for_each_run(source.rows()[i].row.shard, wanted.shard, run);
}

// The row of peer `r` of the group that held the box of row `one`.
std::size_t summand_of(int r, const StateRow& wanted, const StateSource& source,
                       std::span<const std::size_t> saved, std::size_t one) {
  const StateRow& box = source.rows()[one].row;
  std::optional<std::size_t> found;
  for (const std::size_t i : saved) {
    const StateRow& row = source.rows()[i].row;
    if (!(row.shard == box.shard)) continue;
    if (row.peers.size != box.peers.size) {
      refuse(source, describe(wanted.key) + " is of " + number(row.peers.size) + " and of " +
                         number(box.peers.size) + " ranks");
    }
    if (row.divisor != box.divisor) refuse(source, describe(wanted.key) + " has several divisors");
    if (row.peers.rank != r) continue;
    if (found) {
      refuse(source, describe(wanted.key) + " (" + text_of(box.shard) + ") of rank " + number(r) + " of " +
                         number(box.peers.size) + " is there twice");
    }
    found = i;
  }
  if (!found) {
    refuse(source,
           describe(wanted.key) + " of rank " + number(r) + " of " + number(box.peers.size) + " is missing");
  }
  return *found;
}

// The rows that the wanted shard's values are made of, in the order in which they are read. Of sums box by
// box, of as many peers as its group had.
std::vector<std::size_t> sources_of(const StateRow& wanted, const StateSource& source,
                                    std::span<const std::size_t> saved) {
  std::vector<std::size_t> boxes = needed_for(wanted, source, distinct(source, saved));
  if (wanted.rule == LayoutRule::moves) return boxes;
  std::vector<std::size_t> out;
  for (const std::size_t one : boxes) {
    for (int r = wanted.peers.rank; r < source.rows()[one].row.peers.size; r += wanted.peers.size)
      out.push_back(summand_of(r, wanted, source, saved, one));
  }
  return out;
}

// The values of the wanted shard; empty: zeros. A box's first summand is copied, not added to zeros: its bits
// stay.
std::vector<std::byte> fill(const StateRow& wanted, const StateSource& source,
                            std::span<const std::size_t> saved) {
  std::vector<std::byte> out;
  const Shard* box = nullptr;
  bool on_top = false;
  for (const std::size_t i : sources_of(wanted, source, saved)) {
    const Shard& next = source.rows()[i].row.shard;
    if (box == nullptr || !(*box == next)) on_top = false;
    box = &next;
    take(wanted, source, i, on_top, out);
    on_top = on_top || !source.rows()[i].zeros;
  }
  return out;
}

Arrived copy_of(const StateSource& source, std::size_t i) {
  const StateSource::Saved& saved = source.rows()[i];
  Arrived out{.any = true, .shard = saved.row.shard, .bytes = {}};
  if (saved.zeros) return out;
  out.bytes.resize(saved.row.num_bytes());
  source.read(i, 0, out.bytes);
  return out;
}

}  // namespace

void for_each_read(const StateRow& wanted, const StateSource& source, std::span<const std::size_t> saved,
                   FunctionRef<void(std::size_t row, std::int64_t first, std::int64_t count)> f) {
  for (const std::size_t i : sources_of(wanted, source, saved)) {
    if (source.rows()[i].zeros) continue;
    const auto run = [&](std::int64_t from, std::int64_t, std::int64_t count) { f(i, from, count); };
    for_each_run(source.rows()[i].row.shard, wanted.shard, run);
  }
}

Arrived arrive(const StateRow& wanted, const StateSource& source, std::span<const std::size_t> saved) {
  const bool cut = wanted.rule == LayoutRule::sum || wanted.rule == LayoutRule::moves;
  for (const std::size_t i : saved) {
    const StateRow& row = source.rows()[i].row;
    check_type(wanted, row, source);
    if (cut) check_shape(wanted, row, source);
  }
  switch (wanted.rule) {
    case LayoutRule::sum:
    case LayoutRule::moves:
      return {.any = true, .shard = wanted.shard, .bytes = fill(wanted, source, saved)};
    case LayoutRule::same:
      return copy_of(source, saved[0]);
    case LayoutRule::restart:
      break;
  }
  for (const std::size_t i : saved) {
    if (source.rows()[i].row.peers == wanted.peers) return copy_of(source, i);
  }
  return {};
}

}  // namespace weft
