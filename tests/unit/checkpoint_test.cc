// Checkpoints: every bit comes back; on another number of ranks every value finds its place and the sum of
// residuals is conserved, over what it is divided by; whatever happens while saving, the checkpoint before it stays.
#include "state/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <map>
#include <thread>

#include "unit/checkpoint_samples.h"

namespace weft {
namespace {

using namespace checkpoint_samples;  // NOLINT(google-build-using-namespace): made for these tests
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::row_of;
using testing::values_of;

TEST(Checkpoint, EveryBitComesBack) {
  for (const std::string optimizer : {"sgd", "momentum", "adam", "adamw", "adagrad"}) {
    const Folder dir;
    constexpr int kSize = 3;
    save(dir, kSize, 7, optimizer);
    for (int r = 0; r < kSize; ++r) {
      const StateSnapshot found = load(dir, 7, r, kSize, optimizer);
      Sample wanted(r, kSize, optimizer);
      EXPECT_EQ(found, wanted.save()) << optimizer << " rank " << r;
      StateSnapshot other = wanted.save();  // negative control: one sign bit
      row_of(other, "residual", "wte").values<float>()[0] *= -1;
      EXPECT_FALSE(found == other);

      // Both go on alike.
      Sample resumed(r, kSize, optimizer);
      resumed.begin_anew();
      resumed.registry.load(Checkpoint(dir, 7));
      std::vector<float> a(12, 1), b(12, 1);
      std::vector<double> c(5, 1), d(5, 1);
      step(resumed.optimizer, a, c, 4);
      step(wanted.optimizer, b, d, 4);
      EXPECT_TRUE(bytes_of(a) == bytes_of(b) && bytes_of(c) == bytes_of(d)) << optimizer;
    }
    const Checkpoint checkpoint(dir, 7);
    EXPECT_EQ(checkpoint.ranks(), kSize);
    EXPECT_EQ(checkpoint.info().seed, info_of(7).seed);
    EXPECT_EQ(checkpoint.info().metadata, info_of(7).metadata);
    EXPECT_EQ(checkpoint.info().extra, info_of(7).extra);
    EXPECT_EQ(names(dir), (Strings{"latest", "step-7"}));
    EXPECT_EQ(names(dir / "step-7"), (Strings{"index.safetensors", "rank-0-of-3.safetensors",
                                              "rank-1-of-3.safetensors", "rank-2-of-3.safetensors"}));
    EXPECT_EQ(read_text(dir / "latest"), "step-7\n");
    EXPECT_EQ(latest_checkpoint(dir), 7);
  }
}

TEST(Checkpoint, RanksAsThreadsWriteTogether) {
  const Folder dir;
  constexpr int kSize = 4;
  begin_checkpoint(dir, 1);
  std::vector<std::thread> ranks;
  for (int r = 0; r < kSize; ++r) {
    ranks.emplace_back([&dir, r] {
      Sample sample(r, kSize);
      write_rank(dir, sample, 1);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  commit_checkpoint(dir, info_of(1), kSize);
  for (int r = 0; r < kSize; ++r) EXPECT_TRUE(loads_its_own(dir, 1, r, kSize));
}

// ---- another number of ranks ----

// What data parallelism keeps of one parameter, of gradients that are divided by the number of its ranks.
struct LeftBehind {
  StateRegistry registry;
  ParameterState state;
  LeftBehind(int rank, int size, double divisor)
      : state(BucketPlan({{.name = "w", .count = 4, .use = 0}}, {.dense_below = 0}), registry,
              {.peers = {rank, size}, .divisor = divisor, .velocities = true}) {}
  void fill(int rank) {
    SparseWork& work = state.bucket(0).work();
    Velocity& velocity = state.bucket_velocity(0);
    for (std::int64_t i = 0; i < work.length; ++i) {
      work.staged.push_back(summable(rank, i));
      velocity.staged.push_back(summable(rank, 300 + i));
    }
    work.has_staged = velocity.has_staged = true;
    registry.commit();
  }
};

// Residuals and velocities weigh what they weighed: their sum over what gradients are divided by stays.
TEST(Checkpoint, WhatWasLeftBehindKeepsItsWeight) {
  for (const auto& [from, to] :
       {std::pair(2, 4), std::pair(4, 2), std::pair(4, 1), std::pair(1, 8), std::pair(4, 4)}) {
    const Folder dir;
    begin_checkpoint(dir, 5);
    for (int r = 0; r < from; ++r) {
      LeftBehind rank(r, from, from);
      rank.fill(r);
      write_shards(dir, info_of(5), rank.registry, r, from);
    }
    commit_checkpoint(dir, info_of(5), from);
    for (const auto& [kind, offset] : {std::pair("residual", 0), std::pair("velocity", 300)}) {
      std::vector<double> wanted(4), found(4), plain(4);
      for (int r = 0; r < from; ++r) {
        for (std::int64_t i = 0; i < 4; ++i)
          wanted[static_cast<std::size_t>(i)] += static_cast<double>(summable(r, offset + i)) / from;
      }
      const auto bring = [&, kind = kind](std::vector<double>& means, int rank, double divisor, int ranks) {
        LeftBehind here(rank, ranks, divisor);
        here.registry.load(Checkpoint(dir, 5));
        const std::vector<float> mine = values_of(here.registry.save(rank, ranks), kind, "w");
        for (std::size_t i = 0; i < mine.size(); ++i) means[i] += static_cast<double>(mine[i]) / ranks;
      };
      for (int r = 0; r < to; ++r) {
        bring(found, r, to, to);
        bring(plain, r, from, to);
      }
      EXPECT_EQ(found, wanted) << kind << " " << from << " to " << to;
      EXPECT_EQ(plain == wanted, from == to) << "control: sums as they were";
    }
  }
}

using Sums = std::map<std::string, std::vector<float>>;
void add(Sums& sums, const StateSnapshot& s) {
  for (const StateValue& v : s.rows) {
    if (v.row.rule != LayoutRule::sum) continue;
    std::vector<float>& into = sums[describe(v.row.key)];
    const std::vector<float> mine = values_of(s, v.row.key.kind, v.row.key.name);
    into.resize(mine.size());
    for (std::size_t i = 0; i < mine.size(); ++i) into[i] += mine[i];
  }
}

// Rows of a rule, as far as their values go.
std::vector<std::pair<std::string, Bytes>> rows_with(LayoutRule rule, const StateSnapshot& s) {
  std::vector<std::pair<std::string, Bytes>> out;
  for (const StateValue& v : s.rows) {
    if (v.row.rule == rule) out.emplace_back(describe(v.row.key) + text_of(v.row.shard), v.bytes);
  }
  return out;
}

TEST(Checkpoint, EveryValueFindsItsPlaceOnAnyNumberOfRanks) {
  for (const auto& [from, to] : {std::pair(4, 1), std::pair(4, 2), std::pair(4, 3), std::pair(4, 8),
                                 std::pair(2, 3), std::pair(3, 1), std::pair(1, 4), std::pair(8, 3)}) {
    const Folder dir;
    save(dir, from, 5);
    Sums wanted, found;
    for (int r = 0; r < from; ++r) add(wanted, Sample(r, from).save());
    ASSERT_EQ(wanted.size(), 8u);
    for (int r = 0; r < to; ++r) {
      const StateSnapshot loaded = load(dir, 5, r, to);
      const StateSnapshot here = Sample(r, to).save();
      // Columns, rows, experts and moments are functions of their place.
      EXPECT_EQ(rows_with(LayoutRule::moves, loaded), rows_with(LayoutRule::moves, here))
          << from << " to " << to;
      EXPECT_EQ(rows_with(LayoutRule::same, loaded), rows_with(LayoutRule::same, here));
      EXPECT_NE(rows_with(LayoutRule::restart, loaded), rows_with(LayoutRule::restart, here))
          << "they start anew";
      EXPECT_EQ(row_of(loaded, "regions", bucket_name(plan(), 0)).row.shard.num_elements(), 0);
      const StateSnapshot other = Sample((r + 1) % to, to).save();  // control: another rank's place
      if (to > 1) {
        EXPECT_NE(rows_with(LayoutRule::moves, loaded), rows_with(LayoutRule::moves, other));
      }
      add(found, loaded);
    }
    EXPECT_EQ(found, wanted) << from << " to " << to;
    // Negative controls: a residual that counts twice, or not at all, is seen; a missing file is refused.
    Sums twice = found;
    add(twice, load(dir, 5, 0, to));
    EXPECT_NE(twice, wanted);
    const std::string last =
        "step-5/rank-" + std::to_string(from - 1) + "-of-" + std::to_string(from) + ".safetensors";
    fs::remove(dir / last);
    for (int r = 0; r < to; ++r) {
      EXPECT_THAT(refusal([&] { load(dir, 5, r, to); }),
                  AllOf(HasSubstr((dir / last).string()), HasSubstr("No such file")));
    }
  }
}

// A source that tells how many bytes were asked of it.
class Counted final : public StateSource {
 public:
  explicit Counted(const StateSource& source) : source_(source) {}
  std::span<const Saved> rows() const override { return source_.rows(); }
  void read(std::size_t row, std::size_t first, std::span<std::byte> into) const override {
    bytes += into.size();
    source_.read(row, first, into);
  }
  std::string where() const override { return source_.where(); }
  mutable std::size_t bytes = 0;

 private:
  const StateSource& source_;
};

TEST(Checkpoint, ARankReadsWhatItNeedsAndStoresItsShare) {
  const Folder dir;
  constexpr int kSize = 4;
  constexpr std::int64_t kRows = 1 << 12;
  begin_checkpoint(dir, 5);
  for (int r = 0; r < kSize; ++r) {
    Sample sample(r, kSize);
    sample.tensors.add<float>("large", Shard::range({kRows, 1024}, 0, kRows / kSize * r, kRows / kSize), {});
    for (int i = 0; i < 8; ++i)
      sample.tensors.add<float>("replica " + std::to_string(i), Shard::whole({1 << 18}), {r, kSize});
    write_rank(dir, sample, 5);
  }
  commit_checkpoint(dir, info_of(5), kSize);
  const std::uintmax_t share = 4 * (kRows * 1024 + 8 * (1 << 18)) / kSize;
  for (int r = 0; r < kSize; ++r) {
    const std::uintmax_t bytes =
        fs::file_size(dir / ("step-5/rank-" + std::to_string(r) + "-of-4.safetensors"));
    EXPECT_GE(bytes, share);
    EXPECT_LT(bytes, share + 50'000) << "replicas are dealt out evenly";
  }
  // Rank 3 of 8 has 1/8 of the large one: rows that lie in one file.
  StateRegistry registry;
  Tensors tensors;
  tensors.add<float>("large", Shard::range({kRows, 1024}, 0, kRows / 8 * 3, kRows / 8), {});
  const Bytes wanted = tensors.bytes(0);
  registry.add("model",
               {.rows = [&] { return tensors.rows(); }, .missing = {}, .commit = {}, .roll_back = {}});
  const LoadOptions only{.owners = {"model"},
                         .elsewhere = [](const StateKey& key) { return key.name != "large"; }};
  for (const int other : {0, 2, 3})
    fs::remove(dir / ("step-5/rank-" + std::to_string(other) + "-of-4.safetensors"));
  tensors.forget();
  const Checkpoint checkpoint(dir, 5);
  const Counted counted(checkpoint);
  registry.load(counted, only);
  EXPECT_EQ(tensors.bytes(0), wanted);
  EXPECT_EQ(counted.bytes, 4u * kRows / 8 * 1024);
}

TEST(Checkpoint, RanksThatDisagreeAreNotCommitted) {
  const std::vector<std::function<void(Sample&)>> changes = {
      [](Sample& s) { s.state.factor(0).columns[0] = 1; },
      [](Sample& s) {
        StateSnapshot mine = s.save();
        testing::set_values<std::int64_t>(row_of(mine, "step", "committed"), {9});
        s.registry.load({&mine, 1}, s.rank, s.size);
      },
      [](Sample& s) {
        std::vector<float> wte(12);
        s.optimizer.update(0, wte, wte);
      },
      [](Sample& s) { s.optimizer.set_lr(0.5); },
      // Replicas of a tensor, whoever stores it, and moments alone.
      [](Sample& s) { s.tensors.bytes(0)[5] ^= std::byte{1}; },
      [](Sample& s) { s.tensors.bytes(1)[5] ^= std::byte{1}; },
      [](Sample& s) {
        const Bytes other = bytes_of(std::vector<float>(12, 0.5F));
        for (const LiveRow& live : s.registry.rows()) {
          if (live.row.key.kind == "exp_avg" && live.row.key.name == "wte") live.write(other);
        }
      },
  };
  for (const auto& change : changes) {
    for (int astray = 0; astray < 3; ++astray) {
      const Folder dir;
      save(dir, 3, 4);  // control: ranks that agree
      begin_checkpoint(dir, 5);
      for (int r = 0; r < 3; ++r) {
        Sample sample(r, 3);
        if (r == astray) change(sample);
        write_rank(dir, sample, 5);
      }
      EXPECT_THAT(refusal([&] { commit_checkpoint(dir, info_of(5), 3); }),
                  HasSubstr("/rank-" + std::to_string(astray) + "-of-3.safetensors': it differs from rank-"));
      EXPECT_EQ(latest_checkpoint(dir), 4);
    }
  }
}

// Two groups of one rank each, whose strategies have regions of a bucket of the same name.
TEST(Checkpoint, GroupsThatHoldDifferentStateHaveStrategiesOfDifferentNames) {
  const auto commit_of = [](const Folder& dir, const std::string& second) {
    begin_checkpoint(dir, 1);
    for (int r = 0; r < 2; ++r) {
      StateRegistry registry;
      const std::string owner = r == 0 ? "data_parallel" : second;
      const StateRow row{.key = {owner, "regions", "bucket 0"},
                         .dtype = DType::int64,
                         .rule = LayoutRule::same,
                         .shard = Shard::whole({1}),
                         .peers = {0, 1, static_cast<std::uint64_t>(r)}};
      const std::int64_t mine = r;
      registry.add(owner, {.rows =
                               [&] {
                                 LiveRow live{.row = row};
                                 live.read = [&](std::vector<std::byte>& scratch) {
                                   const auto bytes = std::as_bytes(std::span(&mine, 1));
                                   scratch.assign(bytes.begin(), bytes.end());
                                   return std::span<const std::byte>(scratch);
                                 };
                                 return std::vector<LiveRow>{live};
                               },
                           .missing = {},
                           .commit = {},
                           .roll_back = {}});
      write_shards(dir, info_of(1), registry, r, 2);
    }
    return refusal([&] { commit_checkpoint(dir, info_of(1), 2); });
  };
  EXPECT_THAT(commit_of(Folder(), "data_parallel"),
              HasSubstr("rank-1-of-2.safetensors': it differs from rank-0-of-2.safetensors in the regions of "
                        "'bucket 0', of data_parallel: the ranks disagree, or groups that "
                        "hold different state have strategies of one name"));
  EXPECT_EQ(commit_of(Folder(), "second"), "");  // control
}

TEST(Checkpoint, WhatIsNoWholeIsNotCommitted) {
  struct Case {
    std::function<void(Sample&)> change;  // of rank 1
    std::string says;
  };
  const auto named = [](Sample& s, const std::string& name) -> StateRow& {
    for (std::size_t i = 0;; ++i) {
      if (s.tensors.row(i).key.name == name) return s.tensors.row(i);
    }
  };
  const std::vector<Case> cases = {
      {[&](Sample& s) { named(s, "columns").key.name = "others"; },
       "30 of the 60 elements of the value of 'columns'"},
      {[&](Sample& s) { named(s, "columns").shard.first[1] = 4; },
       "[0:6,4:9] of [6,10], overlaps [0:6,0:5] of [6,10]"},
      {[&](Sample& s) { named(s, "columns").shard.shape = {6, 11}; },
       "it differs from rank-0-of-2.safetensors in the value of 'columns', of model (its shape)"},
      {[&](Sample& s) { named(s, "experts").shard.first[0] = 0; }, "the value of 'experts'"},
      {[&](Sample& s) { named(s, "wte").peers = {0, 2}; }, "'wte'"},
      {[](Sample& s) { s.registry.remove("data_parallel"); }, "is in no file"},
  };
  for (const Case& c : cases) {
    const Folder dir;
    begin_checkpoint(dir, 5);
    Sample first(0, 2), second(1, 2);
    c.change(second);
    write_rank(dir, first, 5);
    write_rank(dir, second, 5);
    EXPECT_THAT(refusal([&] { commit_checkpoint(dir, info_of(5), 2); }),
                AllOf(HasSubstr((dir / ".step-5.tmp").string()), HasSubstr(c.says)));
    EXPECT_EQ(latest_checkpoint(dir), std::nullopt);
  }
}

// ---- groups that hold other parts of one tensor, under one name ----

struct Place {
  int part, parts;  // of 24 rows, by the group
  int peer, peers;  // in the group
};

// What peer `peer` has left behind at a place of the tensor.
float left_behind(int peer, std::int64_t at) { return summable(peer, at); }

struct OfAGroup {
  static constexpr std::int64_t kRows = 24, kColumns = 3;
  Place place;
  std::int64_t first, count;  // elements
  BucketPlan plan;
  StateRegistry registry;
  ParameterState state;

  explicit OfAGroup(const Place& p, bool tells = true)
      : place(p),
        first(kRows * kColumns / p.parts * p.part),
        count(kRows * kColumns / p.parts),
        plan({{.name = "w", .count = count, .rows = kRows / p.parts, .shard = shard(tells)}},
             {.dense_below = 0}),
        state(plan, registry,
              {.peers = {p.peer, p.peers, static_cast<std::uint64_t>(p.part)},
               .velocities = true,
               .factors = true}) {}
  Shard shard(bool tells) const {
    if (!tells) return {};
    return Shard::range({kRows, kColumns}, 0, kRows / place.parts * place.part, kRows / place.parts);
  }
  // As it is after a step; everything differs between the groups.
  void fill() {
    SparseWork& work = state.bucket(0).work();
    Velocity& velocity = state.bucket_velocity(0);
    for (std::int64_t i = first; i < first + count; ++i) {
      work.staged.push_back(left_behind(place.peer, i));
      velocity.staged.push_back(left_behind(place.peer, 1000 + i));
    }
    work.next_team_quota = {.entries = 1 + place.part, .step = 2, .inertia = true};
    work.next_team_figures = {.operations = 1 + place.part, .k = 2, .entry_bytes = 5, .overlap = 0.5};
    work.has_staged = velocity.has_staged = true;
    state.stage_scale(0, 1 + place.part);
    state.factor(0).staged = {static_cast<float>(place.part), 1, 2};
    state.factor(0).has_staged = true;
    registry.commit();
  }
  StateSnapshot save(int rank, int size) { return registry.save(rank, size); }
};

std::vector<Place> layout(int parts, int peers) {
  std::vector<Place> out;
  for (int part = 0; part < parts; ++part) {
    for (int peer = 0; peer < peers; ++peer) out.push_back({part, parts, peer, peers});
  }
  return out;
}

void save_groups(const fs::path& dir, const std::vector<Place>& places, bool tell = true) {
  const int size = static_cast<int>(places.size());
  begin_checkpoint(dir, 5);
  for (int r = 0; r < size; ++r) {
    OfAGroup rank(places[static_cast<std::size_t>(r)], tell);
    rank.fill();
    write_shards(dir, info_of(5), rank.registry, r, size);
  }
  commit_checkpoint(dir, info_of(5), size);
}

TEST(Checkpoint, GroupsThatHoldOtherPartsOfATensorShareAName) {
  const std::vector<Place> uneven = {{0, 2, 0, 1}, {1, 2, 0, 3}, {1, 2, 1, 3}, {1, 2, 2, 3}};
  for (const std::vector<Place>& before : {layout(2, 2), uneven}) {
    const Folder dir;
    save_groups(dir, before);
    const auto peers_before = [&](std::int64_t at) {
      return at < OfAGroup::kRows * OfAGroup::kColumns / 2 ? before.front().peers : before.back().peers;
    };
    for (const auto& [parts, peers] : {std::pair(1, 1), std::pair(1, 2), std::pair(2, 1), std::pair(1, 4),
                                       std::pair(2, 2), std::pair(4, 1), std::pair(3, 1), std::pair(1, 8),
                                       std::pair(2, 4), std::pair(4, 2), std::pair(8, 1)}) {
      for (const Place& here : layout(parts, peers)) {
        OfAGroup rank(here);
        rank.registry.load(Checkpoint(dir, 5));
        const StateSnapshot loaded = rank.save(0, 1);
        for (const auto& [kind, offset] : {std::pair("residual", 0), std::pair("velocity", 1000)}) {
          std::vector<float> wanted, astray;
          for (std::int64_t i = rank.first; i < rank.first + rank.count; ++i) {
            float sum = 0;
            for (int r = here.peer; r < peers_before(i); r += here.peers) sum += left_behind(r, offset + i);
            wanted.push_back(sum);
            astray.push_back(left_behind(here.peer, offset + (i + 36) % 72));
          }
          EXPECT_EQ(values_of(loaded, kind, "w"), wanted) << parts << " x " << peers;
          EXPECT_NE(values_of(loaded, kind, "w"), astray) << "control: the other group's";
        }
        // What a group's peers have in common goes along where the group holds the same.
        const std::string part = name_of_part("w", rank.shard(true));
        const double scale = values_of<double>(loaded, "scale", part).at(0);
        EXPECT_EQ(scale, parts == 2 ? 1 + here.part : kUnmeasured);
        const std::vector<float> factor = values_of(loaded, "factor", part);
        EXPECT_EQ(factor, parts == 2 ? std::vector<float>({static_cast<float>(here.part), 1, 2})
                                     : std::vector<float>());
      }
    }
    for (std::size_t r = 0; r < before.size(); ++r) {
      OfAGroup again(before[r]), same(before[r]);
      again.registry.load(Checkpoint(dir, 5));
      same.fill();
      EXPECT_EQ(again.save(0, 1), same.save(0, 1)) << "every bit, controllers too";
    }
  }
}

TEST(Checkpoint, GroupsThatCannotBeToldApartAreNotCommitted) {
  const Folder dir;
  EXPECT_THAT(refusal([&] { save_groups(dir, layout(2, 2), false); }),
              AllOf(HasSubstr("/rank-2-of-4.safetensors': it differs from rank-0-of-4.safetensors"),
                    HasSubstr("have strategies of one name")));
  const std::vector<Place> twice = {{0, 2, 0, 2}, {0, 2, 1, 2}, {0, 2, 0, 2}, {0, 2, 1, 2}};
  EXPECT_THAT(
      refusal([&] { save_groups(dir, twice); }),
      AllOf(HasSubstr("/rank-2-of-4.safetensors': "),
            HasSubstr("is there for rank 0 of 2 as in rank-0-of-4.safetensors: each group has a name, or "
                      "a part of the tensor, of its own")));
  EXPECT_EQ(latest_checkpoint(dir), std::nullopt);
}

// ---- saving that does not end well ----

TEST(Checkpoint, WithoutCommitThePreviousOneStays) {
  const Folder dir;
  EXPECT_EQ(latest_checkpoint(dir / "nowhere"), std::nullopt);
  EXPECT_EQ(latest_checkpoint(dir), std::nullopt);
  write_parts(dir, 2, 3);
  EXPECT_EQ(latest_checkpoint(dir), std::nullopt);
  save(dir, 2, 4);
  write_parts(dir, 2, 5);  // and then a crash
  write_text(dir / ".weft-0123456789abcdef.tmp", "left by a writer that was killed");
  write_text(dir / ".other.tmp", "not ours");
  EXPECT_EQ(latest_checkpoint(dir), 4);
  EXPECT_TRUE(loads_its_own(dir, 4, 1, 2));
  EXPECT_NE(refusal([&] { load(dir, 5, 0, 2); }), "");
  begin_checkpoint(dir, 6);
  EXPECT_EQ(names(dir), (Strings{".other.tmp", ".step-6.tmp", "latest", "step-4"}));
}

TEST(Checkpoint, CommitWantsTheFilesOfAllRanks) {
  const Folder dir;
  save(dir, 2, 4);
  const auto commit = [&dir](int ranks) {
    return refusal([&] { commit_checkpoint(dir, info_of(5), ranks); });
  };
  EXPECT_THAT(commit(2), HasSubstr(".step-5.tmp"));  // not begun
  for (const std::string name : {"rank-0-of-2.safetensors", "rank-1-of-2.safetensors"}) {
    write_parts(dir, 2, 5);
    fs::remove(dir / ".step-5.tmp" / name);
    EXPECT_THAT(commit(2), AllOf(HasSubstr(name), HasSubstr("was not written")));
  }
  write_parts(dir, 2, 5);
  EXPECT_THAT(commit(0), HasSubstr("0 ranks"));
  EXPECT_THAT(commit(1), HasSubstr("was not written"));
  EXPECT_THAT(commit(3), HasSubstr("was not written"));
  write_text(dir / ".step-5.tmp/notes", "");
  EXPECT_THAT(commit(2), AllOf(HasSubstr("notes"), HasSubstr("does not belong")));
  EXPECT_EQ(latest_checkpoint(dir), 4);
  fs::remove(dir / ".step-5.tmp/notes");
  write_text(dir / ".step-5.tmp/.weft-0123456789abcdef.tmp",
             "left by a writer that was killed and tried again");
  EXPECT_EQ(commit(2), "");
  EXPECT_EQ(latest_checkpoint(dir), 5);
  EXPECT_EQ(names(dir / "step-5").size(), 3u);
}

TEST(Checkpoint, TheSameStepIsReplaced) {
  const Folder dir;
  save(dir, 3, 5);
  save(dir, 2, 5);
  EXPECT_EQ(names(dir), (Strings{"latest", "step-5"}));
  EXPECT_TRUE(loads_its_own(dir, 5, 1, 2));
  EXPECT_EQ(names(dir / "step-5").size(), 3u);
}

TEST(Checkpoint, TheNewestSoundOneIsFound) {
  const Folder dir;
  for (const int at : {9, 10, 100}) save(dir, 2, at);
  fs::create_directory(dir / "step-200");   // nothing in it
  fs::create_directory(dir / "step-0300");  // not a name that is given
  write_text(dir / "step-400", "not a folder");
  EXPECT_EQ(latest_checkpoint(dir), 100);
  save(dir, 2, 11);  // after going back on purpose: `latest` decides
  EXPECT_EQ(latest_checkpoint(dir), 11);
  for (const std::string text : {"", "step-", "step-11", "step-011\n", "step--1\n",
                                 "step-99999999999999999999\n", "../step-9\n", "step-77\n"}) {
    write_text(dir / "latest", text);
    EXPECT_EQ(latest_checkpoint(dir), 100) << text;
  }
  fs::remove(dir / "latest");
  EXPECT_EQ(latest_checkpoint(dir), 100);
  fs::resize_file(dir / "step-100/rank-1-of-2.safetensors", 50);
  Strings why;
  EXPECT_EQ(latest_checkpoint(dir, &why), 11);
  EXPECT_THAT(why, ElementsAre(HasSubstr("step-400"), HasSubstr("step-200"), HasSubstr("rank-1-of-2")));
  fs::remove(dir / "step-11/rank-0-of-2.safetensors");
  fs::remove(dir / "step-10/index.safetensors");
  EXPECT_EQ(latest_checkpoint(dir), 9);
}

TEST(Checkpoint, OldOnesAreDeleted) {
  const Folder dir;
  for (const int at : {9, 10, 11, 100}) save(dir, 2, at);
  fs::remove(dir / "step-11/index.safetensors");  // does not count, and is not ours to delete
  keep_last(dir, 2);
  EXPECT_EQ(names(dir), (Strings{"latest", "step-10", "step-100", "step-11"}));
  save(dir, 2, 5);
  keep_last(dir, 1);  // what `latest` names stays
  EXPECT_EQ(names(dir), (Strings{"latest", "step-100", "step-11", "step-5"}));
  EXPECT_EQ(latest_checkpoint(dir), 5);
  EXPECT_THAT(refusal([&] { keep_last(dir, 0); }), HasSubstr("no checkpoint"));
}

TEST(Checkpoint, AWriteThatFailsLeavesThePreviousOne) {
  const Folder dir;
  save(dir, 2, 4);
  const auto limited = [](const std::function<void()>& call) {
    const testing::FileLimit full(5);
    return refusal(call);
  };
  begin_checkpoint(dir, 5);
  Sample sample(0, 2);
  EXPECT_THAT(limited([&] { write_rank(dir, sample, 5); }), HasSubstr("File too large"));
  EXPECT_TRUE(names(dir / ".step-5.tmp").empty());
  write_parts(dir, 2, 5);
  EXPECT_THAT(limited([&] { commit_checkpoint(dir, info_of(5), 2); }), HasSubstr("cannot write"));
  EXPECT_EQ(names(dir), (Strings{".step-5.tmp", "latest", "step-4"}));
  EXPECT_EQ(latest_checkpoint(dir), 4);
  commit_checkpoint(dir, info_of(5), 2);  // negative control: with room it goes on
  EXPECT_EQ(latest_checkpoint(dir), 5);
}

// In a child: a file system of 128 KiB in a mount namespace of its own.
int fill_a_disk(const fs::path& place) noexcept {
  constexpr int kCannot = 77;
  if (!testing::mount_small(place, "128k")) return kCannot;
  save(place, 2, 4);
  Sample large(0, 2);
  large.tensors.add<float>("large", Shard::whole({1 << 16}), {});
  begin_checkpoint(place, 5);
  const std::string said = refusal([&] { write_rank(place, large, 5); });
  std::fprintf(stderr, "%s\n", said.c_str());
  if (!said.ends_with("No space left on device") || latest_checkpoint(place) != 4) return 1;
  // Room for nothing at all: the commit of a small one fails too, and then goes through.
  write_parts(place, 2, 6);
  {
    std::ofstream filler(place / "filler", std::ios::binary);
    for (const std::string some(1024, 'x'); filler.write(some.data(), 1024).flush();) {
    }
  }
  const std::string commit = refusal([&] { commit_checkpoint(place, info_of(6), 2); });
  std::fprintf(stderr, "%s\n", commit.c_str());
  if (!commit.ends_with("No space left on device") || latest_checkpoint(place) != 4) return 2;
  fs::remove(place / "filler");
  commit_checkpoint(place, info_of(6), 2);
  return latest_checkpoint(place) == 6 ? 0 : 3;
}

TEST(Checkpoint, AFullDiskLeavesThePreviousOne) {
  const Folder dir;
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) ::_exit(fill_a_disk(dir));
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == 77) GTEST_SKIP() << "a small file system cannot be mounted here";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(Checkpoint, AKilledJobLeavesASoundCheckpoint) {
  const Folder dir;
  save(dir, 2, 0);
  std::int64_t before = 0;
  for (int round = 0; round < 20; ++round) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      const auto forever = [&]() noexcept {  // a child must not come back from here
        for (std::int64_t at = before;; ++at) {
          for (int twice = 0; twice < 2; ++twice) save(dir, 2, at);  // the second replaces the first
          keep_last(dir, 2);
        }
      };
      forever();
    }
    std::this_thread::sleep_for(std::chrono::microseconds(2000 + reference::hash(3, 0, round) % 30000));
    ASSERT_EQ(::kill(child, SIGKILL), 0);
    ASSERT_EQ(::waitpid(child, nullptr, 0), child);
    Strings why;
    const std::optional<std::int64_t> found = latest_checkpoint(dir, &why);
    ASSERT_TRUE(found.has_value());
    EXPECT_TRUE(why.empty()) << why[0];
    EXPECT_GE(*found, before);
    EXPECT_TRUE(loads_its_own(dir, *found, 1, 2));
    before = *found;
  }
  begin_checkpoint(dir, before);
  for (const std::string& name : names(dir))
    EXPECT_TRUE(name == "latest" || name.starts_with("step-") ||
                name == ".step-" + std::to_string(before) + ".tmp")
        << name;
}

}  // namespace
}  // namespace weft
