// Data parallel on real transports: ranks are threads, or processes over tcp and mpi (tests/launch, mpirun).
// Results are compared with plain loops in float64, and their bits with those of the simulator, which runs
// beside them in every process.
#include "data_parallel/data_parallel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "sim/data_parallel_job.h"
#include "weft/weft.h"

namespace weft {
namespace {

using testing::forget;
using testing::row_of;
using testing::set_values;
using testing::step_of;
using testing::values_of;
using namespace data_parallel_test;

constexpr std::uint32_t kSteps = 4;
using Sums = std::vector<std::vector<double>>;  // of each parameter

Vectors zeros() {
  Vectors out;
  for (const ParameterInfo& p : model()) out.emplace_back(static_cast<std::size_t>(p.count));
  return out;
}

DataParallelOptions case_of(std::string_view algorithm, ResidualRule rule = ResidualRule::gres) {
  DataParallelOptions options = options_of(0.05, rule);
  options.scheme.name = algorithm;
  options.scheme.teams = 1;  // the cost model's choice is the link's, and with it the bits
  return options;
}

// What one rank sees of a job.
struct Seen {
  std::vector<Vectors> outputs;                   // of each step
  std::vector<std::vector<std::int64_t>> quotas;  // of each step and bucket
  StateSnapshot state;                            // at the end
};

Seen simulate(const DataParallelOptions& options, int ranks, int me) {
  Seen seen;
  Job job(ranks, model(), options);
  for (std::uint32_t t = 0; t < kSteps; ++t) {
    job.fill_whole(t);
    EXPECT_EQ(job.step(), "");
    seen.outputs.push_back(job[me].outputs);
    seen.quotas.push_back(job[me].dp->quotas());
  }
  seen.state = job[me].dp->save();
  return seen;
}

// A step as a program drives it; ranks hand out their gradients in different orders.
StepResult step(DataParallel& dp, const Vectors& gradients, int rank) {
  const int count = dp.plan().num_parameters();
  for (int i = 0; i < count; ++i) {
    const int p = (i * 3 + rank * 5) % count;
    dp.gradient_ready(p, gradients[static_cast<std::size_t>(p)]);
  }
  dp.step_end();
  for (const Ticket& ticket : dp.tickets()) ticket.wait();
  return dp.finish();
}

Seen train(World& world, DataParallel& dp) {
  Seen seen;
  for (std::uint32_t t = 0; t < kSteps; ++t) {
    Vectors gradients = zeros();
    draw_whole(world.rank(), t, gradients);
    EXPECT_TRUE(step(dp, gradients, world.rank()).committed);
    seen.quotas.push_back(dp.quotas());
    seen.outputs.push_back(zeros());
    std::vector<std::span<float>> spans;
    for (std::vector<float>& out : seen.outputs.back()) spans.emplace_back(out);
    dp.copy_to(spans);
  }
  seen.state = dp.save();
  return seen;
}

// Of one bucket: each rank's `quota` largest (all, if it is dense) of gradient and residual, summed; the rest
// is its residual, or is forgotten where there is no feedback.
void reduce_bucket(const BucketPlan& plan, const Bucket& bucket, std::int64_t quota, bool feedback,
                   std::vector<Sums>& put_in, Sums& sum) {
  struct Place {
    std::size_t parameter, index;
  };
  std::vector<Place> places;
  for (const BucketPiece& piece : bucket.pieces) {
    const auto p = static_cast<std::size_t>(piece.parameter);
    for (std::int64_t i = 0; i < plan.parameter(piece.parameter).count; ++i) {
      places.push_back({p, static_cast<std::size_t>(i)});
    }
  }
  for (Sums& mine : put_in) {
    const auto at = [&mine](const Place& place) -> double& { return mine[place.parameter][place.index]; };
    std::vector<Place> order = places;
    std::stable_sort(order.begin(), order.end(),
                     [&](const Place& a, const Place& b) { return std::abs(at(a)) > std::abs(at(b)); });
    for (std::size_t i = 0; i < order.size(); ++i) {
      const bool sent = bucket.dense || static_cast<std::int64_t>(i) < quota;
      if (sent) sum[order[i].parameter][order[i].index] += at(order[i]);
      if (sent || !feedback) at(order[i]) = 0;
    }
  }
}

// What "topka" must give, step after step, written as loops over float64.
std::vector<Sums> plain(const BucketPlan& plan, int ranks, const Seen& seen, bool feedback) {
  std::vector<Sums> out;
  std::vector<Sums> put_in(static_cast<std::size_t>(ranks), Sums(zeros().size()));
  for (std::uint32_t t = 0; t < kSteps; ++t) {
    out.emplace_back();
    for (const ParameterInfo& p : plan.parameters())
      out.back().emplace_back(static_cast<std::size_t>(p.count));
    for (int r = 0; r < ranks; ++r) {
      Vectors gradients = zeros();
      draw_whole(r, t, gradients);
      for (std::size_t p = 0; p < gradients.size(); ++p) {
        std::vector<double>& into = put_in[static_cast<std::size_t>(r)][p];
        into.resize(gradients[p].size());
        std::transform(gradients[p].begin(), gradients[p].end(), into.begin(), into.begin(), std::plus<>());
      }
    }
    for (int b = 0; b < plan.num_buckets(); ++b) {
      reduce_bucket(plan, plan.bucket(b), seen.quotas[t][static_cast<std::size_t>(b)], feedback, put_in,
                    out.back());
    }
  }
  return out;
}

bool equal(const std::vector<Vectors>& outputs, const std::vector<Sums>& sums) {
  for (std::size_t t = 0; t < sums.size(); ++t) {
    for (std::size_t p = 0; p < sums[t].size(); ++p) {
      if (!std::ranges::equal(outputs[t][p], sums[t][p], {}, [](float v) { return static_cast<double>(v); }))
        return false;
    }
  }
  return true;
}

// Largest difference between all gradients of all steps and what came out or is left, summed in float64.
double lost(World& world, const Seen& seen) {
  double worst = 0;
  Sums balance;
  for (std::size_t p = 0; p < model().size(); ++p) {
    const std::vector<float> left = values_of(seen.state, "residual", model()[p].name);
    balance.emplace_back(left.begin(), left.end());
    balance[p].resize(zeros()[p].size());
    world.all_reduce(std::span(balance[p]));
    for (const Vectors& out : seen.outputs) {
      for (std::size_t i = 0; i < balance[p].size(); ++i) balance[p][i] += static_cast<double>(out[p][i]);
    }
  }
  for (std::uint32_t t = 0; t < kSteps; ++t) {
    for (int r = 0; r < world.size(); ++r) {
      Vectors gradients = zeros();
      draw_whole(r, t, gradients);
      for (std::size_t p = 0; p < gradients.size(); ++p) {
        for (std::size_t i = 0; i < gradients[p].size(); ++i) {
          balance[p][i] -= static_cast<double>(gradients[p][i]);
        }
      }
    }
  }
  for (const std::vector<double>& parameter : balance) {
    for (const double v : parameter) worst = std::max(worst, std::abs(v));
  }
  return worst;
}

void check_case(World& world, DataParallelOptions options, std::uint32_t first_slot) {
  options.first_slot = first_slot;
  DataParallel dp(world.engine(), world.comm(), model(), options);
  const Seen seen = train(world, dp);
  const Seen expected = simulate(options, world.size(), world.rank());
  EXPECT_TRUE(seen.outputs == expected.outputs) << options.scheme.name;
  EXPECT_EQ(seen.quotas, expected.quotas) << options.scheme.name;
  for (const ParameterInfo& p : model()) {
    EXPECT_EQ(row_of(seen.state, "residual", p.name), row_of(expected.state, "residual", p.name));
  }
  for (const std::vector<std::int64_t>& quotas : seen.quotas) {
    std::int64_t sparse = 0;
    for (int b = 0; b < dp.plan().num_buckets(); ++b) {
      if (!dp.plan().bucket(b).dense) sparse += quotas[static_cast<std::size_t>(b)];
    }
    EXPECT_EQ(sparse, std::llround(0.05 * static_cast<double>(dp.plan().sparse_count())));
  }
  if (options.scheme.residual == ResidualRule::lres && options.scheme.name == "spardl") {
    EXPECT_GT(lost(world, seen), 0.0);  // control
    return;
  }
  EXPECT_EQ(lost(world, seen), 0.0) << options.scheme.name;
  if (options.scheme.name != "topka") return;
  EXPECT_TRUE(equal(seen.outputs, plain(dp.plan(), world.size(), seen, true)));
  EXPECT_FALSE(equal(seen.outputs, plain(dp.plan(), world.size(), seen, false)));  // control
}

// Low rank: the bits of the simulation, in outputs, residuals and factors, and a balance up to rounding.
void check_powersgd(World& world, std::uint32_t first_slot) {
  DataParallelOptions options = case_of("powersgd");
  options.scheme.columns = 2;
  options.scheme.all_reduce = "ring";  // the cost model's choice is the link's, and with it the bits
  options.first_slot = first_slot;
  DataParallel dp(world.engine(), world.comm(), model(), options);
  const Seen seen = train(world, dp);
  const Seen expected = simulate(options, world.size(), world.rank());
  EXPECT_TRUE(seen.outputs == expected.outputs);
  double largest = 0;
  for (std::size_t p = 0; p < model().size(); ++p) {
    const std::string name = model()[p].name;
    EXPECT_EQ(row_of(seen.state, "residual", name), row_of(expected.state, "residual", name));
    EXPECT_EQ(values_of(seen.state, "factor", name), values_of(expected.state, "factor", name));
    for (const Vectors& out : seen.outputs) {
      for (const float v : out[p]) largest = std::max(largest, std::abs(static_cast<double>(v)));
    }
    for (const float v : values_of(seen.state, "residual", name)) {
      largest = std::max(largest, std::abs(static_cast<double>(v)));
    }
  }
  EXPECT_EQ(row_of(seen.state, "factor", model()[0].name).row.shard.shape[0], 2);
  // In each step a rank rounds gradient + residual, of at most 1000 + largest, and the new residual, no
  // larger. The output here is y itself, y / W rounds on every rank: three roundings for each rank and step.
  // A residual in between may exceed the last one; twice covers it.
  EXPECT_LE(lost(world, seen), 0x1p-24 * 3 * kSteps * world.size() * 2 * (1000 + largest));
  // Control: another seed gives other factors, and with them other outputs.
  options.scheme.seed = 1;
  EXPECT_FALSE(seen.outputs == simulate(options, world.size(), world.rank()).outputs);
}

void check_blame(World& world, std::uint32_t first_slot, std::string_view algorithm) {
  DataParallelOptions options = case_of(algorithm);
  options.first_slot = first_slot;
  DataParallel dp(world.engine(), world.comm(), model(), options);
  Vectors gradients = zeros();
  draw_whole(world.rank(), 0, gradients);
  if (world.rank() == 1) gradients[5][123] = std::nanf("");
  const StepResult bad = step(dp, gradients, world.rank());
  EXPECT_FALSE(bad.committed);
  EXPECT_NE(bad.text.find("'layer3.weight' on rank 1 holds NaN"), std::string::npos) << bad.text;
  gradients[5][123] = 0;
  EXPECT_TRUE(step(dp, gradients, world.rank()).committed) << "nothing of it is left";
}

// Memory for the buckets of a strategy, with the view of each parameter.
struct Given {
  explicit Given(DataParallel& dp) {
    const BucketPlan& plan = dp.plan();
    for (int b = 0; b < plan.num_buckets(); ++b) {
      buckets.emplace_back(static_cast<std::size_t>(plan.bucket(b).count));
      dp.give_memory(b, std::span(buckets.back()));
    }
    for (int p = 0; p < plan.num_parameters(); ++p) {
      views.push_back(std::span(buckets[static_cast<std::size_t>(plan.bucket_of(p))])
                          .subspan(static_cast<std::size_t>(plan.first_of(p)),
                                   static_cast<std::size_t>(plan.parameter(p).count)));
    }
  }
  std::vector<std::vector<float>> buckets;
  std::vector<std::span<float>> views;
};

// One step; gradients with an even number lie in their places already.
StepResult step(DataParallel& dp, Given& given, const Vectors& gradients) {
  for (std::size_t p = 0; p < gradients.size(); ++p) {
    if (p % 2 == 0) std::ranges::copy(gradients[p], given.views[p].begin());
    dp.gradient_ready(static_cast<int>(p),
                      p % 2 == 0 ? std::span<const float>(given.views[p]) : std::span(gradients[p]));
  }
  dp.step_end();
  for (const Ticket& ticket : dp.tickets()) ticket.wait();
  const StepResult result = dp.finish();
  if (result.committed) dp.fill_memory();
  return result;
}

// Where the gradients lie changes no bit of what comes out, whether or not something is selected: from the
// third step on everything is sent, also what the first two left behind.
void check_given_memory(World& world, std::uint32_t first_slot, std::string_view algorithm) {
  DataParallelOptions options = case_of(algorithm);
  options.divisor = 3;
  options.first_slot = first_slot;
  DataParallel plain(world.engine(), world.comm(), model(), options);
  options.first_slot = first_slot + 20;
  DataParallel dp(world.engine(), world.comm(), model(), options);
  Given given(dp);
  std::vector<float> wrong(given.buckets[0].size() + 1);
  EXPECT_THROW(dp.give_memory(0, std::span(wrong)), UsageError);
  EXPECT_THROW(dp.give_memory(99, std::span(wrong)), UsageError);
  bool in_memory = false;
  for (std::uint32_t t = 0; t < kSteps; ++t) {
    for (DataParallel* each : {&plain, &dp}) each->set_density(t < 2 ? 0.05 : 1.0);
    Vectors gradients = zeros();
    draw_whole(world.rank(), t, gradients);
    EXPECT_TRUE(step(plain, gradients, world.rank()).committed);
    EXPECT_TRUE(step(dp, given, gradients).committed);
    for (std::size_t p = 0; p < gradients.size(); ++p) {
      std::vector<float> out(gradients[p].size());
      plain.result_of(static_cast<int>(p), out);
      EXPECT_TRUE(std::ranges::equal(out, given.views[p]))
          << algorithm << " step " << t << " parameter " << p;
      in_memory |= !std::ranges::equal(given.views[p], gradients[p]);  // control: not what was put there
      dp.result_of(static_cast<int>(p), out);
      EXPECT_TRUE(std::ranges::equal(out, given.views[p]));
    }
    EXPECT_EQ(plain.squares(), dp.squares());
    EXPECT_EQ(plain.sent_bytes(), dp.sent_bytes());
  }
  EXPECT_TRUE(in_memory);
  for (const ParameterInfo& p : model())
    EXPECT_EQ(row_of(plain.save(), "residual", p.name), row_of(dp.save(), "residual", p.name));
  // Who is to blame is known also where the sum has replaced the gradients.
  Vectors gradients = zeros();
  draw_whole(world.rank(), 0, gradients);
  if (world.rank() == 1) gradients[5][123] = INFINITY;
  const StepResult bad = step(dp, given, gradients);
  EXPECT_FALSE(bad.committed);
  EXPECT_NE(bad.text.find("'layer3.weight' on rank 1 holds infinity"), std::string::npos) << bad.text;
  gradients[5][123] = 0;
  EXPECT_TRUE(step(dp, given, gradients).committed);
}

void check_rank(World& world) {
  const DataParallelOptions cases[] = {case_of("topka"),
                                       case_of("spardl"),
                                       case_of("spardl", ResidualRule::drop),
                                       case_of("spardl", ResidualRule::lres),
                                       case_of("gtopk"),
                                       case_of("oktopk")};
  std::uint32_t first_slot = 0;
  for (const DataParallelOptions& options : cases) check_case(world, options, first_slot += 20);
  check_powersgd(world, first_slot + 20);
  check_blame(world, first_slot + 40, "spardl");
  check_blame(world, first_slot + 60, "powersgd");
  first_slot += 80;
  for (const std::string_view algorithm : {"dense", "dense-bf16", "spardl", "oktopk"})
    check_given_memory(world, first_slot += 40, algorithm);
}

TEST(DataParallelRanks, EqualThePlainLoopsAndTheSimulationOnThreads) {
  for (const int ranks : {2, 3, 4}) {
    for (const std::size_t micro_op_bytes : {std::size_t{1000}, std::size_t{1} << 20}) {
      RunOptions options;
      options.config.micro_op_bytes = micro_op_bytes;
      run_ranks(ranks, options, check_rank);
    }
  }
}

// Under a launcher: one rank a process.
TEST(DataParallelProcesses, EqualThePlainLoopsAndTheSimulation) {
  const std::unique_ptr<World> world = join_world(Config::from_environment());
  ASSERT_GT(world->size(), 1) << "needs a launcher";
  ASSERT_NE(world->transport(), "threads");
  check_rank(*world);
  world->barrier();
}

}  // namespace
}  // namespace weft
