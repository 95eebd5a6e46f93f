// Checkpoints: every bit comes back; another number of ranks conserves the sum of residuals; whatever happens
// while saving, the checkpoint before it stays.
#include "data_parallel/checkpoint.h"

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

TEST(Checkpoint, EveryBitComesBack) {
  for (const std::string optimizer : {"sgd", "momentum", "adam", "adamw", "adagrad"}) {
    const Folder dir;
    constexpr int kSize = 3;
    begin_checkpoint(dir, 7);
    for (int r = 0; r < kSize; ++r) write_rank(dir, snapshot_of(r, kSize, 7, optimizer));
    write_shared(dir, snapshot_of(0, kSize, 7, optimizer));
    commit_checkpoint(dir, 7, kSize);
    for (int r = 0; r < kSize; ++r) {
      const TrainingSnapshot wanted = snapshot_of(r, kSize, 7, optimizer);
      const TrainingSnapshot found = load_checkpoint(dir, 7, r, kSize);
      EXPECT_TRUE(same(found, wanted)) << optimizer << " rank " << r;
      TrainingSnapshot other = wanted;  // negative control: one sign bit
      other.state.parameters[0].residual[0] = -other.state.parameters[0].residual[0];
      EXPECT_FALSE(same(found, other));

      // Both go on alike.
      Optimizer resumed = make_optimizer(optimizer);
      Optimizer never_stopped = make_optimizer(optimizer);
      resumed.load(found.optimizer);
      never_stopped.load(wanted.optimizer);
      std::vector<float> a(12, 1), b(12, 1);
      std::vector<double> c(5, 1), d(5, 1);
      step(resumed, a, c, 4);
      step(never_stopped, b, d, 4);
      EXPECT_TRUE(same_bits(a, b) && same_bits(c, d)) << optimizer;
    }
    EXPECT_EQ(names(dir), (Strings{"latest", "step-7"}));
    EXPECT_EQ(names(dir / "step-7"), (Strings{"rank-0-of-3.safetensors", "rank-1-of-3.safetensors",
                                              "rank-2-of-3.safetensors", "shared.safetensors"}));
    EXPECT_EQ(read_text(dir / "latest"), "step-7\n");
    EXPECT_EQ(latest_checkpoint(dir), 7);
  }
}

TEST(Checkpoint, TheStateOfAPlanComesBack) {
  const BucketOptions options{.bucket_bytes = 64, .dense_below = 0};
  const BucketPlan plan({{.name = "a", .count = 10, .use = 0}, {.name = "b", .count = 20, .use = 1}},
                        options);
  ParameterState state(plan);
  for (int b = 0; b < plan.num_buckets(); ++b) {
    SparseWork& work = state.bucket(b).work();
    work.residual.assign(static_cast<std::size_t>(work.length), 0.5F);
    work.thresholds = {.local = 1, .global = 2, .k = 2, .steps = 9, .regions = {0, 4, work.length}};
  }
  TrainingSnapshot s;
  s.state = state.save(1, 2);
  const Folder dir;
  begin_checkpoint(dir, 0);
  write_rank(dir, s);
  s.state = state.save(0, 2);
  write_rank(dir, s);
  write_shared(dir, s);
  commit_checkpoint(dir, 0, 2);
  ParameterState resumed(plan);
  resumed.load(load_checkpoint(dir, 0, 1, 2).state, 1, 2);
  EXPECT_TRUE(same(resumed.save(1, 2), state.save(1, 2)));
  EXPECT_EQ(resumed.bucket(0).work().thresholds.regions, (std::vector<std::int64_t>{0, 4, 10}));
}

