// Training runs: a run that was stopped and resumed against one that was not, records, schedules.
#include "weft_torch/train/trainer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "data/open.h"
#include "data_parallel/data_parallel.h"
#include "state/checkpoint.h"
#include "weft/error.h"
#include "weft_torch/train/replica.h"
#include "workload/train_options.h"

namespace weft {
namespace {

namespace fs = std::filesystem;

class TrainerTest : public ::testing::Test {
 protected:
  TrainerTest() : folder_(fs::temp_directory_path() / ("weft-trainer-" + std::to_string(getpid()))) {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  ~TrainerTest() override { fs::remove_all(folder_); }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  // Ten steps, and how to go on from there.
  TrainRun half_done(TrainOptions options, int ranks) const;

  fs::path folder_;
};

TrainOptions tiny() {
  TrainOptions o;
  o.sizes = model_options("gpt", "tiny");
  o.data.kind = "synthetic";
  o.data.synthetic_tokens = 20'000;
  o.global_batch = 6;
  o.length = 12;
  o.steps = 20;
  o.scheme.density = 0.05;
  o.scheme.buckets.bucket_bytes = 20971;
  o.scheme.teams = 1;
  return o;
}

class Keep final : public Observer {
 public:
  void started(const TrainStart& s) override { start = s; }
  void step(const StepRecord& record) override { records.push_back(record); }
  void checkpoint(std::int64_t steps_done) override { checkpoints.push_back(steps_done); }
  TrainStart start;
  std::vector<StepRecord> records;
  std::vector<std::int64_t> checkpoints;

