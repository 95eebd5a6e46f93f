// The model of hybrid_reference.h on ranks, with tables in a HybridEmbedding.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <numeric>

#include "data_parallel/data_parallel.h"
#include "embedding/hybrid.h"
#include "hybrid_reference.h"
#include "step_toys.h"
#include "weft/world.h"

namespace weft::toy {

struct Schedule {
  const char* name;
  bool lookahead, horizontal, vertical, two_sided;
};
inline constexpr Schedule kSchedules[] = {
    {"off", true, false, false, false},     {"horizontal", true, true, false, false},
    {"vertical", true, false, true, false}, {"both", true, true, true, false},
    {"two-sided", true, true, true, true},  {"no lookahead", false, true, true, false}};

struct Job {
  std::string optimizer = "adam";
  Schedule schedule = kSchedules[3];
  int micro_batches = 1;
  double clip = 0;
  std::pair<int, std::int64_t> bad{-1, -1};  // rank and step of a gradient that is not finite
  bool skips = false;
  std::int64_t settle_every = 0;
  std::int64_t first = 0, steps = kSteps;
  TableCut cut = TableCut::columns;
  int owners = 0;
  TableGather gather = TableGather::rows;
  int negatives = 0;
  bool spoils = false;  // control: one value of the last rank's tables is another, in the end
  Decorate decorate = {};
  double split_below = 1;
};

inline ModelShape shape() {
  return chain_shape("toy", {{"in", {{"in", {kRowsIn, kColumns}, true}}},
                             {"middle", {{"w", {kColumns}}}},
                             {"out", {{"out", {kRowsOut, kColumns}, true}}}});
}

class Toy final : public WaitingDriver {
 public:
  Toy(World& world, Job j)
      : job(std::move(j)),
        rank_(world.rank()),
        size_(world.size()),
        strategies(
            world.engine(), world.comm(), shape(),
            {.clip_norm = job.clip, .skip_not_finite = job.skips, .lookahead = job.schedule.lookahead}),
        walker_(*this, strategies) {
    HybridOptions o;
    o.dtype = DType::float64;
    o.divisor = 1;
    o.optimizer = optimizer(job.optimizer);
    o.updates_wait = job.clip > 0 || job.skips;
    o.lookahead = job.schedule.lookahead;
    o.horizontal = job.schedule.horizontal;
    o.vertical = job.schedule.vertical;
    o.two_sided = job.schedule.two_sided;
    o.split_below = job.split_below;
    o.cut = job.cut;
    o.owners = job.owners;
    o.gather = job.gather;
    o.first_slot = strategies.next_slot(world.comm());
    const std::vector<TableInfo> tables{{"in", kRowsIn, kColumns, 0, kPadding},
                                        {"out", kRowsOut, kColumns, 2}};
    hybrid = &strategies.add(std::make_unique<HybridEmbedding>(world.engine(), world.comm(), tables, o));
    DataParallelOptions d;
    d.scheme.name = "dense";
    d.dtype = DType::float64;
    d.divisor = 1;
    d.first_slot = strategies.next_slot(world.comm());
    strategies.add(std::make_unique<DataParallel>(world.engine(), world.comm(),
                                                  std::vector<ParameterInfo>{{"w", kColumns, 1}}, d,
                                                  &strategies.state()));
    strategies.install();
    for (int t = 0; t < 2; ++t) {
      const TableLayout& layout = hybrid->table(t).layout();
      const BlockRange c = layout.columns(rank_);
      auto* const values = reinterpret_cast<double*>(hybrid->table(t).values().data);
      for (std::int32_t r = 0; r < hybrid->table(t).info().rows; ++r) {
        if (!layout.holds(r, rank_)) continue;
        for (std::int64_t i = 0; i < c.count; ++i)
          values[layout.place(r) * c.count + i] = initial(static_cast<std::uint32_t>(t + 1), r, c.first + i);
      }
    }
    w = OneProcess::row(3, 0);
  }

  void run() {
    for (step_ = job.first; step_ < job.steps; ++step_) {
      strategies.number_step(step_);
      if (!job.schedule.lookahead || !strategies.under_way()) announce(step_);
      hybrid->set_lr(lr_of(step_));
      walker_.walk(strategies.next_table(job.micro_batches));
      note();
      if (job.settle_every > 0 && step_ % job.settle_every == job.settle_every - 1) settle();
    }
    if (strategies.under_way()) settle();
  }
  void settle() {
    walker_.walk(strategies.tables(job.micro_batches).settle);
    note();
  }

