// What the tests of the sparse all-reduces share: ranks in virtual time that run them step after step, data,
// and the mass that is lost.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string_view>
#include <vector>

#include "transports/bare_rank.h"
#include "transports/decorator.h"
#include "transports/recording.h"
#include "transports/sim.h"
#include "weft/random.h"
#include "weft/sparse.h"

namespace weft::sparse_test {

// What a rank sent, message by message.
class SendLog final : public Decorator {
 public:
  struct Sent {
    std::uint32_t step = 0, hop = 0;
    std::size_t bytes = 0;
  };
  using Decorator::Decorator;
  using Decorator::post;
  void post(SendRecord& send) noexcept override {
    sent_.push_back({send.id.step, send.id.hop, send.payload.size()});
    inner_.post(send);
  }
  const std::vector<Sent>& sent() const { return sent_; }

 private:
  std::vector<Sent> sent_;
};

// Ranks on `sim` that run sparse all-reduces one after the other.
class SparseJob {
 public:
  SparseJob(int ranks, std::int64_t length, SparseOptions options, std::uint64_t seed = 0)
      : options_(options), world_(sim_options(ranks, seed)) {
    for (int r = 0; r < ranks; ++r) {
      recordings_.push_back(std::make_unique<RecordingTransport>(world_.transport(r)));
      logs_.push_back(std::make_unique<SendLog>(*recordings_.back()));
      ranks_.push_back(std::make_unique<BareRank>(*logs_.back()));
      ranks_.back()->endpoint().set_micro_op_bytes(4096);
      world_.attach(r, *ranks_.back());
      states_.emplace_back(length);
      results_.emplace_back();
      gradients_.emplace_back(static_cast<std::size_t>(length));
    }
  }
  ~SparseJob() {
    for (int r = 0; r < size(); ++r) world_.detach(r);
  }
  int size() const { return static_cast<int>(ranks_.size()); }
  std::vector<float>& gradient(int r) { return gradients_[static_cast<std::size_t>(r)]; }
  SparseResult& result(int r) { return results_[static_cast<std::size_t>(r)]; }
  SparseState& state(int r) { return states_[static_cast<std::size_t>(r)]; }
  RecordingTransport& recording(int r) { return *recordings_[static_cast<std::size_t>(r)]; }
  const SendLog& log(int r) const { return *logs_[static_cast<std::size_t>(r)]; }
  SparseOptions& options() { return options_; }
  std::uint32_t last_step() const { return step_ - 1; }
  void plan_by(int r, const LinkCost& cost) {
    ranks_[static_cast<std::size_t>(r)]->endpoint().set_cost(cost);
  }

  void step(bool commit = true) {
    for (int r = 0; r < size(); ++r) {
      const auto i = static_cast<std::size_t>(r);
      ranks_[i]->start(
          [this, i](Comm comm) {
            return sparse_all_reduce(comm, gradients_[i], states_[i], results_[i], options_);
          },
          1, step_);
    }
    ++step_;
    auto done = [&] {
      return std::all_of(ranks_.begin(), ranks_.end(), [](const auto& r) { return r->done(); });
    };
    ASSERT_TRUE(world_.run_until(done)) << "waits for ever";
    for (auto& rank : ranks_) rank->rethrow();
    for (std::size_t i = 0; commit && i < states_.size(); ++i) {
      if (results_[i].finite())
        states_[i].commit();
      else
        states_[i].roll_back();
    }
  }
  std::vector<float> dense(int r) {
    std::vector<float> out(gradient(r).size());
    result(r).add_to(out);
    return out;
  }
  float residual(int r, std::size_t i) {
    const std::span<const float> all = state(r).residual();
    return all.empty() ? 0.0F : all[i];
  }
  // What rank r would put in: its gradient and its residual.
  float own(int r, std::size_t i) { return gradient(r)[i] + residual(r, i); }

 private:
  static SimOptions sim_options(int ranks, std::uint64_t seed) {
    SimOptions options;
    options.link.ranks = ranks;
    options.link.latency_seconds = 50e-6;
    options.link.bytes_per_second = 125e6;
    options.eager_limit = 0;
    options.jitter_seconds = 100e-6;
    options.seed = seed;
    return options;
  }
  SparseOptions options_;
  SimWorld world_;
  std::vector<std::unique_ptr<RecordingTransport>> recordings_;
  std::vector<std::unique_ptr<SendLog>> logs_;
  std::vector<std::unique_ptr<BareRank>> ranks_;
  std::vector<SparseState> states_;
  std::vector<SparseResult> results_;
  std::vector<std::vector<float>> gradients_;
  std::uint32_t step_ = 0;
};

enum class Data { whole, gauss };

// Whole numbers of mixed size sum exactly in float32; the others do not.
inline void fill(SparseJob& job, std::uint32_t step, Data data, std::uint64_t seed = 99) {
  for (int r = 0; r < job.size(); ++r) {
    Random random(seed, 5, static_cast<std::uint32_t>(r), step);
    for (float& g : job.gradient(r)) {
      if (data == Data::whole) {
        const std::uint32_t scale = random.below(20) == 0 ? 1000 : 20;
        g = static_cast<float>(static_cast<int>(random.below(2 * scale)) - static_cast<int>(scale));
      } else {
        g = static_cast<float>(std::sqrt(-2 * std::log(random.uniform())) *
                               std::cos(6.283185307 * random.uniform()));
      }
    }
  }
}

// Largest |sum of what went in - result - sum of residuals|.
inline double mass_error(SparseJob& job, const std::vector<std::vector<double>>& put_in) {
  const std::vector<float> y = job.dense(0);
  double worst = 0;
  for (std::size_t i = 0; i < y.size(); ++i) {
    double left = -static_cast<double>(y[i]);
    for (int r = 0; r < job.size(); ++r)
      left += put_in[static_cast<std::size_t>(r)][i] - static_cast<double>(job.residual(r, i));
    worst = std::max(worst, std::abs(left));
  }
  return worst;
}

// Some steps; the worst mass error over them.
inline double run_and_weigh(SparseJob& job, int steps, Data data, std::uint64_t seed = 99) {
  double worst = 0;
  for (int t = 0; t < steps; ++t) {
    fill(job, static_cast<std::uint32_t>(t), data, seed);
    std::vector<std::vector<double>> put_in;
    for (int r = 0; r < job.size(); ++r) {
      std::vector<double> mine(job.gradient(r).size());
      for (std::size_t i = 0; i < mine.size(); ++i) mine[i] = static_cast<double>(job.own(r, i));
      put_in.push_back(std::move(mine));
    }
    job.step();
    worst = std::max(worst, mass_error(job, put_in));
  }
  return worst;
}

inline SparseOptions options_of(std::int64_t k, ResidualRule rule = ResidualRule::gres, int teams = 1,
                                std::string_view gather = "auto", std::string_view codec = "coo",
                                std::string_view blocks = "dealt") {
  SparseOptions options;
  options.k = k;
  options.residual = rule;
  options.teams = teams;
  options.gather = gather;
  options.codec = codec;
  options.blocks = blocks;
  return options;
}

inline SparseOptions method(std::string_view name, std::int64_t k, ResidualRule rule = ResidualRule::gres,
                            std::string_view codec = "coo", std::string_view blocks = "dealt") {
  SparseOptions options = options_of(k, rule, 1, "auto", codec, blocks);
  options.algorithm = name;
  return options;
}

}  // namespace weft::sparse_test