  std::vector<double> losses() const {
    std::vector<double> out;
    for (const StepRecord& r : records) out.push_back(r.loss);
    return out;
  }
};

struct Ran {
  Keep seen;  // by rank 0
  TrainSummary summary;
};

Ran train(const TrainOptions& options, const TrainRun& run, int ranks) {
  Ran out;
  run_ranks(ranks, [&](World& world) {
    Observer quiet;
    const TrainSummary summary =
        train_rank(world, options, run, world.rank() == 0 ? static_cast<Observer&>(out.seen) : quiet);
    if (world.rank() == 0) out.summary = summary;
  });
  return out;
}

TrainRun TrainerTest::half_done(TrainOptions options, int ranks) const {
  TrainRun run{.checkpoints = path("c"), .checkpoint_every = 10};
  options.steps = 10;
  EXPECT_EQ(train(options, run, ranks).seen.checkpoints, std::vector<std::int64_t>{10});
  run.resume = TrainRun::Resume::last;
  run.checkpoint_every = 0;
  return run;
}

// The losses of the last steps are functions of every weight, moment and residual before them.
std::vector<double> tail(const std::vector<double>& losses, std::size_t n) {
  return {losses.end() - static_cast<std::ptrdiff_t>(n), losses.end()};
}

TEST_F(TrainerTest, AResumedRunHasTheBitsOfOneThatDidNotStop) {
  const TrainOptions options = tiny();
  const Ran straight = train(options, {}, 3);
  ASSERT_EQ(straight.seen.records.size(), 20u);

  TrainRun run = half_done(options, 3);
  const Ran second = train(options, run, 3);
  EXPECT_EQ(second.seen.start.first_step, 10);
  EXPECT_EQ(second.seen.losses(), tail(straight.seen.losses(), 10));

  // Controls: what a checkpoint holds beside the weights matters.
  run.forget_optimizer = true;
  EXPECT_NE(train(options, run, 3).seen.losses(), tail(straight.seen.losses(), 10));
  run.forget_optimizer = false;
  run.forget_residuals = true;
  EXPECT_NE(train(options, run, 3).seen.losses(), tail(straight.seen.losses(), 10));
  run.forget_residuals = false;
}

TrainOptions tiny_tables() {
  TrainOptions o = tiny();
  o.model = "lm";
  o.sizes = model_options("lm", "tiny");
  o.sizes.samples = 20;
  o.tables.way = "embrace";
  return o;
}

// Rows that are delayed when a checkpoint is due are applied before it is taken.
TEST_F(TrainerTest, TablesGoOnWhereTheyWere) {
  const TrainOptions options = tiny_tables();
  const std::vector<double> rest = tail(train(options, {}, 3).seen.losses(), 10);
  TrainRun run = half_done(options, 3);
  EXPECT_EQ(train(options, run, 3).seen.losses(), rest);
  run.forget_optimizer = true;  // control
  EXPECT_NE(train(options, run, 3).seen.losses(), rest);
}

// In every step the rank that sends most sends what the formulas say, to the byte: what a table sends counts for
// the step whose batch it is for, though its delayed rows travel in the next one.
TEST_F(TrainerTest, TablesAreInTheRecordsAndInThePlan) {
  TrainOptions options = tiny_tables();
  options.scheme.name = "dense";
  for (const std::int64_t length : {12, 9}) {
    for (const std::int64_t steps : {1, 5}) {
      options.steps = steps;
      options.length = length;
      // Two ranks: blocks of dense gradients are equal, so the formula, of the longest ones, is of both ranks.
      const TrainSummary summary = train(options, {}, 2).summary;
      EXPECT_GT(summary.payload_bytes_per_step, 0);
      EXPECT_EQ(summary.payload_bytes_per_step, summary.formula_bytes_per_step) << length << ", " << steps;
    }
  }
  options.steps = 4;
  const Ran held = train(options, {}, 2);
  options.tables.way = "scheme";
  const Ran dense = train(options, {}, 2);
  EXPECT_LT(held.summary.payload_bytes_per_step, dense.summary.payload_bytes_per_step);
  EXPECT_GT(held.summary.formula_bytes_per_step, 0);
  EXPECT_LT(held.summary.formula_bytes_per_step, dense.summary.formula_bytes_per_step);
}

// What would let replicas drift apart in silence.
TEST_F(TrainerTest, RanksWithOtherOptionsAreToldSo) {
  TrainOptions options = tiny();
  options.steps = 2;
  const auto outcome = [&](const std::function<void(TrainOptions&)>& change) -> std::string {
    try {
      run_ranks(2, [&](World& world) {
        Observer quiet;
        TrainOptions mine = options;
        if (world.rank() == 1) change(mine);
        train_rank(world, mine, {}, quiet);
      });
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_EQ(outcome([](TrainOptions&) {}), "");  // control
  EXPECT_EQ(outcome([](TrainOptions& o) { o.threads = 2; }), "");
  const std::vector<std::function<void(TrainOptions&)>> changes = {
      [](TrainOptions& o) { o.seed = 9; },
      [](TrainOptions& o) { o.optimizer.lr *= 2; },
      [](TrainOptions& o) { o.optimizer.weight_decay = 0.5; },
      [](TrainOptions& o) { o.optimizer_from = "torch"; },
      [](TrainOptions& o) { o.lr_warmup = 1; },
      [](TrainOptions& o) { o.lr_schedule = "cosine"; },
      [](TrainOptions& o) { o.steps = 3; },
      [](TrainOptions& o) { o.warmup_steps = 1; },
      [](TrainOptions& o) { o.sizes.dropout = 0.3; },
      [](TrainOptions& o) { o.planned_link.hop_seconds = 1; },
      [](TrainOptions& o) { o.clip_norm = 1; },
      [](TrainOptions& o) { o.accumulate = 2; },
      [](TrainOptions& o) { o.scheme.density = 0.06; },
      [](TrainOptions& o) { o.scheme.codec = "coo"; },
      [](TrainOptions& o) { o.scheme.blocks = "contiguous"; },
      [](TrainOptions& o) { o.scheme.residual = ResidualRule::lres; },
      [](TrainOptions& o) { o.scheme.quotas = QuotaKind::proportional; },
      [](TrainOptions& o) { o.scheme.teams = 2; },
      [](TrainOptions& o) { o.scheme.min_compression = 3; },
      [](TrainOptions& o) { o.scheme.columns = 3; },
      [](TrainOptions& o) { o.clip_norm = 1, o.clip_local = true; }};
  for (std::size_t i = 0; i < changes.size(); ++i)
    EXPECT_NE(outcome(changes[i]).find("has another plan of"), std::string::npos)
        << i << ": " << outcome(changes[i]);
}

double farthest(const std::vector<double>& a, const std::vector<double>& b) {
  EXPECT_EQ(a.size(), b.size());
  double out = 0;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i)
    out = std::max(out, std::abs(a[i] - b[i]) / b[i]);
  return out;
}

// Where everything is sent, a checkpoint is all there is: ranks of another number add the same numbers in
// another order. Each of ten steps rounds a gradient by sqrt(n) u of its size, n = 2,600 terms of its chain of
// sums (replica_test.cc has the derivation), and the loss follows: of its own size it is off by no more than
// the gradients are, added up over the steps behind momentum, which counts each 1 / (1 - 0.5) times.
TEST_F(TrainerTest, OnAnotherNumberOfRanksADenseRunGoesOnWithinRounding) {
  TrainOptions options = tiny();
  options.scheme.name = "dense";
  options.optimizer = default_options("sgd");
  options.optimizer.lr = 0.1;
  options.optimizer.momentum = 0.5;
  const Ran straight = train(options, {}, 3);
  TrainRun run = half_done(options, 3);
  const double bound = 2 * 10 * std::sqrt(2600.0) * std::ldexp(1.0, -24);
  const std::vector<double> expected = tail(straight.seen.losses(), 10);
  for (const int ranks : {1, 2, 4, 6})
    EXPECT_LT(farthest(train(options, run, ranks).seen.losses(), expected), bound) << ranks;
  run.forget_optimizer = true;  // control
  EXPECT_GT(farthest(train(options, run, 2).seen.losses(), expected), bound);
}

// Parts of tables go to whoever holds those columns now. The bound is the one above without momentum.
TEST_F(TrainerTest, OnAnotherNumberOfRanksTablesGoOnWithinRounding) {
  TrainOptions options = tiny_tables();
  options.scheme.name = "dense";
  options.optimizer = default_options("sgd");
  options.optimizer.lr = 0.1;
  const std::vector<double> losses = train(options, {}, 3).seen.losses();
  const TrainRun run = half_done(options, 3);
  const double bound = 10 * std::sqrt(2600.0) * std::ldexp(1.0, -24);
  for (const int ranks : {1, 2, 4, 6})
    EXPECT_LT(farthest(train(options, run, ranks).seen.losses(), tail(losses, 10)), bound) << ranks;
  // Control: the ten steps before, which other weights had.
  EXPECT_GT(farthest({losses.begin(), losses.begin() + 10}, tail(losses, 10)), bound);
}

// What compression left behind, of all ranks together: of each parameter the sums, and those of magnitudes.
struct LeftBehind {
  std::vector<double> sums, magnitudes;
  void add(std::span<const float> values) {
    sums.resize(std::max(sums.size(), values.size()));
    magnitudes.resize(sums.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      sums[i] += values[i];
      magnitudes[i] += std::abs(values[i]);
    }
  }
};
using AllLeftBehind = std::map<std::string, LeftBehind>;

AllLeftBehind left_behind(const Checkpoint& checkpoint) {
  AllLeftBehind out;
  for (std::size_t r = 0; r < checkpoint.rows().size(); ++r) {
    const StateSource::Saved& saved = checkpoint.rows()[r];
    if (saved.row.key.kind != "residual" || saved.zeros) continue;
    std::vector<float> values(saved.row.num_bytes() / sizeof(float));
    checkpoint.read(r, 0, std::as_writable_bytes(std::span(values)));
    out[saved.row.key.name].add(values);
  }
  return out;
}

// Of ranks that went on from the checkpoint of step 5 and have not trained yet; or began anew.
AllLeftBehind after_loading(const TrainOptions& options, const std::string& checkpoints, int ranks,
                            bool forget) {
  AllLeftBehind out;
  std::mutex mutex;
  run_ranks(ranks, [&](World& world) {
    const Checkpoint checkpoint(checkpoints, 5);
    const std::unique_ptr<Model> model =
        make_model(options.model, model_sizes(options, *open_data(data_options(options)).source));
    Replica replica(world.engine(), world.comm(), *model, replica_options(options));
    const std::string owner(replica.parallel().name());
    if (!forget) replica.registry().load(checkpoint, {.owners = {owner}, .elsewhere = {}});
    const StateSnapshot mine = replica.registry().save(world.rank(), world.size(), owner);
    const std::lock_guard lock(mutex);
    for (const StateValue& v : mine.rows) {
      if (v.row.key.kind == "residual") out[v.row.key.name].add(v.values<float>());
    }
  });
  return out;
}

TEST_F(TrainerTest, OnAnotherNumberOfRanksNothingThatWasLeftBehindIsLost) {
  TrainOptions options = tiny();
  options.steps = 5;
  const TrainRun run{.checkpoints = path("c"), .checkpoint_every = 5};
  train(options, run, 3);
  const AllLeftBehind before = left_behind(Checkpoint(run.checkpoints, 5));
  ASSERT_FALSE(before.empty());
  // Each rank's values are multiplied by ranks / 3, and a rank that takes over from two adds theirs, in float32: of
  // each value two roundings.
  const auto num_lost = [&](AllLeftBehind after, int ranks) {
    std::int64_t lost = 0;
    for (const auto& [name, b] : before) {
      std::vector<double>& now = after[name].sums;
      now.resize(b.sums.size());
      for (std::size_t i = 0; i < now.size(); ++i)
        lost +=
            std::abs(now[i] / ranks - b.sums[i] / 3) <= 2.001 * std::ldexp(b.magnitudes[i] / 3, -24) ? 0 : 1;
    }
    return lost;
  };
  for (const int ranks : {2, 4})
    EXPECT_EQ(num_lost(after_loading(options, run.checkpoints, ranks, false), ranks), 0) << ranks;
  EXPECT_GT(num_lost(after_loading(options, run.checkpoints, 2, true), 2), 1000);  // control
  EXPECT_GT(num_lost(after_loading(options, run.checkpoints, 2, false), 3),
            1000);  // control: of another weight
}

TEST_F(TrainerTest, CheckpointsInBetweenChangeNothing) {
  TrainOptions options = tiny();
  options.steps = 9;
  options.accumulate = 2;
  options.clip_norm = 0.5;
  options.warmup_steps = 6;
  options.lr_schedule = "cosine";
  options.lr_warmup = 3;
  const Ran plain = train(options, {}, 2);
  const TrainRun run{.checkpoints = path("c"), .checkpoint_every = 4, .keep_last = 2};
  const Ran saved = train(options, run, 2);
  EXPECT_EQ(saved.seen.checkpoints, (std::vector<std::int64_t>{4, 8, 9}));
  EXPECT_EQ(saved.seen.losses(), plain.seen.losses());
  EXPECT_FALSE(fs::exists(path("c/step-4")));
  EXPECT_TRUE(fs::exists(path("c/step-8")));
  EXPECT_EQ(saved.summary.checkpoint_step, 9);

  TrainRun again = run;
  again.resume = TrainRun::Resume::last;
  const Ran nothing = train(options, again, 2);
  EXPECT_EQ(nothing.summary.steps, 0);
}

TEST_F(TrainerTest, RecordsSayWhatHappened) {
  TrainOptions options = tiny();
  options.steps = 8;
  options.warmup_steps = 4;
  options.clip_norm = 1;
  const Ran ran = train(options, {}, 2);
  ASSERT_EQ(ran.seen.records.size(), 8u);
  for (std::size_t i = 0; i < 8; ++i) {
    const StepRecord& r = ran.seen.records[i];
    EXPECT_EQ(r.step, static_cast<std::int64_t>(i));
    EXPECT_EQ(r.tokens, 6 * 12);
    EXPECT_EQ(r.lr, lr_at(options, r.step));
    EXPECT_EQ(r.density, density_at(options, r.step));
    EXPECT_GT(r.seconds, 0);
    EXPECT_GE(r.seconds, r.waited_seconds);
    EXPECT_GT(r.payload_bytes, 0u);
    EXPECT_GT(r.gradient_norm, 0);
  }
  // The density that is asked for is the one that is used: bytes fall with it.
  EXPECT_GT(ran.seen.records[0].payload_bytes, 2 * ran.seen.records[7].payload_bytes);
  EXPECT_EQ(ran.summary.steps, 8);
  EXPECT_EQ(ran.summary.first_loss, ran.seen.records.front().loss);
  EXPECT_EQ(ran.summary.last_loss, ran.seen.records.back().loss);
  EXPECT_GT(ran.summary.tokens_per_second, 0);
  EXPECT_LE(ran.summary.payload_bytes_per_step, static_cast<double>(ran.summary.wire_bytes.value()));
}

// One dense bucket: what is sent is the formula.
TEST_F(TrainerTest, DenseBytesAreTheFormula) {
  TrainOptions options = tiny();
  options.steps = 3;
  options.scheme.name = "dense";
  options.scheme.buckets.bucket_bytes = 64 << 20;
  const Ran ran = train(options, {}, 2);
  EXPECT_EQ(ran.summary.payload_bytes_per_step, ran.summary.formula_bytes_per_step);
}

std::string failure(const TrainOptions& options, const TrainRun& run) {
  try {
    train(options, run, 2);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST_F(TrainerTest, FailuresAreSentences) {
  TrainOptions options = tiny();
  options.optimizer = default_options("sgd");
  options.optimizer.lr = 1e30;
  const std::string text = failure(options, {});
  EXPECT_NE(text.find("step "), std::string::npos) << text;
  EXPECT_NE(text.find("rank "), std::string::npos) << text;

  const TrainRun missing{.checkpoints = path("none"), .resume = TrainRun::Resume::last};
  EXPECT_NE(failure(tiny(), missing).find("no sound checkpoint"), std::string::npos);

  TrainOptions one = tiny();
  one.steps = 1;
  TrainRun run{.checkpoints = path("c"), .checkpoint_every = 1};
  EXPECT_EQ(failure(one, run), "");
  run.resume = TrainRun::Resume::last;
  TrainOptions other = tiny();
  other.sizes.width = 64;
  EXPECT_NE(failure(other, run).find("another model"), std::string::npos) << failure(other, run);
  other = tiny();
  other.model = "lm";
  EXPECT_NE(failure(other, run).find("model 'gpt', not 'lm'"), std::string::npos) << failure(other, run);
}

TEST(TrainOptionsTest, SchedulesAndChecks) {
  TrainOptions o;
  o.optimizer.lr = 1;
  o.steps = 11;
  EXPECT_EQ(lr_at(o, 0), 1);
  EXPECT_EQ(lr_at(o, 10), 1);
  o.lr_warmup = 4;
  EXPECT_EQ(lr_at(o, 0), 0.25);
  EXPECT_EQ(lr_at(o, 3), 1);
  o.lr_schedule = "cosine";
  o.lr_final = 0.2;
  EXPECT_EQ(lr_at(o, 4), 1);
  EXPECT_DOUBLE_EQ(lr_at(o, 7), 0.6);
  EXPECT_DOUBLE_EQ(lr_at(o, 10), 0.2);

  EXPECT_EQ(density_at(o, 0), 0.01);
  o.warmup_steps = 2;
  EXPECT_EQ(density_at(o, 0), 0.25);
  EXPECT_DOUBLE_EQ(density_at(o, 1), 0.05);
  EXPECT_EQ(density_at(o, 2), 0.01);

  EXPECT_EQ(why_updates_wait(o), "");
  o.clip_norm = 1;
  EXPECT_EQ(why_updates_wait(o), "clip-norm is of all gradients");
  o.clip_local = true;
  EXPECT_EQ(why_updates_wait(o), "");
  o.find_unused = o.skip_not_finite = true;
  EXPECT_NE(why_updates_wait(o).find("find-unused"), std::string::npos);

  EXPECT_EQ(data_parallel_options(o).scheme.quotas, QuotaKind::adaptive);
  o.scheme.quotas = QuotaKind::proportional;
  EXPECT_EQ(data_parallel_options(o).scheme.quotas, QuotaKind::proportional);

  const auto refused = [](const char* part, auto change) {
    TrainOptions bad;
    change(bad);
    try {
      check_train(bad, 4);
      ADD_FAILURE() << part;
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  check_train(TrainOptions{}, 4);
  refused("did you mean 'spardl'", [](TrainOptions& b) { b.scheme.name = "spardel"; });
  refused("did you mean 'gpt'", [](TrainOptions& b) { b.model = "gtp"; });
  for (const char* way : {"embrace", "dense", "scheme/embedding.weight=hashed"}) {
    refused("clip-local goes with tables of way 'scheme'", [way](TrainOptions& b) {
      b.tables.way = way;
      b.clip_local = true;
      b.clip_norm = 1;
    });
    refused("momentum-correction goes with tables of way 'scheme'", [way](TrainOptions& b) {
      b.tables.way = way;
      b.optimizer = default_options("sgd");
      b.scheme.momentum_correction = 0.9;
    });
  }
  refused("density", [](TrainOptions& b) { b.scheme.density = 0; });
  refused("density", [](TrainOptions& b) { b.scheme.density = std::nan(""); });
  refused("teams", [](TrainOptions& b) { b.scheme.teams = 3; });
  refused("steps", [](TrainOptions& b) { b.steps = 0; });
  refused("length", [](TrainOptions& b) { b.length = 1000; });
}

}  // namespace
}  // namespace weft
