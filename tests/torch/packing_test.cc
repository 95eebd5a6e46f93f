// Experts that are dealt to other ranks between two steps: training goes on as if they had always been there.
#include "experts/packing.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <map>
#include <mutex>

#include "experts/experts.h"
#include "state/checkpoint.h"
#include "state/registry.h"
#include "step/strategies.h"
#include "torch/experts_toy.h"
#include "transports/decorator.h"
#include "weft/error.h"
#include "weft/world.h"
#include "weft_torch/train/replica.h"
#include "weft_torch/train/trainer.h"
#include "workload/job_strategies.h"
#include "workload/train_options.h"

namespace weft {
namespace {

using torch_test::alone;
using torch_test::kMoeSeed;
using torch_test::Moe;
using torch_test::moe_batch;
using torch_test::moe_model;
using torch_test::moe_share;
using torch_test::Trained;

// Behind so many steps experts are dealt to so many ranks.
using Schedule = std::map<int, int>;

// What is spoiled behind every move, as a control; and what is looked at.
struct Course {
  int ep = 8;  // at the start
  Schedule schedule;
  std::string scheme = "dense";
  std::string optimizer_from = "weft";
  std::function<void(StateRegistry& registry)> spoil;
  std::function<void(int step, int ep, Replica& replica, World& world)> look;  // settled, behind each step
  std::function<void(const Replica::Moved& moved, int rank)> moved;
  const std::vector<StateSnapshot>* from = nullptr;
  int first = 0;
};

ReplicaOptions options_of(const Moe& t, const Course& course) {
  ReplicaOptions options;
  options.optimizer = t.optimizer;
  options.optimizer_from = course.optimizer_from;
  options.clip_norm = t.clip_norm;
  options.parallel.scheme.name = course.scheme;
  options.parallel.scheme.density = 0.05;
  options.parallel.scheme.buckets.bucket_bytes = 4 << 10;
  options.parallel.scheme.buckets.dense_below = 64;
  return options;
}

struct Outcome {
  std::vector<Trained> ranks;
  std::vector<StateSnapshot> state;
  int ep = 1;
};

Outcome train(const Moe& t, const Course& course) {
  Outcome out;
  out.ranks.resize(static_cast<std::size_t>(t.world));
  out.state.resize(out.ranks.size());
  out.ep = course.ep;
  for (const auto& [step, ep] : course.schedule) out.ep = ep;
  run_ranks(t.world, [&](World& world) {
    at::set_num_threads(1);
    world.plan_by({});
    const auto me = static_cast<std::size_t>(world.rank());
    const std::unique_ptr<Model> model = moe_model(t, course.ep, world.rank());
    Replica replica(world.engine(), world.comm(), *model, options_of(t, course));
    if (course.from != nullptr) replica.registry().load(*course.from, world.rank(), world.size());
    Trained& mine = out.ranks[me];
    const auto take = [&](const std::optional<double>& loss) {
      if (loss) mine.losses.push_back(*loss);
    };
    int ep = course.ep;
    for (int step = course.first; step < t.steps; ++step) {
      take(replica
               .step(moe_share(moe_batch(*model, t, step), t, world.rank()), {.seed = kMoeSeed, .step = step})
               .last_loss);
      const auto change = course.schedule.find(step + 1);
      if (change == course.schedule.end() && !course.look) continue;
      take(replica.settle().last_loss);
      if (course.look) course.look(step, ep, replica, world);
      if (change == course.schedule.end()) continue;
      ep = change->second;
      const Replica::Moved moved = replica.lay_out_experts(ep);
      if (course.moved) course.moved(moved, world.rank());
      if (course.spoil) course.spoil(replica.registry());
    }
    take(replica.settle().last_loss);
    out.state[me] = replica.registry().save(world.rank(), world.size());
    for (const Parameter& p : model->parameters()) mine.parameters.push_back(p.tensor.detach().clone());
  });
  return out;
}

// All experts in one, of the ranks of the first group.
Trained whole_of(const Outcome& o, const Moe& t) {
  Trained out = o.ranks.front();
  const std::unique_ptr<Model> like = moe_model(t, o.ep, 0);
  for (std::size_t i = 0; i < out.parameters.size(); ++i) {
    if (like->shape().parameters[i].of_experts == 0) continue;
    std::vector<torch::Tensor> parts;
    for (int r = 0; r < o.ep; ++r) parts.push_back(o.ranks[static_cast<std::size_t>(r)].parameters[i]);
    out.parameters[i] = torch::cat(parts);
  }
  return out;
}

double far(const Trained& a, const Trained& b) {
  return std::max(torch_test::distance(a, b), torch_test::loss_distance(a, b));
}

// Of all ranks' rows of a kind, added up or side by side, by parameter: in double.
std::map<std::string, std::vector<double>> values_of(const std::vector<StateSnapshot>& state,
                                                     const std::string& owner, const std::string& kind) {
  std::map<std::string, std::vector<double>> out;
  for (const StateSnapshot& rank : state) {
    for (const StateValue& value : rank.rows) {
      const StateRow& row = value.row;
      if (row.key.owner != owner || row.key.kind != kind) continue;
      std::vector<double>& all = out[row.key.name];
      all.resize(static_cast<std::size_t>(row.shard.tensor_elements()));
      if (value.bytes.empty()) continue;
      const bool sum = row.rule == LayoutRule::sum;
      const auto run = [&](std::int64_t from, std::int64_t to, std::int64_t count) {
        for (std::int64_t i = 0; i < count; ++i) {
          const auto at = static_cast<std::size_t>(from + i);
          const double v =
              row.dtype == DType::float32 ? value.values<float>()[at] : value.values<double>()[at];
          double& place = all[static_cast<std::size_t>(to + i)];
          place = sum ? place + v : v;
        }
      };
      for_each_run(row.shard, Shard::whole(row.shard.shape), run);
    }
  }
  return out;
}

double far(const std::map<std::string, std::vector<double>>& a,
           const std::map<std::string, std::vector<double>>& b) {
  EXPECT_EQ(a.size(), b.size());
  double largest = 0;
  for (const auto& [name, values] : a) {
    double norm = 0, difference = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double other = b.at(name)[i];
      norm += other * other;
      difference += (values[i] - other) * (values[i] - other);
    }
    largest = std::max(largest, std::sqrt(difference / (norm + 1e-60)));
  }
  return largest;
}

Moe some(double capacity = 1.0) {
  Moe t;
  t.experts.capacity_factor = capacity;
  t.optimizer.lr = 0.3;
  t.optimizer.momentum = 0.9;
  return t;
}

Moe with_adam(double capacity = 1.0) {
  Moe t = some(capacity);
  t.optimizer = default_options("adam");
  t.optimizer.eps = 1e-4;  // else gradients that are nothing but rounding are divided by themselves
  return t;
}

constexpr double kTolerance = 1e-12;  // of 8 steps; see experts_test.cc

// Rows of experts' moments, or residuals, as if they had been left behind.
std::function<void(StateRegistry&)> forgets(const std::string& kind) {
  return [kind](StateRegistry& registry) {
    for (const LiveRow& row : registry.rows()) {
      const bool cut = row.row.shard.shape.size() > 1 && row.row.shard.shape.front() == 8;
      if (row.row.key.kind == kind && cut) row.write({});
    }
  };
}

TEST(PackedExperts, TrainAsIfTheyHadNeverMoved) {
  const Schedule schedule{{2, 4}, {4, 2}, {6, 4}};  // packing 1, 2, 4, 2
  for (const double capacity : {1.0, 0.0}) {
    for (const Moe& t : {some(capacity), with_adam(capacity)}) {
      const Trained reference = alone(t);
      const Outcome packed = train(t, {.schedule = schedule});
      EXPECT_LT(far(whole_of(packed, t), reference), kTolerance) << t.optimizer.name << ", " << capacity;
      const Outcome never = train(t, {});
      for (const Moment& moment : moments_of(t.optimizer))
        EXPECT_LT(far(values_of(packed.state, "optimizer", moment.name),
                      values_of(never.state, "optimizer", moment.name)),
                  1e-10)
            << moment.name;
    }
  }
}

// What the comparison would see.
TEST(PackedExperts, MovesThatLoseSomethingAreFarAway) {
  Moe t = with_adam();
  t.steps = 6;
  const Schedule schedule{{2, 4}, {4, 2}};
  const Trained reference = alone(t);
  ASSERT_LT(far(whole_of(train(t, {.schedule = schedule}), t), reference), kTolerance);
  for (const char* kind : {"exp_avg", "exp_avg_sq"}) {
    const Outcome spoiled = train(t, {.schedule = schedule, .spoil = forgets(kind)});
    EXPECT_GT(far(whole_of(spoiled, t), reference), 1e-7) << kind;
  }
  Moe wrong = some();
  wrong.steps = 6;
  const Outcome packed = train(wrong, {.schedule = schedule});
  ASSERT_LT(far(whole_of(packed, wrong), alone(wrong)), kTolerance);
  wrong.expert_scale = 2;  // divided by their replicas, not by all ranks
  EXPECT_GT(far(whole_of(packed, wrong), alone(wrong)), 1e-7);
}

TEST(PackedExperts, FiftyStepsOfSgd) {
  Moe t = some();
  t.optimizer.lr = 0.1;
  t.optimizer.momentum = 0;
  t.steps = 50;
  t.sequences = 8;
  const Outcome packed = train(t, {.schedule = {{10, 4}, {22, 2}, {35, 4}}});
  const Outcome never = train(t, {});
  EXPECT_LT(far(whole_of(packed, t), whole_of(never, t)), 1e-10);
}

TEST(PackedExperts, ReplicasHaveTheSameBitsBehindEveryStep) {
  Moe t = with_adam(0);
  std::mutex mutex;
  std::map<std::pair<int, int>, std::pair<int, std::vector<torch::Tensor>>> seen;  // by step and rank
  const auto look = [&](int step, int ep, Replica& replica, World& world) {
    std::vector<torch::Tensor> values = replica.values();
    const std::lock_guard lock(mutex);
    seen[{step, world.rank()}] = {ep, std::move(values)};
  };
  train(t, {.schedule = {{2, 4}, {4, 2}, {6, 1}}, .look = look});
  int compared = 0;
  for (const auto& [at, mine] : seen) {
    const auto other = seen.find({at.first, at.second - mine.first});  // the replica before it
    if (other == seen.end()) continue;
    for (std::size_t i = 0; i < mine.second.size(); ++i) {
      ASSERT_TRUE(torch::equal(mine.second[i], other->second.second[i])) << "step " << at.first;
      ++compared;
    }
  }
  EXPECT_GT(compared, 500);
}

TEST(PackedExperts, WithClippingAndTorchsOptimizers) {
  Moe t = some();
  t.world = 4;
  t.steps = 6;
  t.clip_norm = 0.05;
  const Schedule schedule{{2, 2}, {4, 1}};
  EXPECT_LT(far(whole_of(train(t, {.ep = 4, .schedule = schedule}), t), alone(t)), kTolerance);
  for (const char* name : {"sgd", "adam", "adamw", "adagrad"}) {
    Moe other = with_adam();
    other.world = 4;
    other.steps = 6;
    other.optimizer = default_options(name);
    other.optimizer.eps = 1e-4;
    if (other.optimizer.name == "sgd") other.optimizer.momentum = 0.9;
    const Course course{.ep = 4, .schedule = schedule, .optimizer_from = "torch"};
    EXPECT_LT(far(whole_of(train(other, course), other), alone(other)), kTolerance) << name;
  }
}

// Saved with one packing, it goes on with any other.
TEST(PackedExperts, WhatWasSavedGoesOnWithAnyPacking) {
  Moe t = with_adam(0);
  t.world = 4;
  t.steps = 6;
  Trained rest = alone(t);
  rest.losses.erase(rest.losses.begin(), rest.losses.begin() + 4);
  Moe half = t;
  half.steps = 4;
  const Outcome saved = train(half, {.ep = 4, .schedule = {{2, 2}}});
  for (const int ep : {1, 2, 4}) {
    const Outcome on =
        train(t, {.ep = ep, .schedule = {{5, ep == 4 ? 2 : 4}}, .from = &saved.state, .first = 4});
    EXPECT_LT(far(whole_of(on, t), rest), kTolerance) << ep;
  }
}

// Beside sparse gradients: what replicas that leave have left behind goes to those that stay.
TEST(PackedExperts, ResidualsAreConserved) {
  Moe t = some();
  t.type = torch::kFloat32;
  const auto left = [](const std::vector<StateSnapshot>& state) {
    return values_of(state, "expert_parallel", "residual");
  };
  for (const auto& [from, to] : {std::pair{4, 2}, {2, 4}, {4, 8}, {1, 8}, {2, 1}}) {
    Course course{.ep = from, .schedule = {{t.steps, to}}, .scheme = "spardl"};
    std::vector<StateSnapshot> before(8);
    course.look = [&](int, int, Replica& replica, World& world) {
      before[static_cast<std::size_t>(world.rank())] = replica.registry().save(world.rank(), world.size());
    };
    const std::vector<StateSnapshot> after = train(t, course).state;
    // Each sum rounds at most eight times.
    EXPECT_LT(far(left(after), left(before)), 8 * 6e-8) << from << " to " << to;
    double mass = 0;
    for (const auto& [name, values] : left(before)) {
      for (const double value : values) mass += std::abs(value);
    }
    EXPECT_GT(mass, 0);
    // All that is no expert's has the bits that it had.
    for (std::size_t r = 0; r < after.size(); ++r) {
      for (const StateValue& value : before[r].rows) {
        if (value.row.key.owner != "data_parallel") continue;
        const StateValue* const now = after[r].find(value.row.key.kind, value.row.key.name);
        ASSERT_NE(now, nullptr);
        EXPECT_EQ(*now, value) << describe(value.row.key);
      }
    }
    course.spoil = [&](StateRegistry& registry) {  // the residual of a replica that leaves is dropped
      for (const LiveRow& row : registry.rows()) {
        if (row.row.key.owner == "expert_parallel" && row.row.key.kind == "residual" &&
            row.row.peers.rank == 0)
          row.write({});
      }
    };
    EXPECT_GT(far(left(train(t, course).state), left(before)), 1e-3);
  }
}

// The density of a warm-up is that of experts' gradients too, and stays theirs where they move: with 1 nothing is
// left behind, and all that was is sent.
TEST(PackedExperts, AnotherDensityIsTheirsToo) {
  Moe t = some();
  t.type = torch::kFloat32;
  t.steps = 7;
  std::vector<std::vector<double>> mass(8, std::vector<double>(static_cast<std::size_t>(t.steps)));
  Course course{.ep = 4, .schedule = {{4, 2}}, .scheme = "spardl"};
  course.look = [&](int step, int, Replica& replica, World& world) {
    const std::vector<StateSnapshot> state{replica.registry().save(world.rank(), world.size())};
    for (const auto& [name, values] : values_of(state, "expert_parallel", "residual")) {
      for (const double value : values)
        mass[static_cast<std::size_t>(world.rank())][static_cast<std::size_t>(step)] += std::abs(value);
    }
    if (step == 1) replica.set_density(1);
    if (step == 5) replica.set_density(0.05);
  };
  train(t, course);
  for (const std::vector<double>& behind : mass) {
    EXPECT_GT(behind[1], 0);
    for (const std::size_t step : {2U, 3U, 4U, 5U})
      EXPECT_EQ(behind[step], 0) << step;  // from step 4 on elsewhere
    EXPECT_GT(behind[6], 0);
  }
}

// Of every index that a rank will hold and did not: parameters and both moments, once.
TEST(PackedExperts, BytesEqualTheFormula) {
  Moe t = with_adam();
  t.steps = 2;
  const std::int64_t expert = 2 * 12 * 48 + 48 + 12;  // values of one
  for (const auto& [from, to] : {std::pair{8, 4}, {4, 2}, {2, 4}, {8, 1}, {1, 8}, {4, 8}}) {
    std::int64_t all = 0, most = 0;
    for (int r = 0; r < t.world; ++r) {
      std::int64_t lacks = 0;
      for (int e = 0; e < 8; ++e) {
        const bool had = e / (8 / from) == r % from, has = e / (8 / to) == r % to;
        lacks += has && !had ? 1 : 0;
      }
      all += lacks;
      most = std::max(most, lacks);
    }
    std::atomic<std::int64_t> sent = 0;
    const auto moved = [&](const Replica::Moved& m, int) {
      EXPECT_EQ(m.sent_bytes, m.planned_bytes);
      EXPECT_EQ(m.most_bytes, most * expert * 3 * 8);
      sent += static_cast<std::int64_t>(m.sent_bytes);
    };
    train(t, {.ep = from, .schedule = {{1, to}}, .moved = moved});
    EXPECT_EQ(sent, all * expert * 3 * 8) << from << " to " << to;
  }
}

TEST(PackedExperts, WhatCannotBeIsRefused) {
  Moe t = some();
  t.world = 2;
  t.steps = 1;
  const auto refused = [&](int ep) {
    std::string out;
    try {
      train(t, {.ep = 2, .schedule = {{1, ep}}});
    } catch (const UsageError& error) {
      out = error.what();
    }
    return out;
  };
  EXPECT_NE(refused(3).find("no whole number of such groups"), std::string::npos);
  EXPECT_NE(refused(0).find("no whole number of such groups"), std::string::npos);
}

// The transport of a rank, which is killed at its first message once it is told to.
class Killed final : public Decorator {
 public:
  Killed(Transport& inner, const std::atomic<bool>& told) : Decorator(inner), told_(told) {}
  void post(SendRecord& send) noexcept override {
    if (told_ && !failure_) {
      failure_ = std::make_exception_ptr(TransportError(TransportError::Kind::closed, -1, "it was killed"));
      inner_.close("it was killed");
    }
    if (!failure_) return inner_.post(send);
    if (send.observer != nullptr) send.observer->sent(send);
    send.complete(failure_);
  }
  void post(RecvRecord& recv) noexcept override { failure_ ? recv.complete(failure_) : inner_.post(recv); }
  std::exception_ptr failure() const override { return failure_ ? failure_ : inner_.failure(); }

