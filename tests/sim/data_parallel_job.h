// What the tests of data parallel share: ranks in virtual time, each with a producer that stands for
// backward.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "data_parallel/data_parallel.h"
#include "state_rows.h"
#include "transports/sim.h"
#include "weft/engine.h"
#include "weft/random.h"

namespace weft::data_parallel_test {

using Vectors = std::vector<std::vector<float>>;

inline std::vector<ParameterInfo> model() {
  return {{"embed", 3000, 0, 60},         {"layer1.weight", 900, 1, 30}, {"layer1.bias", 30, 2},
          {"layer2.weight", 1200, 3, 40}, {"layer2.bias", 40, 4},        {"layer3.weight", 700, 5, 10},
          {"layer3.bias", 10, 6},         {"head", 2500, 7, 50}};
}

inline DataParallelOptions options_of(double density, ResidualRule rule = ResidualRule::gres,
                                      double divisor = 1) {
  DataParallelOptions options;
  options.scheme.density = density;
  options.scheme.residual = rule;
  options.divisor = divisor;
  options.scheme.buckets = {.bucket_bytes = 4 * 2000, .dense_below = 100};
  return options;
}

// Whole numbers of mixed size, whose sums are exact: what one rank puts in at one step.
inline void draw_whole(int rank, std::uint32_t step, Vectors& gradients) {
  Random random(7, 5, static_cast<std::uint32_t>(rank), step);
  for (std::vector<float>& g : gradients) {
    for (float& v : g) {
      const std::uint32_t scale = random.below(20) == 0 ? 1000 : 20;
      v = static_cast<float>(static_cast<int>(random.below(2 * scale)) - static_cast<int>(scale));
    }
  }
}

inline SimOptions sim_options(int ranks, std::uint64_t seed) {
  SimOptions options;
  options.link.ranks = ranks;
  options.link.latency_seconds = 50e-6;
  options.link.bytes_per_second = 125e6;
  options.eager_limit = 0;
  options.jitter_seconds = 100e-6;
  options.seed = seed;
  return options;
}

// A rank: its strategy, its gradients, and the synthetic producer that stands for backward.
struct Worker {
  std::unique_ptr<Engine> engine;
  std::unique_ptr<DataParallel> dp;
  Vectors gradients;
  std::vector<int> order;  // in which they become ready
  std::uint64_t seed = 0;
  StepResult result;
  Vectors outputs;
  std::size_t most_in_flight = 0;

  static Task<void> backward(Comm comm, Worker* me) {
    Random random(me->seed, 2, static_cast<std::uint32_t>(comm.rank()));
    for (const int p : me->order) {
      co_await comm.sleep_until(comm.now() + std::chrono::microseconds(random.below(400)));
      me->dp->gradient_ready(p, me->gradients[static_cast<std::size_t>(p)]);
      me->most_in_flight = std::max(me->most_in_flight, me->engine->in_flight());
    }
    me->dp->step_end();
    for (std::size_t i = 0; i < me->dp->tickets().size(); ++i) {
      const Ticket ticket = me->dp->tickets()[i];
      co_await ticket;
    }
    me->result = me->dp->finish();
    if (me->result.committed) me->copy();
  }
  void copy() {
    std::vector<std::span<float>> spans;
    outputs = gradients;
    for (std::vector<float>& out : outputs) spans.emplace_back(out);
    dp->copy_to(spans);
  }
};

// The ranks that a rank sums with, of the world's; it may have other parameters than was said.
using Place = std::function<Comm(const Comm& world, std::vector<ParameterInfo>& parameters)>;

class Job {
 public:
  Job(int ranks, const std::vector<ParameterInfo>& parameters, const DataParallelOptions& options,
      std::uint64_t seed = 0, const EngineOptions& engine = {.operation_timeout = 10s},
      const Place& place = {})
      : world_(sim_options(ranks, seed)), seed_(seed), workers_(static_cast<std::size_t>(ranks)) {
    for (int r = 0; r < ranks; ++r) {
      Worker& w = (*this)[r];
      w.engine = std::make_unique<Engine>(world_.transport(r), engine, nullptr);
      world_.attach(r, *w.engine);
      std::vector<ParameterInfo> mine = parameters;
      const Comm group = place ? place(w.engine->world(), mine) : w.engine->world();
      w.dp = std::make_unique<DataParallel>(*w.engine, group, mine, options);
      for (const ParameterInfo& p : mine) w.gradients.emplace_back(static_cast<std::size_t>(p.count));
      w.order.resize(parameters.size());
      std::iota(w.order.begin(), w.order.end(), 0);
    }
  }
  ~Job() {
    for (Worker& w : workers_) w.engine->shut_down(nullptr);
    for (int r = 0; r < size(); ++r) world_.detach(r);
  }
  Worker& operator[](int r) { return workers_[static_cast<std::size_t>(r)]; }
  int size() const { return static_cast<int>(workers_.size()); }
  const BucketPlan& plan() { return workers_[0].dp->plan(); }