TEST(Checkpoint, RanksAsThreadsWriteTogether) {
  const Folder dir;
  constexpr int kSize = 4;
  begin_checkpoint(dir, 1);
  std::vector<std::thread> ranks;
  for (int r = 0; r < kSize; ++r) {
    ranks.emplace_back([&dir, r] {
      write_rank(dir, snapshot_of(r, kSize, 1));
      if (r == 0) write_shared(dir, snapshot_of(r, kSize, 1));
    });
  }
  for (std::thread& rank : ranks) rank.join();
  commit_checkpoint(dir, 1, kSize);
  for (int r = 0; r < kSize; ++r) {
    EXPECT_TRUE(same(load_checkpoint(dir, 1, r, kSize), snapshot_of(r, kSize, 1)));
  }
}

using Sums = std::map<std::string, std::vector<float>>;
void add(Sums& sums, const StateSnapshot& s) {
  for (const StateSnapshot::Parameter& p : s.parameters) {
    std::vector<float>& into = sums[p.name];
    into.resize(static_cast<std::size_t>(p.count));
    for (std::size_t i = 0; i < p.residual.size(); ++i) into[i] += p.residual[i];
    std::vector<float>& moving = sums["the velocity of " + p.name];
    moving.resize(static_cast<std::size_t>(p.count));
    for (std::size_t i = 0; i < p.velocity.size(); ++i) moving[i] += p.velocity[i];
  }
}

TEST(Checkpoint, AnotherNumberOfRanksConservesTheResiduals) {
  for (const auto& [from, to] : {std::pair(4, 2), std::pair(2, 3), std::pair(3, 1), std::pair(1, 4)}) {
    const Folder dir;
    save(dir, from, 5);
    Sums wanted, found;
    for (int r = 0; r < from; ++r) add(wanted, state_of(r, from));
    for (int r = 0; r < to; ++r) {
      const TrainingSnapshot loaded = load_checkpoint(dir, 5, r, to);
      EXPECT_EQ(loaded.state.rank, r);
      EXPECT_EQ(loaded.state.size, to);
      EXPECT_TRUE(loaded.state.controllers.empty());
      EXPECT_EQ(loaded.model, snapshot_of(0, from, 5).model);
      EXPECT_EQ(loaded.optimizer, snapshot_of(0, from, 5).optimizer);
      add(found, loaded.state);
    }
    EXPECT_EQ(found, wanted) << from << " to " << to;
    // Negative controls: a residual that counts twice, or not at all, is seen; a missing file is refused.
    Sums twice = found;
    add(twice, load_checkpoint(dir, 5, 0, to).state);
    EXPECT_NE(twice, wanted);
    const std::string last =
        "step-5/rank-" + std::to_string(from - 1) + "-of-" + std::to_string(from) + ".safetensors";
    fs::remove(dir / last);
    for (int r = 0; r < to; ++r) {
      EXPECT_THAT(refusal([&] { load_checkpoint(dir, 5, r, to); }),
                  AllOf(HasSubstr((dir / last).string()), HasSubstr("No such file")));
    }
  }
}

TEST(Checkpoint, RanksThatDisagreeAreNotResharded) {
  const std::vector<std::function<void(StateSnapshot&)>> changes = {
      [](StateSnapshot& s) {
        s.parameters[2].count = 8;
        s.controllers.clear();
      },
      [](StateSnapshot& s) { s.parameters[0].factor[0] = 1; },
      [](StateSnapshot& s) { s.step = 39; },
  };
  for (const auto& change : changes) {
    const Folder dir;
    begin_checkpoint(dir, 5);
    TrainingSnapshot s = snapshot_of(1, 2, 5);
    change(s.state);
    write_rank(dir, s);
    write_rank(dir, snapshot_of(0, 2, 5));
    write_shared(dir, snapshot_of(0, 2, 5));
    commit_checkpoint(dir, 5, 2);
    EXPECT_THAT(refusal([&] { load_checkpoint(dir, 5, 0, 1); }),
                AllOf(HasSubstr((dir / "step-5").string()), HasSubstr("reshard: rank 1's snapshot")));
    Strings why;
    EXPECT_EQ(latest_checkpoint(dir, &why), std::nullopt);
    EXPECT_THAT(why, ElementsAre(HasSubstr("rank-1-of-2.safetensors")));
  }
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
  EXPECT_TRUE(same(load_checkpoint(dir, 4, 1, 2), snapshot_of(1, 2, 4)));
  EXPECT_NE(refusal([&] { load_checkpoint(dir, 5, 0, 2); }), "");
  begin_checkpoint(dir, 6);
  EXPECT_EQ(names(dir), (Strings{".other.tmp", ".step-6.tmp", "latest", "step-4"}));
}