 private:
  const std::atomic<bool>& told_;
  std::exception_ptr failure_;
};

// A rank is killed while experts move: the others end with an error, and the job goes on from its last
// checkpoint, which has one layout or the other.
TEST(PackedExperts, ARankThatDiesWhileTheyMoveLeavesTheCheckpoint) {
  Moe t = with_adam(0);
  t.world = 4;
  t.steps = 6;
  const std::filesystem::path dir = std::filesystem::path(testing::TempDir()) / "weft_packing_test";
  std::filesystem::remove_all(dir);
  const CheckpointInfo info{.step = 3, .seed = 1, .metadata = {}, .extra = {}};
  begin_checkpoint(dir, 3);
  std::atomic<bool> told = false;
  std::atomic<int> ended = 0;
  RunOptions run;
  run.decorate = [&](Transport& inner) -> std::unique_ptr<Transport> {
    if (inner.rank() == 2) return std::make_unique<Killed>(inner, told);
    return std::make_unique<Decorator>(inner);
  };
  const auto body = [&](World& world) {
    at::set_num_threads(1);
    const std::unique_ptr<Model> model = moe_model(t, 4, world.rank());
    Replica replica(world.engine(), world.comm(), *model, options_of(t, {}));
    for (int step = 0; step < 3; ++step)
      replica.step(moe_share(moe_batch(*model, t, step), t, world.rank()), {.seed = kMoeSeed, .step = step});
    replica.settle();
    write_shards(dir, info, replica.registry(), world.rank(), world.size());
    world.barrier();
    if (world.rank() == 2) told = true;
    try {
      replica.lay_out_experts(2);
      ADD_FAILURE() << "rank " << world.rank() << " has its experts, and rank 2 was dead";
    } catch (...) {
      EXPECT_EQ(model->options().experts.ranks, 4);  // it has not begun to change
      ++ended;
      throw;
    }
  };
  EXPECT_THROW(run_ranks(t.world, run, body), Error);
  EXPECT_EQ(ended, 4);
  commit_checkpoint(dir, info, t.world);
  Trained rest = alone(t);
  for (const int ep : {4, 2}) {  // as it was, and as it was to be
    std::vector<Trained> ranks(4);
    run_ranks(t.world, [&](World& world) {
      at::set_num_threads(1);
      const std::unique_ptr<Model> model = moe_model(t, ep, world.rank());
      Replica replica(world.engine(), world.comm(), *model, options_of(t, {}));
      replica.registry().load(Checkpoint(dir, 3));
      for (int step = 3; step < t.steps; ++step)
        replica.step(moe_share(moe_batch(*model, t, step), t, world.rank()),
                     {.seed = kMoeSeed, .step = step});
      replica.settle();
      for (const Parameter& p : model->parameters())
        ranks[static_cast<std::size_t>(world.rank())].parameters.push_back(p.tensor.detach().clone());
    });
    Outcome on{.ranks = ranks, .state = {}, .ep = ep};
    EXPECT_LT(torch_test::distance(whole_of(on, t), rest), kTolerance) << ep;
  }
  std::filesystem::remove_all(dir);
}

// ---- a run that packs by itself ----

class Keep final : public Observer {
 public:
  void step(const StepRecord& record) override { records.push_back(record); }
  void packing(const PackingChange& change) override { changes.push_back(change); }
  std::vector<StepRecord> records;
  std::vector<PackingChange> changes;
};

struct Ran {
  Keep seen;  // by rank 0
  TrainSummary summary;
};

TrainOptions tiny_moe(const std::string& packing) {
  TrainOptions o;
  o.model = "gpt-moe";
  o.sizes = model_options("gpt-moe", "tiny");
  o.sizes.width = 16;
  o.sizes.experts.ranks = 4;
  o.sizes.experts.packing = packing;
  o.data.kind = "synthetic";
  o.data.synthetic_tokens = 40'000;
  o.global_batch = 64;
  o.length = 32;
  o.steps = 13;
  o.scheme.name = "dense";
  return o;
}

Ran run_trainer(const TrainOptions& options, const TrainRun& run, double rate) {
  Ran out;
  RunOptions how;
  if (rate > 0) how.link = EmulatedLink{.bytes_per_second = rate, .latency_seconds = 1e-4};
  run_ranks(4, how, [&](World& world) {
    Observer quiet;
    const TrainSummary summary =
        train_rank(world, options, run, world.rank() == 0 ? static_cast<Observer&>(out.seen) : quiet);
    if (world.rank() == 0) out.summary = summary;
  });
  return out;
}

// A link that is so slow that tokens take far longer than experts: packing 2 behind step 10. Losses are
// those of a run that never packs, and a run that is resumed has the packing of its checkpoint.
TEST(PackedTraining, PacksByItselfAndGoesOnFromItsCheckpoint) {
  const std::filesystem::path dir = std::filesystem::path(testing::TempDir()) / "weft_packed_training";
  std::filesystem::remove_all(dir);
  TrainRun run{.checkpoints = dir.string(), .checkpoint_every = 12};
  const Ran packed = run_trainer(tiny_moe("auto"), run, 2e6);
  ASSERT_GE(packed.seen.changes.size(), 1U);
  EXPECT_EQ(packed.seen.changes[0].steps, 10);
  EXPECT_EQ(packed.seen.changes[0].packing, 2);
  EXPECT_GT(packed.seen.changes[0].bytes, 0U);
  EXPECT_EQ(packed.seen.records[9].packing, 1);
  EXPECT_EQ(packed.seen.records[10].packing, 2);
  EXPECT_EQ(packed.summary.packings.size(), 2U);  // the first is that of the start
  const Ran never = run_trainer(tiny_moe("1"), {}, 0);
  ASSERT_EQ(packed.seen.records.size(), never.seen.records.size());
  for (std::size_t i = 0; i < never.seen.records.size(); ++i)
    EXPECT_NEAR(packed.seen.records[i].loss, never.seen.records[i].loss, 1e-4) << i;
  TrainOptions longer = tiny_moe("auto");
  longer.steps = 15;
  run.resume = TrainRun::Resume::last;
  run.checkpoint_every = 0;
  const Ran on = run_trainer(longer, run, 0);
  EXPECT_EQ(on.summary.packings.front().packing, 2);
  EXPECT_EQ(on.seen.records.front().step, 13);
  std::filesystem::remove_all(dir);
}

// What its flags say and cannot be is a sentence before anything is trained.
TEST(PackedTraining, AMemoryThatIsTooSmallIsRefused) {
  TrainOptions options = tiny_moe("auto");
  options.sizes.experts.packing_memory = 1000;
  try {
    run_trainer(options, {}, 0);
    ADD_FAILURE();
  } catch (const Error& error) {  // of the rank itself, or of one that was told why others left
    EXPECT_NE(std::string(error.what()).find("of packing-memory"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace weft
