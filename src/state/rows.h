// Rows of state as plain data: what a checkpoint holds, and what one rank hands to others.
//
// A row is a named vector, or a shard of a named tensor. It belongs to a strategy (its owner:
// "data_parallel", "optimizer", "model"), is of a kind ("residual", "exp_avg", "value") and has one rule for
// another layout:
//
//   sum      each peer has a summand of its own (residuals, velocities); whoever uses them divides their sum by
//            the row's divisor. With M peers instead of N, old peer r's goes to new peer r mod M, times the new
//            divisor over the old one. Where several meet they are added in the row's type in the order of their
//            ranks. So the sum over peers, over the divisor, is conserved: what was left behind brings the same
//            mean to whoever goes on, on however many ranks. Up to one rounding for each summand that was
//            multiplied and one for each that was merged; exactly where the divisors' ratio is a power of two
//            and the values sum exactly. Where the divisor stays nothing is multiplied, and with M >= N nothing
//            is added: then every bit stays
//   same     the same bits on all peers (factors, scales, counters); whoever comes gets them. Groups that hold
//            other parts of a tensor have one each, by the name of the part (name_of_part() in shard.h)
//   restart  holds for this peer of this many only (thresholds, quotas of teams); else it starts anew
//   moves    belongs to its place in the tensor (parameters, moments): every value goes to whoever holds that
//            place in the new layout
//
// Peers are the ranks of the group that the rule is about: those of data parallelism, say. They hold the same
// part of a tensor, so that groups are told apart by what they hold.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "state/shard.h"
#include "weft/dtype.h"
#include "weft/function_ref.h"

namespace weft {

enum class LayoutRule : std::uint8_t { sum, same, restart, moves };
std::string_view name_of(LayoutRule rule);
LayoutRule layout_rule_of(std::string_view name);  // throws UsageError that lists them
// Whether all peers have the same: one of them stores it.
constexpr bool one_is_enough(LayoutRule rule) {
  return rule == LayoutRule::same || rule == LayoutRule::moves;
}

struct StateKey {
  std::string owner;  // owner and kind: letters, digits, '_', '-' and '.'
  std::string kind;
  std::string name;  // of the tensor or bucket: UTF-8, not empty, without line ends
  friend auto operator<=>(const StateKey&, const StateKey&) = default;
};
std::string describe(const StateKey& key);  // "the residual of 'wte'"

struct Peers {
  int rank = 0;
  int size = 1;
  // Which group of this size: peers list their group's rows in the same order. Not saved, not compared.
  std::uint64_t group = 0;
  friend bool operator==(const Peers& a, const Peers& b) { return a.rank == b.rank && a.size == b.size; }
};

struct StateRow {
  StateKey key;
  DType dtype = DType::float32;  // or float64, int64
  LayoutRule rule = LayoutRule::same;
  Shard shard;  // sum, moves: any; same, restart: whole
  Peers peers;
  // Of a sum: what the sum over its peers is divided by where it is used. 0: not told, in checkpoints of before it
  // was. Then the number of peers stands for it where the same owner has the same part here; else nothing is
  // multiplied.
  double divisor = 1;
  std::size_t num_bytes() const { return static_cast<std::size_t>(shard.num_elements()) * size_of(dtype); }
  friend bool operator==(const StateRow&, const StateRow&) = default;
};
// Why such a row cannot be, or "".
std::string trouble_with(const StateRow& row);
// Rows of one rank as they are met: more than one of a key are shards of one tensor that do not overlap.
class RowsOfRank {
 public:
  std::string trouble_with(const StateRow& row);  // as above; `row` outlives this

 private:
  std::map<StateKey, std::vector<const StateRow*>> seen_;
};
// Whether all are finite; whole numbers are.
bool all_finite(DType dtype, std::span<const std::byte> values);

struct StateValue {
  StateRow row;
  std::vector<std::byte> bytes;  // of the shard, row-major; empty: zeros

  template <class T>
  std::span<const T> values() const {  // REQUIRES: T is the row's type
    return {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
  }
  template <class T>
  std::span<T> values() {
    return {reinterpret_cast<T*>(bytes.data()), bytes.size() / sizeof(T)};
  }
  friend bool operator==(const StateValue&, const StateValue&) = default;
};

// The committed state of one rank.
struct StateSnapshot {
  int rank = 0;
  int size = 1;
  std::vector<StateValue> rows;
  // nullptr: there is none. The first, where a rank has several shards of one tensor.
  const StateValue* find(std::string_view kind, std::string_view name) const;
  StateValue* find(std::string_view kind, std::string_view name);
  friend bool operator==(const StateSnapshot&, const StateSnapshot&) = default;
};

// Rows of one or more ranks, wherever they are: in snapshots or in files. Thread: one at a time.
class StateSource {
 public:
  struct Saved {
    StateRow row;
    bool zeros = false;  // nothing to read
  };
  virtual ~StateSource() = default;
  virtual std::span<const Saved> rows() const = 0;
  // Bytes of rows()[row] from `first` on. REQUIRES: it has them. Throws UsageError where they cannot be read.
  virtual void read(std::size_t row, std::size_t first, std::span<std::byte> into) const = 0;
  virtual std::string where() const = 0;  // the beginning of every error
};

// Rows of a source by key, in its order.
using RowsByKey = std::map<StateKey, std::vector<std::size_t>>;
RowsByKey by_key(const StateSource& source);

// What `wanted` has after the move from the layout of the source to its own. `saved`: the rows of its key,
// not empty. Throws UsageError for another type or shape (shapes of same and restart may differ), ranges that
// are missing or overlap, a peer that is missing, rows that contradict each other.
struct Arrived {
  bool any = false;  // false: a row that starts anew
  Shard shard;
  std::vector<std::byte> bytes;  // empty: zeros
};
Arrived arrive(const StateRow& wanted, const StateSource& source, std::span<const std::size_t> saved);
// What arrive() reads for it: elements [first, first + count) of the source's rows, in its order. REQUIRES:
// the rule is sum or moves.
void for_each_read(const StateRow& wanted, const StateSource& source, std::span<const std::size_t> saved,
                   FunctionRef<void(std::size_t row, std::int64_t first, std::int64_t count)> f);

// Snapshots of all ranks of a job, in any order, or the one of rank `rank` of `size` for itself. Throws
// UsageError for others: some are missing, a rank is there twice, ranks disagree about what is the same on
// all of them, or about a part of a tensor that several hold.
class SnapshotSource final : public StateSource {
 public:
  SnapshotSource(std::span<const StateSnapshot> snapshots, int rank, int size);  // they outlive it
  std::span<const Saved> rows() const override { return rows_; }
  void read(std::size_t row, std::size_t first, std::span<std::byte> into) const override;
  std::string where() const override { return "state"; }

 private:
  std::vector<Saved> rows_;
  std::vector<const StateValue*> values_;
};

}  // namespace weft