TEST(Checkpoint, CommitWantsTheFilesOfAllRanks) {
  const Folder dir;
  save(dir, 2, 4);
  const auto commit = [&dir](int ranks) { return refusal([&] { commit_checkpoint(dir, 5, ranks); }); };
  EXPECT_THAT(commit(2), HasSubstr(".step-5.tmp"));  // not begun
  for (const std::string name :
       {"shared.safetensors", "rank-0-of-2.safetensors", "rank-1-of-2.safetensors"}) {
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
  EXPECT_TRUE(same(load_checkpoint(dir, 5, 1, 2), snapshot_of(1, 2, 5)));
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
  fs::remove(dir / "step-10/shared.safetensors");
  EXPECT_EQ(latest_checkpoint(dir), 9);
}

TEST(Checkpoint, OldOnesAreDeleted) {
  const Folder dir;
  for (const int at : {9, 10, 11, 100}) save(dir, 2, at);
  fs::remove(dir / "step-11/shared.safetensors");  // does not count, and is not ours to delete
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
  EXPECT_THAT(limited([&] { write_rank(dir, snapshot_of(0, 2, 5)); }), HasSubstr("File too large"));
  EXPECT_THAT(limited([&] { write_shared(dir, snapshot_of(0, 2, 5)); }), HasSubstr("File too large"));
  EXPECT_TRUE(names(dir / ".step-5.tmp").empty());
  write_parts(dir, 2, 5);
  EXPECT_THAT(limited([&] { commit_checkpoint(dir, 5, 2); }), HasSubstr("cannot write"));
  EXPECT_EQ(names(dir), (Strings{".step-5.tmp", "latest", "step-4"}));
  EXPECT_EQ(latest_checkpoint(dir), 4);
  commit_checkpoint(dir, 5, 2);  // negative control: with room it goes on
  EXPECT_EQ(latest_checkpoint(dir), 5);
}

// In a child: a file system of 128 KiB in a mount namespace of its own.
int fill_a_disk(const fs::path& place) noexcept {
  constexpr int kCannot = 77;
  if (!testing::mount_small(place, "128k")) return kCannot;
  save(place, 2, 4);
  TrainingSnapshot large = snapshot_of(0, 2, 5);
  large.extra["large"] = Bytes(1 << 18);
  begin_checkpoint(place, 5);
  write_rank(place, large);
  const std::string said = refusal([&] { write_shared(place, large); });
  std::fprintf(stderr, "%s\n", said.c_str());
  if (!said.ends_with("No space left on device") || latest_checkpoint(place) != 4) return 1;
  // Room for nothing at all: the commit of a small one fails too, and then goes through.
  write_parts(place, 2, 6);
  {
    std::ofstream filler(place / "filler", std::ios::binary);
    for (const std::string some(1024, 'x'); filler.write(some.data(), 1024).flush();) {
    }
  }
  const std::string commit = refusal([&] { commit_checkpoint(place, 6, 2); });
  std::fprintf(stderr, "%s\n", commit.c_str());
  if (!commit.ends_with("No space left on device") || latest_checkpoint(place) != 4) return 2;
  fs::remove(place / "filler");
  commit_checkpoint(place, 6, 2);
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
    EXPECT_TRUE(same(load_checkpoint(dir, *found, 1, 2), snapshot_of(1, 2, *found)));
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
