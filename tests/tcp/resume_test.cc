// A job of two strategies on groups of different sizes loses a rank to SIGKILL: the others get one sentence,
// and the job that goes on from its shards ends with the bits of one that was never disturbed.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "data_parallel/data_parallel.h"
#include "engine/communication_thread.h"
#include "files.h"
#include "state/checkpoint.h"
#include "step_toys.h"
#include "tcp/forked.h"
#include "weft/collective.h"
#include "weft/engine.h"
#include "weft/random.h"

namespace weft::testing {
namespace {

namespace fs = std::filesystem;

constexpr int kRanks = 4;
constexpr std::int64_t kShared = 4000, kHalf = 900, kSteps = 14, kEvery = 4, kKilledAt = 10;
constexpr float kLr = 0.125F;

// "shared": all ranks have it. "half": a tensor of two rows, each with half of the ranks.
class Toy final : public WaitingDriver {
 public:
  Toy(Engine& engine, const Comm& world)
      : rank_(world.rank()),
        half_(world.subgroup(rank_ < 2 ? std::vector{0, 1} : std::vector{2, 3}, 1)),
        strategies_(engine, world,
                    chain_shape("toy", {{"first", {{"shared", {kShared}}}}, {"second", {{"half", {kHalf}}}}}),
                    StepOptions{.skip_not_finite = true, .updates_wait = {}}),
        walker_(*this, strategies_) {
    add(world, "shared", "spardl", {"shared", kShared, 0});
    add(half_, "half", "topka", {.name = "half", .count = kHalf, .use = 1, .shard = my_half()});
    strategies_.install();
    values_ = {{"shared", std::vector<float>(kShared, 1)}, {"half", std::vector<float>(kHalf, 2)}};
    strategies_.state().add(
        "toy", {.rows = [this] { return rows(); }, .missing = {}, .commit = {}, .roll_back = {}});
  }
  ~Toy() override { strategies_.state().remove("toy"); }
  Toy(const Toy&) = delete;
  Toy& operator=(const Toy&) = delete;

  StateRegistry& state() { return strategies_.state(); }
  const std::map<std::string, std::vector<float>>& values() const { return values_; }

  // Steps [first, last), and everything of them is settled.
  void run(std::int64_t first, std::int64_t last) {
    for (step_ = first; step_ < last; ++step_) {
      strategies_.number_step(step_);
      strategies_.batch_known({.tokens = 1});
      walker_.walk(strategies_.next_table(1));
    }
    if (last > first) walker_.walk(strategies_.tables(1).settle);
  }

  Task<void> compute(Piece piece) override {
    const char* const name = piece.block == 0 ? "shared" : "half";
    std::vector<float>& value = values_[name];
    if (piece.work == Work::forward && piece.block == 1) strategies_.loss_known(1);
    if (piece.work == Work::backward) {
      std::vector<float>& gradient = gradients_[name];
      gradient.resize(value.size());
      Random random(static_cast<std::uint64_t>(piece.block), static_cast<std::uint32_t>(rank_),
                    static_cast<std::uint32_t>(step_));
      for (std::size_t i = 0; i < value.size();
           ++i)  // of the values, so that one wrong step is never made up for
        gradient[i] = value[i] / 8 + static_cast<float>(random.below(2001)) / 1000 - 1;
      strategies_.gradient_ready(piece.block, std::span<const float>(gradient));
    }
    if (piece.work == Work::update && strategies_.result()->committed) {
      std::vector<float> averaged(value.size());
      strategies_.result_of(piece.block, std::span(averaged));
      for (std::size_t i = 0; i < value.size(); ++i) value[i] -= kLr * averaged[i];
    }
    co_return;
  }

 private:
  Shard my_half() const { return Shard::range({2, kHalf}, 0, rank_ / 2, 1); }
  void add(const Comm& group, const char* name, const char* scheme, const ParameterInfo& parameter) {
    DataParallelOptions options;
    options.scheme.name = scheme;
    options.scheme.density = 0.02;
    options.name = name;
    options.scheme.buckets.dense_below = 0;
    options.first_slot = strategies_.next_slot(group);
    const std::vector<ParameterInfo> parameters{parameter};
    strategies_.add(std::make_unique<DataParallel>(strategies_.engine(), group, parameters, options,
                                                   &strategies_.state()));
  }
  LiveRow row(const std::string& name, Shard shard, Peers peers) {
    std::vector<float>& mine = values_[name];
    LiveRow out;
    out.row = {.key = {"toy", "value", name},
               .dtype = DType::float32,
               .rule = LayoutRule::moves,
               .shard = std::move(shard),
               .peers = peers};
    out.read = [&mine](auto&) { return std::as_bytes(std::span<const float>(mine)); };
    out.write = [&mine](std::span<const std::byte> bytes) {
      std::memcpy(mine.data(), bytes.data(), bytes.size());
    };
    return out;
  }
  std::vector<LiveRow> rows() {
    return {row("shared", Shard::whole({kShared}), {.rank = rank_, .size = kRanks}),
            row("half", my_half(), {.rank = half_.rank(), .size = 2, .group = half_.group_id()})};
  }