  Task<void> compute(Piece piece) override {
    if (piece.work == Work::forward && piece.block == 2) forward(piece.micro_batch);
    if (piece.work == Work::forward && piece.block == 2 && piece.micro_batch == job.micro_batches - 1 &&
        job.schedule.lookahead)
      announce(step_ + 1);
    const bool last = piece.micro_batch == job.micro_batches - 1;
    if (piece.work == Work::backward && last) {
      const int parameter = piece.block;
      strategies.gradient_ready(parameter,
                                std::span<const double>(grads_[static_cast<std::size_t>(parameter)]));
    }
    if (piece.work == Work::update && piece.block == 1 &&
        (!strategies.result() || strategies.result()->committed)) {
      std::vector<double> sum(kColumns);
      strategies.result_of(1, std::span(sum));
      for (std::size_t c = 0; c < kColumns; ++c) w[c] -= kLrDense * strategies.update_scale() * sum[c];
    }
    co_return;
  }

 private:
  void announce(std::int64_t step) {
    ids_[0].clear();
    ids_[1].clear();
    const std::vector<Token> tokens = batch_of(step);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      if (rank_of(step, i, size_) != rank_) continue;
      ids_[0].push_back(tokens[i].in);
      ids_[1].push_back(tokens[i].out);
    }
    for (const std::int64_t id : negatives_of(step, job.negatives)) ids_[1].push_back(id);
    const std::array<BatchInfo::Lookup, 2> lookups{{{"in", ids_[0]}, {"out", ids_[1]}}};
    strategies.batch_known({.tokens = static_cast<std::int64_t>(ids_[0].size()), .lookups = lookups});
  }

  // Tokens of a micro-batch: those whose number is m modulo their count. Gradients add up over them.
  void forward(int m) {
    const std::span<const std::int32_t> a = hybrid->table(0).places(), b = hybrid->table(1).places();
    const auto* in = reinterpret_cast<const double*>(hybrid->table(0).rows().data);
    const auto* out = reinterpret_cast<const double*>(hybrid->table(1).rows().data);
    if (m == 0) {
      loss_ = 0;
      weights_.clear();
      const std::vector<Token> tokens = batch_of(step_);
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        if (rank_of(step_, i, size_) == rank_) weights_.push_back(tokens[i].weight);
      }
      grads_[0].assign(static_cast<std::size_t>(hybrid->table(0).num_rows() * kColumns), 0);
      grads_[1].assign(kColumns, 0);
      grads_[2].assign(static_cast<std::size_t>(hybrid->table(1).num_rows() * kColumns), 0);
    }
    const double n = static_cast<double>(batch_of(step_).size());
    for (std::size_t i = static_cast<std::size_t>(m); i < a.size();
         i += static_cast<std::size_t>(job.micro_batches)) {
      for (std::size_t c = 0; c < kColumns; ++c) {
        const std::size_t x = static_cast<std::size_t>(a[i]) * kColumns + c;
        const std::size_t y = static_cast<std::size_t>(b[i]) * kColumns + c;
        const double z = in[x] * w[c] - out[y], s = weights_[i] * std::tanh(z) / n;
        loss_ += weights_[i] * std::log(std::cosh(z));
        double of_in = w[c] * s;
        grads_[1][c] += in[x] * s;
        grads_[2][y] -= s;
        for (std::size_t k = a.size(); k < b.size(); ++k) {  // negatives stand behind the tokens
          const std::size_t v = static_cast<std::size_t>(b[k]) * kColumns + c;
          const double q = weights_[i] * std::tanh(in[x] * w[c] + out[v]) / n;
          loss_ += weights_[i] * std::log(std::cosh(in[x] * w[c] + out[v]));
          of_in += w[c] * q;
          grads_[1][c] += in[x] * q;
          grads_[2][v] += q;
        }
        grads_[0][x] += of_in;  // at once: opposite tokens leave nothing
      }
    }
    if (job.bad == std::pair(rank_, step_) && !grads_[0].empty()) grads_[0].back() = std::nan("");
    if (m == job.micro_batches - 1) strategies.loss_known(loss_);
  }

  void note() {
    if (const auto& loss = strategies.last_loss()) losses.push_back(*loss);
    if (strategies.result()) norms.push_back(strategies.gradient_norm());
    if (strategies.result() && !strategies.result()->committed) skipped.push_back(strategies.result()->text);
  }

 public:
  Job job;

 private:
  int rank_, size_;
  std::int64_t step_ = 0;
  std::array<std::vector<std::int64_t>, 2> ids_;
  std::vector<double> weights_;  // of its tokens
  std::array<std::vector<double>, 3> grads_;
  double loss_ = 0;

 public:
  Strategies strategies;
  HybridEmbedding* hybrid = nullptr;
  std::vector<double> w, losses, norms;
  std::vector<std::string> skipped;

 private:
  Walker walker_;
};

