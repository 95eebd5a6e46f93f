// All four systems in one step, with a real model: experts that ranks share, a table of which rows travel, stages whose
// gradients travel as factors, thin or sparse gradients; bytes of each by its formula, and runs that go on.
#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <set>
#include <tuple>

#include "data_parallel/formula.h"
#include "pipeline/pipeline.h"
#include "torch/mesh_toy.h"
#include "transports/decorator.h"
#include "weft/trace.h"

namespace weft {
namespace {

using namespace mesh_test;

Staged all_four(const char* scheme, bool tied) {
  Staged t = with({.model = "gpt-moe", .stage = {.stages = 2}, .dp = 4, .type = torch::kFloat32});
  t.ep = 4;
  t.scheme = scheme;
  t.backward = {.columns = 2};
  if (!tied) t.tables = "embrace";
  return t;
}

// What a rank has posted, counted in front of its transport: by group, slot and step.
class Posted {
 public:
  using Key = std::tuple<std::uint64_t, std::uint32_t, std::uint32_t>;
  void add(const Identity& id, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    bytes_[{id.group, id.slot, id.step}] += bytes;
  }
  std::uint64_t of(std::uint64_t group, std::uint32_t slot, std::uint32_t step) {
    const std::lock_guard lock(mutex_);
    return bytes_[{group, slot, step}];
  }

 private:
  std::mutex mutex_;
  std::map<Key, std::uint64_t> bytes_;
};

class Counting final : public Decorator {
 public:
  Counting(Transport& inner, Posted& posted) : Decorator(inner), posted_(posted) {}
  using Decorator::post;
  void post(SendRecord& send) noexcept override {
    posted_.add(send.id, send.payload.size());
    inner_.post(send);
  }