  int rank_;
  Comm half_;
  std::int64_t step_ = 0;
  std::map<std::string, std::vector<float>> values_, gradients_;
  Strategies strategies_;
  Walker walker_;
};

struct Job {
  fs::path dir;
  bool only_values = false;  // a wrong way to go on: what compression has left behind is forgotten
  int victim = -1;           // waits in the middle of a span for its end
};

void barrier_of(Engine& engine, std::uint32_t slot) {
  const SubmitOptions options{.name = "barrier", .traffic = TrafficClass::blocking, .slot = slot};
  engine.submit(engine.world(), options, [](Comm comm) { return barrier(comm); }).wait();
}

// Steps on from the newest checkpoint; saves after every kEvery steps; leaves its values in the folder.
void train(const TcpOptions& tcp, const ForkedRanks::Say& say, const Job& job) {
  const std::unique_ptr<Transport> transport = connect_tcp(tcp);
  Engine engine(*transport, {}, nullptr);
  const CommunicationThread thread(engine);
  Toy toy(engine, engine.world());
  std::int64_t step = 0;
  if (const auto latest = latest_checkpoint(job.dir)) {
    const Checkpoint from(job.dir, *latest);
    LoadOptions options;
    if (job.only_values) options.owners = {"toy"};
    toy.state().load(from, options);
    step = *latest;
    say("resumes at " + std::to_string(step));
  }
  std::uint32_t slot = 1000;
  try {
    while (step < kSteps) {
      const std::int64_t until = std::min(kSteps, step - step % kEvery + kEvery);
      if (step < kKilledAt && kKilledAt < until) {
        toy.run(step, kKilledAt);
        step = kKilledAt;
        say("is at " + std::to_string(step));
        if (tcp.rank == job.victim) ::pause();
      }
      toy.run(step, until);
      step = until;
      if (step % kEvery != 0) continue;
      const CheckpointInfo info{.step = step, .seed = 1, .metadata = {}, .extra = {}};
      if (tcp.rank == 0) begin_checkpoint(job.dir, step);
      barrier_of(engine, slot++);
      write_shards(job.dir, info, toy.state(), tcp.rank, kRanks);
      barrier_of(engine, slot++);
      if (tcp.rank == 0) commit_checkpoint(job.dir, info, kRanks);
      barrier_of(engine, slot++);
    }
  } catch (const Error& error) {
    say(error.what());
    ::_exit(1);  // as a program that does not catch it
  }
  std::ofstream out(job.dir / ("values." + std::to_string(tcp.rank)), std::ios::binary);
  for (const auto& [name, values] : toy.values())
    out.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(4 * values.size()));
  out.close();
  say("done");
}

std::string values_in(const fs::path& dir, int rank) {
  std::ifstream file(dir / ("values." + std::to_string(rank)), std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void run_to_the_end(const Job& job, const std::string& first_words) {
  ForkedRanks ranks(job_options(kRanks),
                    [&job](const TcpOptions& o, const ForkedRanks::Say& say) { train(o, say, job); });
  for (int r = 0; r < kRanks; ++r) {
    std::vector<std::string> said;
    while (said.empty() || said.back() != "done") {
      const std::optional<Report> report = ranks.hear(r, 60s);
      ASSERT_TRUE(report) << "rank " << r << " after '" << (said.empty() ? "" : said.back()) << "'";
      said.emplace_back(report->text.data());
    }
    EXPECT_EQ(said.front(), first_words) << "rank " << r;
  }
}

TEST(TwoStrategies, AKilledRankIsNamedAndTheJobGoesOnFromItsShards) {
  const Folder undisturbed, disturbed;
  const std::string at = "is at " + std::to_string(kKilledAt);
  run_to_the_end({.dir = undisturbed.path()}, at);
  {
    const Job job{.dir = disturbed.path(), .victim = 2};
    ForkedRanks ranks(job_options(kRanks),
                      [&job](const TcpOptions& o, const ForkedRanks::Say& say) { train(o, say, job); });
    for (int r = 0; r < kRanks; ++r) {
      const std::optional<Report> report = ranks.hear(r, 60s);
      ASSERT_TRUE(report);
      EXPECT_EQ(std::string(report->text.data()), at);
    }
    ranks.signal(job.victim, SIGKILL);
    for (const int r : {0, 1, 3}) {
      const std::optional<Report> report = ranks.hear(r, 30s);
      ASSERT_TRUE(report) << "rank " << r << " waits for ever";
      const std::string text = report->text.data();
      EXPECT_NE(text.find("rank 2"), std::string::npos) << text;
      EXPECT_EQ(text.find('\n'), std::string::npos) << text;
    }
  }
  const std::int64_t saved = kKilledAt - kKilledAt % kEvery;
  ASSERT_EQ(latest_checkpoint(disturbed.path()), saved);
  const Folder forgetful;
  fs::copy(disturbed.path(), forgetful.path(), fs::copy_options::recursive);
  const std::string resumes = "resumes at " + std::to_string(saved);
  run_to_the_end({.dir = disturbed.path()}, resumes);
  run_to_the_end({.dir = forgetful.path(), .only_values = true}, resumes);
  for (int r = 0; r < kRanks; ++r) {
    ASSERT_EQ(values_in(undisturbed.path(), r).size(), 4U * (kShared + kHalf));
    EXPECT_TRUE(values_in(disturbed.path(), r) == values_in(undisturbed.path(), r)) << "rank " << r;
    EXPECT_FALSE(values_in(forgetful.path(), r) == values_in(undisturbed.path(), r)) << "control, rank " << r;
  }
}

}  // namespace
}  // namespace weft::testing
