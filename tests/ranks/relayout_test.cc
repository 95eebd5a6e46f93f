// Rows that change hands: every rank gets, bit for bit, what the snapshots of all ranks would give it.
#include "state/relayout.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "weft/engine.h"
#include "weft/error.h"
#include "weft/world.h"

namespace weft {
namespace {

constexpr std::int64_t kParts = 12;

// As experts are laid out: part e is with the ranks of place e / (parts / ep) of ep.
HeldPart part_of(int rank, int size, int ep) {
  const std::int64_t each = kParts / ep;
  return {rank % ep * each, each, {rank / ep, size / ep}};
}

struct Held {
  StateRow row;
  std::vector<std::byte> bytes;
};

// A tensor that moves and one of which every rank has a summand; the third nobody has.
std::vector<Held> rows_of(int rank, int size, int ep) {
  const HeldPart part = part_of(rank, size, ep);
  std::vector<Held> out;
  for (const auto& [kind, rule, dims] :
       {std::tuple{"value", LayoutRule::moves, std::vector<std::int64_t>{kParts, 2, 3}},
        {"residual", LayoutRule::sum, {kParts, 5}},
        {"velocity", LayoutRule::sum, {kParts, 4}},
        {"exp_avg", LayoutRule::moves, {kParts}}}) {
    Held& held = out.emplace_back();
    held.row = {.key = {"model", kind, "w"},
                .dtype = DType::float32,
                .rule = rule,
                .shard = Shard::range(dims, 0, part.first, part.count),
                .peers = part.peers};
    if (held.row.key.kind == "velocity") continue;  // zeros
    held.bytes.resize(held.row.num_bytes());
    const std::int64_t width = held.row.shard.tensor_elements() / kParts;
    for (std::int64_t i = 0; i < held.row.shard.num_elements(); ++i) {
      // Of a place in the tensor; of a summand, of the rank as well. Whole numbers: sums are exact.
      const std::int64_t place = part.first * width + i;
      const auto value = static_cast<float>(rule == LayoutRule::sum ? 1000 * rank + place : 7 * place + 1);
      std::memcpy(&held.bytes[static_cast<std::size_t>(i) * sizeof value], &value, sizeof value);
    }
  }
  return out;
}

std::vector<LiveRow> live(std::vector<Held>& rows) {
  std::vector<LiveRow> out;
  for (Held& held : rows) {
    LiveRow row;
    row.row = held.row;
    row.read = [&held](auto&) { return std::span<const std::byte>(held.bytes); };
    out.push_back(std::move(row));
  }
  return out;
}

StateSnapshot snapshot_of(int rank, int size, int ep) {
  StateSnapshot out{.rank = rank, .size = size, .rows = {}};
  for (const Held& held : rows_of(rank, size, ep)) out.rows.push_back({held.row, held.bytes});
  return out;
}

RelayoutOptions options_of(int rank, int size, int from, int to) {
  return {.rank = rank,
          .size = size,
          .from = [=](int r) { return part_of(r, size, from); },
          .to = [=](int r) { return part_of(r, size, to); },
          .zeros = [](const StateRow& row) { return row.key.kind == "velocity"; }};
}

void expect_equal_to_snapshots(World& world, int from, int to) {
  const int rank = world.rank(), size = world.size();
  std::vector<Held> mine = rows_of(rank, size, from);
  Relayout move(live(mine), options_of(rank, size, from, to));
  const SubmitOptions submit{.name = "rows that change hands", .traffic = TrafficClass::blocking};
  world.engine()
      .submit(world.comm(), submit, [&move](Comm comm) { return Relayout::exchange(comm, &move); })
      .wait();
  std::vector<StateSnapshot> all;
  for (int r = 0; r < size; ++r) all.push_back(snapshot_of(r, size, from));
  const SnapshotSource reference(all, rank, size);
  const RowsByKey here = by_key(move), there = by_key(reference);
  for (const Held& wanted : rows_of(rank, size, to)) {
    const Arrived got = arrive(wanted.row, move, here.at(wanted.row.key));
    const Arrived expected = arrive(wanted.row, reference, there.at(wanted.row.key));
    EXPECT_EQ(got.bytes, expected.bytes) << describe(wanted.row.key) << ", " << from << " to " << to;
    if (wanted.row.rule == LayoutRule::moves) {
      EXPECT_EQ(got.bytes, wanted.bytes);
    }
  }
  // Bytes: of what moves, the indices that were not here; of sums, summands of other ranks.
  std::int64_t indices = 0, summands = 0;
  const HeldPart had = part_of(rank, size, from), has = part_of(rank, size, to);
  for (std::int64_t i = has.first; i < has.first + has.count; ++i) {
    indices += i < had.first || i >= had.first + had.count ? 1 : 0;
    for (int r = 0; r < size; ++r) {
      const HeldPart other = part_of(r, size, from);
      const bool holds = i >= other.first && i < other.first + other.count;
      const bool comes = other.peers.rank % has.peers.size == has.peers.rank;
      summands += holds && comes && r != rank ? 1 : 0;
    }
  }
  const std::span<const std::int64_t> came = move.from(), went = move.to();
  EXPECT_EQ(std::accumulate(came.begin(), came.end(), std::int64_t{0}), 4 * (7 * indices + 5 * summands));
  EXPECT_EQ(std::accumulate(went.begin(), went.end(), std::int64_t{0}),
            static_cast<std::int64_t>(move.sent_bytes()));
}

TEST(Relayout, EveryRankGetsWhatSnapshotsWouldGiveIt) {
  for (const int size : {1, 2, 6, 12}) {
    run_ranks(size, [&](World& world) {
      for (int from = 1; from <= size; ++from) {
        for (int to = 1; to <= size; ++to) {
          if (size % from == 0 && size % to == 0) expect_equal_to_snapshots(world, from, to);
        }
      }
    });
  }
}

TEST(Relayout, NothingTravelsWhereNothingChanges) {
  for (int rank = 0; rank < 6; ++rank) {
    std::vector<Held> mine = rows_of(rank, 6, 3);
    const Relayout move(live(mine), options_of(rank, 6, 3, 3));
    EXPECT_EQ(std::accumulate(move.to().begin(), move.to().end(), std::int64_t{0}), 0);
    EXPECT_EQ(move.most_bytes(), 0);
  }
}

TEST(Relayout, RowsThatAreNotOfTheLayoutAreRefused) {
  std::vector<Held> mine = rows_of(0, 6, 3);
  EXPECT_THROW(Relayout(live(mine), options_of(0, 6, 2, 3)), UsageError);
  mine[0].row.rule = LayoutRule::same;
  EXPECT_THROW(Relayout(live(mine), options_of(0, 6, 3, 2)), UsageError);
}

}  // namespace
}  // namespace weft