  // Fills all gradients: f(rank, parameter, index).
  void fill(const std::function<float(int, int, std::int64_t)>& f) {
    for (int r = 0; r < size(); ++r) {
      for (int p = 0; p < plan().num_parameters(); ++p) {
        std::vector<float>& g = (*this)[r].gradients[static_cast<std::size_t>(p)];
        for (std::size_t i = 0; i < g.size(); ++i) g[i] = f(r, p, static_cast<std::int64_t>(i));
      }
    }
  }
  void fill_whole(std::uint32_t step) {
    for (int r = 0; r < size(); ++r) draw_whole(r, step, (*this)[r].gradients);
  }

  // A step on all ranks; "" or the first error.
  std::string step() {
    ++step_;
    std::vector<Ticket> done;
    for (int r = 0; r < size(); ++r) {
      Worker& w = (*this)[r];
      w.seed = seed_ * 1000 + step_;
      Random random(w.seed, 1, static_cast<std::uint32_t>(r));
      std::shuffle(w.order.begin(), w.order.end(), random);
      const SubmitOptions submit{.name = "backward", .slot = 1000, .step = step_};
      done.push_back(w.engine->submit(w.engine->world(), submit,
                                      [me = &w](Comm comm) { return Worker::backward(comm, me); }));
    }
    auto all_done = [&] {
      return std::all_of(done.begin(), done.end(), [](const Ticket& t) { return t.done(); });
    };
    if (!world_.run_until(all_done)) return "waits for ever";
    for (const Ticket& t : done) {
      try {
        if (t.error()) std::rethrow_exception(t.error());
      } catch (const std::exception& e) {
        return e.what();
      }
    }
    return "";
  }

  // Sum over ranks of what is in (gradients, if asked, and residuals), laid end to end by parameter.
  std::vector<double> mass(bool gradients) {
    std::vector<double> sum;
    for (int p = 0; p < plan().num_parameters(); ++p) {
      for (std::int64_t i = 0; i < plan().parameter(p).count; ++i) {
        const auto at = static_cast<std::size_t>(i);
        double v = 0;
        for (Worker& w : workers_) {
          const std::span<const float> residual = w.dp->state().residual(p);
          if (!residual.empty()) v += static_cast<double>(residual[at]);
          if (gradients) v += static_cast<double>(w.gradients[static_cast<std::size_t>(p)][at]);
        }
        sum.push_back(v);
      }
    }
    return sum;
  }
  std::vector<double> applied() {
    std::vector<double> out;
    for (const std::vector<float>& o : workers_[0].outputs) out.insert(out.end(), o.begin(), o.end());
    return out;
  }
  // Some steps; the largest mass that was lost or won in one of them. REQUIRES: divisor 1.
  double run_and_weigh(int steps) {
    double worst = 0;
    for (int t = 0; t < steps; ++t) {
      fill_whole(step_);
      const std::vector<double> before = mass(true);
      EXPECT_EQ(step(), "");
      const std::vector<double> after = mass(false);
      const std::vector<double> out = applied();
      for (std::size_t i = 0; i < before.size(); ++i) {
        worst = std::max(worst, std::abs(before[i] - after[i] - out[i]));
      }
    }
    return worst;
  }
  std::vector<StateSnapshot> save() {
    std::vector<StateSnapshot> out;
    for (Worker& w : workers_) out.push_back(w.dp->save());
    return out;
  }

 private:
  SimWorld world_;
  std::uint64_t seed_;
  std::vector<Worker> workers_;
  std::uint32_t step_ = 0;
};

}  // namespace weft::data_parallel_test