 private:
  Posted& posted_;
};

// Whoever sums gradients.
std::set<DataParallel*> sums_of(const JobStrategies& job) {
  std::set<DataParallel*> out;
  for (int p = 0; p < static_cast<int>(job.all().shape().parameters.size()); ++p)
    out.insert(job.place(p).parallel);
  out.erase(nullptr);  // of tables of which rows travel
  return out;
}

// What the ranks have sent in a step, strategy by strategy, and all of it: by the formulas, as integers, and (sums of
// gradients) by what was posted. Lengths and quotas are such that all ranks have the same.
TEST(AllFour, BytesAreTheSumOfTheFormulas) {
  constexpr int kSteps = 3;
  for (const char* scheme : {"dense", "powersgd", "spardl"}) {
    for (const bool tied : {false, true}) {
      const Staged t = all_four(scheme, tied);
      std::vector<Posted> posted(static_cast<std::size_t>(t.ranks()));
      RunOptions run;
      run.decorate = [&](Transport& inner) {
        return std::make_unique<Counting>(inner, posted[static_cast<std::size_t>(inner.rank())]);
      };
      run_ranks(t.ranks(), run, [&](World& world) {
        at::set_num_threads(1);
        world.plan_by({});
        const std::unique_ptr<Model> model = model_of(t, world.rank(), world.size());
        ReplicaOptions options = options_of(t);
        SchemeOptions& sums = options.parallel.scheme;
        sums.all_reduce = "ring";
        sums.codec = "coo";
        sums.blocks = "contiguous";
        sums.teams = 1;
        sums.quotas = QuotaKind::proportional;
        sums.density = 0.0625;
        sums.columns = 2;
        sums.buckets.bucket_bytes = 1 << 20;
        Replica replica(world.engine(), world.comm(), *model, options);
        JobStrategies& job = replica.job();
        walk(t, replica, job.mesh().coordinates(world.rank()).dp, 0, kSteps);
        const auto bytes = [](std::int64_t formula) { return static_cast<std::uint64_t>(formula); };
        EXPECT_EQ(job.pipeline()->step_bytes(), bytes(job.pipeline()->formula_bytes()));
        EXPECT_GT(job.pipeline()->step_bytes(), 0u);
        EXPECT_EQ(job.experts()->step_bytes(), bytes(job.experts()->formula_bytes()));
        EXPECT_GT(job.experts()->step_bytes(), 0u);
        const bool first = model->options().stage.stage == 0;
        std::int64_t of_tables = 0;
        for (const HybridEmbedding* tables : job.hybrids())
          of_tables += tables->formula_bytes(world.comm().cost());
        EXPECT_EQ(of_tables > 0, first && !tied);  // only the first stage looks up
        EXPECT_EQ(job.table_bytes(), bytes(of_tables));
        std::uint64_t all = job.pipeline()->step_bytes() + job.experts()->step_bytes() + job.table_bytes();
        for (const DataParallel* sum : sums_of(job)) {
          std::uint64_t counted = 0;
          for (const Exchange& exchange : sum->exchanges()) {
            if (!exchange.at_installation)
              counted +=
                  posted[static_cast<std::size_t>(world.rank())].of(exchange.group, exchange.slot, kSteps);
          }
          EXPECT_EQ(sum->sent_bytes(), counted) << scheme << ", " << sum->name();
          EXPECT_EQ(sum->sent_bytes(), bytes(formula_bytes(*sum, sum->group().size(), world.comm().cost(),
                                                           world.comm().micro_op_bytes())))
              << scheme << ", " << sum->name();
          EXPECT_EQ(sum->sent_bytes() > 0, sum->group().size() > 1) << scheme << ", " << sum->name();
          all += sum->sent_bytes();
        }
        EXPECT_EQ(job.sent_bytes() + job.table_bytes(), all) << scheme;
        EXPECT_EQ(bytes(job.formula_bytes(world.comm().cost(), world.comm().micro_op_bytes())), all)
            << scheme;
        // Control: the lossy ones are what sums the stage's gradients, and send less than these have.
        std::int64_t values = 0;
        for (const ParameterInfo& p : job.parallel().plan().parameters()) values += p.count;
        const std::uint64_t dense = bytes(2 * 3 * 4 * values / 4);
        EXPECT_EQ(job.parallel().sent_bytes() == dense, scheme == std::string("dense"));
        EXPECT_LE(job.parallel().sent_bytes(), dense) << scheme;
      });
    }
  }
}

// Equal to the same mesh without anything lossy; what is lossy stays near it for some steps.
TEST(AllFour, TrainsBesideWhatLosesNothing) {
  for (const bool tied : {false, true}) {
    Staged exact = all_four("dense", tied);
    exact.backward = {};
    exact.type = torch::kFloat64;
    Staged other = exact;
    other.stage.stages = 1;
    EXPECT_LT(distance(together(exact), together(other)), kSame) << "stages change nothing";
    const Result dense = together(exact);
    for (const char* scheme : {"spardl", "powersgd"}) {
      const Result lossy = together(all_four(scheme, tied));
      ASSERT_EQ(lossy.losses.size(), dense.losses.size());
      EXPECT_NEAR(lossy.losses.front(), dense.losses.front(), 1e-5);
      EXPECT_NEAR(lossy.losses.back(), dense.losses.back(), 0.2) << scheme;
      EXPECT_NE(lossy.losses.back(), dense.losses.back());  // control: it is not the dense run
    }
  }
}

// Experts beside stages and tensor-parallel ranks: as one process where no token is left out, else as the same
// data-parallel ranks with whole models, which other tests hold to one process (a capacity is of a micro-batch's tokens).
TEST(AllFour, ExpertsGoWithEverySchedule) {
  struct Shape {
    const char* schedule;
    int pp, dp, tp, ep, micro_batches;
  };
  const Shape shapes[] = {{"gpipe", 2, 2, 1, 2, 3}, {"interleaved", 2, 2, 1, 2, 4}, {"zb-h1", 2, 2, 1, 1, 3},
                          {"1f1b", 4, 2, 1, 2, 5},  {"interleaved", 2, 4, 1, 4, 2}, {"1f1b", 2, 2, 2, 2, 4},
                          {"gpipe", 3, 2, 1, 2, 2}, {"1f1b", 8, 1, 1, 1, 2}};
  for (const Shape& s : shapes) {
    const bool interleaved = s.schedule == std::string("interleaved");
    Staged t = with({.model = "gpt-moe",
                     .stage = {.stages = s.pp, .schedule = s.schedule, .chunks = interleaved ? 2 : 1},
                     .dp = s.dp,
                     .micro_batches = s.micro_batches,
                     .layers = std::max(4, s.pp),
                     .steps = 2});
    t.tp = s.tp;
    t.ep = s.ep;
    Staged whole = t;
    whole.stage = {};
    whole.tp = whole.ep = 1;
    EXPECT_LT(distance(together(t), together(whole)), kSame) << title(t) << ", ep " << s.ep;
    whole.micro_batches = s.micro_batches + 1;
    EXPECT_GT(distance(together(t), together(whole)), 1e-9) << "control: other capacities, " << title(t);
    t.dropless = whole.dropless = true;
    EXPECT_LT(distance(together(t), alone(whole)), kSame) << title(t) << ", dropless, ep " << s.ep;
  }
}

// Of a real model on a link that is slow: traffic gives way as in virtual time.
std::size_t breaches_of(const Staged& t, bool priority) {
  std::vector<Trace> traces(static_cast<std::size_t>(t.ranks()));
  const RunOptions run{.config = {},
                       .link = EmulatedLink{.bytes_per_second = 10e6, .latency_seconds = 50e-6},
                       .traces = &traces,
                       .priority = priority,
                       .decorate = {}};
  run_ranks(t.ranks(), run, [&](World& world) { train_on(world, t); });
  std::size_t out = 0;
  for (const Trace& trace : traces) {
    const TraceReport report = verify_trace(trace);
    out += report.breaches.size();
    EXPECT_TRUE(!priority || report.breaches.empty()) << report.breaches.front();
    EXPECT_GT(trace.events().size(), 100u);
  }
  return out;
}

TEST(AllFour, TracesOfARealModelAreWithoutABreach) {
  for (const bool tied : {false, true}) EXPECT_EQ(breaches_of(all_four("spardl", tied), true), 0u);
  EXPECT_GT(breaches_of(all_four("dense", false), false), 0u);  // control: first come, first served
}

Staged with_experts(int dp, int pp, int tp, int ep, int micro_batches) {
  Staged t = with(
      {.model = "gpt-moe", .stage = {.stages = pp}, .dp = dp, .micro_batches = micro_batches, .steps = 3});
  t.ep = ep;
  t.tp = tp;
  return t;
}

void expect_state_moves(const std::vector<Staged>& meshes) {
  const Named expected = together(meshes.front()).parameters;
  for (const Staged& from : meshes) {
    Saved saved;
    train_and_save(from, 2, saved);
    for (const Staged& to : meshes)
      EXPECT_LT(distance(load_and_train(to, saved, 2, 3), expected), kSame)
          << title(from) << " to " << title(to);
    EXPECT_GT(distance(load_and_train(from, saved, 1, 2), expected), 1e-6);  // control: another step's batch
  }
}

// Saved on any mesh of as many data-parallel ranks (capacity is of a micro-batch's tokens), loaded on any other.
TEST(AllFour, StateMovesToOtherMeshes) {
  expect_state_moves({with_experts(2, 1, 1, 1, 2), with_experts(2, 2, 1, 2, 2), with_experts(2, 1, 2, 2, 2),
                      with_experts(2, 2, 2, 1, 2), with_experts(2, 2, 2, 2, 2)});
}

// Where no token is left out, to any number of data-parallel ranks and micro-batches.
TEST(AllFour, StateOfDroplessExpertsMovesToAnyMesh) {
  std::vector<Staged> meshes{with_experts(1, 1, 1, 1, 1), with_experts(2, 2, 1, 2, 3),
                             with_experts(4, 1, 2, 4, 1), with_experts(1, 2, 2, 1, 4),
                             with_experts(4, 2, 1, 2, 2)};
  for (Staged& t : meshes) t.dropless = true;
  expect_state_moves(meshes);
}

TEST(AllFour, ResumeHasTheSameBits) {
  for (const bool tied : {false, true}) {
    Staged t = all_four("spardl", tied);
    t.steps = 5;
    const Named straight = together(t).parameters;
    Saved saved;
    train_and_save(t, 3, saved);
    const Named resumed = load_and_train(t, saved, 3, 5);
    for (const auto& [name, value] : straight) EXPECT_TRUE(torch::equal(resumed.at(name), value)) << name;
    const Named fewer = load_and_train(t, saved, 3, 4);
    EXPECT_FALSE(torch::equal(fewer.at("layer.0.attention.norm.weight"),
                              straight.at("layer.0.attention.norm.weight")));  // control
  }
}

}  // namespace
}  // namespace weft
