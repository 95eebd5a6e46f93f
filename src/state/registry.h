// The registry of state: whatever lives between steps is a row here (rows.h), whoever it belongs to.
//
//   StateRegistry registry;
//   registry.add("data_parallel", {.rows = ..., .missing = ..., .commit = ..., .roll_back = ...});
//   for each step: operations write into staging, then registry.commit() or registry.roll_back()
//   const StateSnapshot mine = registry.save(rank, size);   // or write_shards() of checkpoint.h
//   registry.load(snapshots, rank, size);                   // or a Checkpoint; of any other layout
//
// One commit makes all that is staged so, of all owners, or nothing of any; it also counts the committed
// steps, which are a row themselves. Rows without staging (moments, parameters) change in place.
//
// Memory stays the owner's, where operations work on it. Rows are listed when they are saved or loaded: a
// step costs nothing for them. The registry knows rows, never what they mean, and nobody but an owner knows
// its kinds by name. Ranks that are peers list theirs in the same order.
//
// Thread: one at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "state/rows.h"

namespace weft {

// A row, and how to get at its committed value in the memory of its owner.
struct LiveRow {
  StateRow row;
  // Of the shard, row-major. Empty: zeros; only rows with the rule sum have that. Valid until the value
  // changes, or as long as `scratch`, where it may be put together.
  std::function<std::span<const std::byte>(std::vector<std::byte>& scratch)> read;
  // Replaces the value, in place: what operations point at stays where it is. Empty: zeros where the rule is
  // sum, else the value of a job's start. Does not throw but for want of memory.
  std::function<void(std::span<const std::byte> values)> write;
  // Whether a value that was saved is of use here; where not, the row starts anew. Throws UsageError for what
  // cannot be. Called before anything changes. Null: every value of the row's shape is.
  std::function<bool(const Shard& shard, std::span<const std::byte> values)> takes;
  // Names of the owner's other rows without which this one starts anew.
  std::vector<std::string> needs;
  bool required = false;  // what is loaded must have it; of the rule moves all rows are
  // Another rank, which has the same value, saves it: of a sum, which would count it twice.
  bool loads_only = false;
};
// The committed value. Throws UsageError where it could not be loaded again: it is not finite, of another
// length, or its owner would not take it.
std::span<const std::byte> checked_value(const LiveRow& row, std::vector<std::byte>& scratch);

struct OwnedState {
  std::function<std::vector<LiveRow>()> rows;
  // Where nothing of it is staged these are null; none of them throws.
  std::function<std::string()> missing;  // what must be staged and is not, in words; "": nothing
  std::function<void()> commit;          // REQUIRES: nothing is missing
  std::function<void()> roll_back;       // forgets what was staged; called after a load, too
};

struct LoadOptions {
  std::vector<std::string> owners;  // whose rows are loaded; empty: all
  // Rows of the source that other ranks hold here: it is not missed that this one has no place for them.
  // Null: none.
  std::function<bool(const StateKey& key)> elsewhere;
  // Rows that are loaded, of those owners; the others stay as they are. Null: all.
  std::function<bool(const StateRow& row)> only = nullptr;
  // Owners that are loaded, too, and between which rows change hands where the layout changes: what one of them has
  // saved belongs to the one that has a row of this kind and name here. But for the rule restart. Null: none.
  std::function<bool(std::string_view owner)> kin = nullptr;
};

class StateRegistry {
 public:
  static constexpr std::string_view kOwner = "registry";  // of the row that counts committed steps

  StateRegistry() = default;
  StateRegistry(const StateRegistry&) = delete;
  StateRegistry& operator=(const StateRegistry&) = delete;

  // `state` is called until remove(). Throws UsageError for an owner that is there already.
  void add(std::string owner, OwnedState state);
  void remove(std::string_view owner);

  // Throws UsageError, and commits nothing of anybody, if something is missing.
  void commit();
  void roll_back();
  std::int64_t step() const { return step_; }  // committed ones

  // All rows, or one owner's. Throws UsageError for rows that cannot be, or are there twice.
  std::vector<LiveRow> rows(std::string_view owner = {});
  // All rows, or one owner's, but for those that are only loaded. REQUIRES: nothing is in flight.
  StateSnapshot save(int rank, int size, std::string_view owner = {});
  // Replaces everything of the owners that are loaded and forgets what is staged. Rows that the source lacks
  // start anew. Throws UsageError, and changes nothing, where a row or its value does not fit (arrive() in
  // rows.h), a value is not finite, a required one is missing, or a value of the source that must not be lost
  // (sum, if it is not all zeros; moves) has no place here. REQUIRES: nothing is in flight.
  void load(const StateSource& source, const LoadOptions& options = {});
  // The same from snapshots: of all ranks, or this rank's own.
  void load(std::span<const StateSnapshot> snapshots, int rank, int size, const LoadOptions& options = {});

 private:
  struct Owner {
    std::string name;
    OwnedState state;
  };
  LiveRow step_row();

  std::vector<Owner> owners_;
  std::int64_t step_ = 0;
};

}  // namespace weft
