#include "state/registry.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <set>
#include <utility>

#include "weft/error.h"

namespace weft {

namespace {

constexpr std::size_t kPieceBytes = std::size_t{1} << 20;

bool is_loaded(const LoadOptions& options, const std::string& owner) {
  return options.owners.empty() ||
         std::find(options.owners.begin(), options.owners.end(), owner) != options.owners.end() ||
         (options.kin && options.kin(owner));
}

// What a row is looked for by: its key, without the owner where it may have been another's.
StateKey sought(const StateRow& row, const LoadOptions& options) {
  const bool of_kin = options.kin && row.rule != LayoutRule::restart && options.kin(row.key.owner);
  return of_kin ? StateKey{"", row.key.kind, row.key.name} : row.key;
}

bool is_all_zeros(const StateSource& source, std::size_t row) {
  if (source.rows()[row].zeros) return true;
  const StateRow& what = source.rows()[row].row;
  const std::size_t bytes = what.num_bytes();
  std::vector<std::byte> piece(std::min(bytes, kPieceBytes));
  const auto all_zero = [](const auto* first, std::size_t count) {
    return std::all_of(first, first + count, [](auto v) { return v == 0; });
  };
  for (std::size_t at = 0; at < bytes; at += piece.size()) {
    piece.resize(std::min(piece.size(), bytes - at));
    source.read(row, at, piece);
    const std::size_t count = piece.size() / size_of(what.dtype);
    if (what.dtype == DType::float32 ? !all_zero(reinterpret_cast<const float*>(piece.data()), count)
                                     : !all_zero(reinterpret_cast<const double*>(piece.data()), count)) {
      return false;
    }
  }
  return true;
}

// What is in the source and has no place here must be of no weight.
void check_left_over(const StateSource& source, const RowsByKey& saved, const std::set<StateKey>& taken,
                     const LoadOptions& options) {
  for (const auto& [key, places] : saved) {
    const StateRow& row = source.rows()[places[0]].row;
    if (taken.contains(key) || !is_loaded(options, row.key.owner)) continue;
    if (options.elsewhere && options.elsewhere(row.key)) continue;
    const std::string what =
        describe(key) + " (" + std::to_string(row.shard.tensor_elements()) + " elements)";
    if (row.rule == LayoutRule::moves) throw UsageError(source.where() + ": " + what + " has no place here");
    if (row.rule != LayoutRule::sum) continue;
    const auto zeros = [&](std::size_t i) { return is_all_zeros(source, i); };
    if (!std::all_of(places.begin(), places.end(), zeros))
      throw UsageError(source.where() + ": " + what + " has no place here; its mass would be lost");
  }
}

// Names that rows of an owner have.
using Known = std::set<std::pair<std::string, std::string>>;

// What comes for a row, which is looked for by `by`; not any: it starts anew.
Arrived arrived(const LiveRow& live, const StateKey& by, const StateSource& source, const RowsByKey& saved,
                const Known& known) {
  const StateKey& key = live.row.key;
  const auto found = saved.find(by);
  if (found == saved.end()) {
    if (!live.required && live.row.rule != LayoutRule::moves) return {};
    const auto other = saved.lower_bound({by.owner, by.kind, ""});
    const bool is_other =
        other != saved.end() && other->first.owner == by.owner && other->first.kind == by.kind;
    throw UsageError(source.where() + ": it has nothing for " + describe(key) + " (" + key.owner + ")" +
                     (is_other ? ", but " + describe(other->first) : ""));
  }
  const auto is_known = [&](const std::string& name) { return known.contains({key.owner, name}); };
  if (!std::all_of(live.needs.begin(), live.needs.end(), is_known)) return {};
  Arrived out = arrive(live.row, source, found->second);
  if (!out.any) return out;
  if (out.bytes.empty() && live.row.rule != LayoutRule::sum)
    out.bytes.resize(static_cast<std::size_t>(out.shard.num_elements()) * size_of(live.row.dtype));
  if (!all_finite(live.row.dtype, out.bytes))
    throw UsageError(source.where() + ": " + describe(key) + " has a value that is not finite");
  try {
    if (live.takes) {
      out.any = live.takes(out.shard, out.bytes);
    } else if (out.shard.shape != live.row.shard.shape) {
      throw UsageError(describe(key) + " has the shape " + text_of(out.shard) + ", here " +
                       text_of(live.row.shard));
    }
  } catch (const UsageError& e) {
    throw UsageError(source.where() + ": " + e.what());
  }
  return out;
}

}  // namespace

std::span<const std::byte> checked_value(const LiveRow& live, std::vector<std::byte>& scratch) {
  const StateRow& row = live.row;
  const std::span<const std::byte> values = live.read(scratch);
  const bool zeros = values.empty() && row.rule == LayoutRule::sum;
  if (!zeros && values.size() != row.num_bytes()) {
    throw UsageError(describe(row.key) + " has " + std::to_string(values.size() / size_of(row.dtype)) +
                     " elements, not " + std::to_string(row.shard.num_elements()));
  }
  if (!all_finite(row.dtype, values)) throw UsageError(describe(row.key) + " has a value that is not finite");
  if (live.takes) live.takes(row.shard, values);
  return values;
}

void StateRegistry::add(std::string owner, OwnedState state) {
  const auto is_there = [&](const Owner& o) { return o.name == owner; };
  if (owner == kOwner || std::any_of(owners_.begin(), owners_.end(), is_there))
    throw UsageError("state: there is an owner '" + owner + "' already");
  owners_.push_back({std::move(owner), std::move(state)});
}

void StateRegistry::remove(std::string_view owner) {
  std::erase_if(owners_, [&](const Owner& o) { return o.name == owner; });
}

void StateRegistry::commit() {
  for (const Owner& o : owners_) {
    const std::string what = o.state.missing ? o.state.missing() : "";
    if (!what.empty()) throw UsageError("state: " + o.name + ": " + what + ", so nothing is committed");
  }
  for (const Owner& o : owners_) {
    if (o.state.commit) o.state.commit();
  }
  ++step_;
}

void StateRegistry::roll_back() {
  for (const Owner& o : owners_) {
    if (o.state.roll_back) o.state.roll_back();
  }
}

LiveRow StateRegistry::step_row() {
  LiveRow out;
  out.row = {.key = {std::string(kOwner), "step", "committed"},
             .dtype = DType::int64,
             .rule = LayoutRule::same,
             .shard = Shard::whole({}),
             .peers = {}};
  out.read = [this](auto&) { return std::as_bytes(std::span(&step_, 1)); };
  out.write = [this](std::span<const std::byte> values) {
    step_ = 0;
    if (!values.empty()) std::memcpy(&step_, values.data(), sizeof step_);
  };
  out.takes = [](const Shard&, std::span<const std::byte> values) {
    std::int64_t steps = -1;
    if (values.size() == sizeof steps) std::memcpy(&steps, values.data(), sizeof steps);
    if (steps < 0) throw UsageError("the number of committed steps is " + std::to_string(steps));
    return true;
  };
  return out;
}

std::vector<LiveRow> StateRegistry::rows(std::string_view owner) {
  std::vector<LiveRow> out;
  if (owner.empty() || owner == kOwner) out.push_back(step_row());
  for (const Owner& o : owners_) {
    if (!owner.empty() && o.name != owner) continue;
    std::vector<LiveRow> more = o.state.rows();
    std::move(more.begin(), more.end(), std::back_inserter(out));
  }
  RowsOfRank seen;
  for (const LiveRow& live : out) {
    if (const std::string why = seen.trouble_with(live.row); !why.empty()) throw UsageError("state: " + why);
  }
  return out;
}

StateSnapshot StateRegistry::save(int rank, int size, std::string_view owner) {
  StateSnapshot out{.rank = rank, .size = size, .rows = {}};
  std::vector<std::byte> scratch;
  for (const LiveRow& live : rows(owner)) {
    if (live.loads_only) continue;
    const std::span<const std::byte> values = live.read(scratch);
    out.rows.push_back({live.row, {values.begin(), values.end()}});
  }
  return out;
}

void StateRegistry::load(const StateSource& source, const LoadOptions& options) {
  RowsByKey saved;
  Known known;
  for (std::size_t i = 0; i < source.rows().size(); ++i) {
    const StateRow& row = source.rows()[i].row;
    saved[sought(row, options)].push_back(i);
    known.emplace(row.key.owner, row.key.name);
  }
  std::set<StateKey> taken;
  const std::vector<LiveRow> here = rows();
  std::vector<std::pair<const LiveRow*, Arrived>> next;
  for (const LiveRow& live : here) {
    if (!is_loaded(options, live.row.key.owner)) continue;
    if (options.only && !options.only(live.row)) continue;
    const StateKey by = sought(live.row, options);
    next.emplace_back(&live, arrived(live, by, source, saved, known));
    taken.insert(by);
  }
  check_left_over(source, saved, taken, options);
  for (auto& [live, what] : next) {
    live->write(what.any ? std::span<const std::byte>(what.bytes) : std::span<const std::byte>());
    what.bytes = {};
  }
  for (const Owner& o : owners_) {
    if (is_loaded(options, o.name) && o.state.roll_back) o.state.roll_back();
  }
}

void StateRegistry::load(std::span<const StateSnapshot> snapshots, int rank, int size,
                         const LoadOptions& options) {
  load(SnapshotSource(snapshots, rank, size), options);
}

}  // namespace weft