// What all ranks have together, as one process would have it.
struct Outcome {
  std::vector<double> in, out;
  std::map<std::string, std::vector<double>> moments;  // by kind and table
  std::vector<double> w, losses, norms;
  std::vector<std::string> skipped;
  std::int64_t counted = 0;
  bool same_bits = true;  // whatever rank looks the tables up
};

inline RunOptions run_options(const Job& job) {
  RunOptions out;
  out.config = Config::from_environment();
  out.decorate = job.decorate;
  return out;
}

inline Outcome train(int size, const Job& job) {
  Outcome all;
  std::mutex mutex;
  run_ranks(size, run_options(job), [&](World& world) {
    Toy toy(world, job);
    try {
      toy.run();
    } catch (...) {
      abandon(toy.strategies, std::current_exception());
      throw;
    }
    if (job.spoils && world.rank() == size - 1)
      reinterpret_cast<double*>(toy.hybrid->table(0).values().data)[0] += 1;
    for (int t = 0; t < 2; ++t) {
      std::vector<double>& into = t == 0 ? all.in : all.out;
      std::vector<std::int64_t> ids(static_cast<std::size_t>(toy.hybrid->table(t).info().rows));
      std::iota(ids.begin(), ids.end(), 0);
      std::vector<double> rows(ids.size() * kColumns);
      toy.hybrid->table(t).look_up(ids, Dense(std::span(rows))).wait();
      const std::lock_guard lock(mutex);
      all.same_bits = all.same_bits && (into.empty() || into == rows);
      into = rows;
    }
    const std::lock_guard lock(mutex);
    if (toy.hybrid->table(0).layout().dealt()) {
      all.counted = toy.hybrid->optimizer().step(0);
      if (world.rank() != 0) return;
      all.w = toy.w;
      all.losses = toy.losses;
      all.norms = toy.norms;
      all.skipped = toy.skipped;
      return;
    }
    const auto place = [&](const Shard& shard, std::span<const std::byte> bytes, std::vector<double>& into) {
      into.resize(static_cast<std::size_t>(shard.tensor_elements()));
      const auto* values = reinterpret_cast<const double*>(bytes.data());
      const auto copy = [&](std::int64_t from, std::int64_t to, std::int64_t n) {
        std::copy_n(values + from, n, into.data() + to);
      };
      for_each_run(shard, Shard::whole(shard.shape), copy);
    };
    std::vector<std::byte> scratch;
    for (const LiveRow& row : toy.hybrid->value_rows("model", "value", {}))
      place(row.row.shard, row.read(scratch), row.row.key.name == "in" ? all.in : all.out);
    for (const LiveRow& row : toy.hybrid->optimizer_rows({})) {
      if (row.row.rule == LayoutRule::moves)
        place(row.row.shard, row.read(scratch), all.moments[row.row.key.kind + " " + row.row.key.name]);
    }
    all.counted = toy.hybrid->optimizer().step(0);
    if (world.rank() == 0) {
      all.w = toy.w;
      all.losses = toy.losses;
      all.norms = toy.norms;
      all.skipped = toy.skipped;
    } else {
      all.same_bits = all.same_bits && (all.w.empty() || all.w == toy.w);
    }
  });
  return all;
}

// The largest difference, relative to values of the order of one.
inline double difference(const OneProcess& one, const Outcome& many) {
  double worst = 0;
  const auto compare = [&](const Rows& rows, const std::vector<double>& values) {
    for (const auto& [id, row] : rows) {
      for (std::size_t c = 0; c < kColumns; ++c)
        worst = std::max(worst, std::abs(row[c] - values[static_cast<std::size_t>(id) * kColumns + c]));
    }
  };
  compare(one.in, many.in);
  compare(one.out, many.out);
  for (int t = 0; t < 2; ++t) {
    const std::string table = t == 0 ? " in" : " out";
    if (many.moments.contains("exp_avg" + table))
      compare(one.moments[t][0], many.moments.at("exp_avg" + table));
    for (const char* kind : {"exp_avg_sq", "sum"}) {
      if (many.moments.contains(kind + table)) compare(one.moments[t][1], many.moments.at(kind + table));
    }
  }
  for (std::size_t c = 0; c < kColumns; ++c) worst = std::max(worst, std::abs(one.w[c] - many.w[c]));
  EXPECT_EQ(one.losses.size(), many.losses.size());
  for (std::size_t s = 0; s < std::min(one.losses.size(), many.losses.size()); ++s)
    worst = std::max(worst, std::abs(one.losses[s] - many.losses[s]));
  return worst;
}

// A sum of at most 30 tokens' gradients in another order: 30 * 2^-53 of values below one, 20 steps, and the
// slope of Adam's rule near moments of zero; the bar of the task is 1e-12.
inline constexpr double kTolerance = 1e-12;

}  // namespace weft::toy
