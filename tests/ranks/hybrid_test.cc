// Hybrid embeddings against one process: a small model with two tables and a dense vector, float64.
//
// A token reads row a of table "in" and row b of table "out"; with z = in[a] * w - out[b] its loss is the sum
// over columns of log(cosh(z)). The batch of a step is dealt to the ranks unevenly, one of them gets nothing
// in some steps. The reference is a plain loop over all tokens, with rows in a map and the optimizers' rules
// written out once more.
#include "embedding/hybrid.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <mutex>
#include <numeric>
#include <set>

#include "data_parallel/data_parallel.h"
#include "step_toys.h"
#include "weft/error.h"
#include "weft/random.h"
#include "weft/world.h"

namespace weft {
namespace {

constexpr std::int64_t kRowsIn = 61, kRowsOut = 45, kColumns = 7;
constexpr std::int64_t kPadding = 3;  // of "in"
constexpr std::int64_t kSteps = 20;

struct Token {
  std::int64_t in = 0, out = 0;
};

std::int64_t skewed(Random& random, std::int64_t rows) {  // small ids more often
  const double u = random.uniform();
  return static_cast<std::int64_t>(u * u * u * static_cast<double>(rows));
}

std::vector<Token> batch_of(std::int64_t step) {
  Random random(7, 1, static_cast<std::uint32_t>(step));
  std::vector<Token> out(20 + random.below(8));
  for (Token& token : out) token = {skewed(random, kRowsIn), skewed(random, kRowsOut)};
  out[0].in = kPadding;
  return out;
}

// Token i of a step: whose it is. The last rank has none in every third step.
int rank_of(std::int64_t step, std::size_t i, int size) {
  Random random(9, 2, static_cast<std::uint32_t>(step), static_cast<std::uint32_t>(i));
  const int others = size > 1 && step % 3 == 2 ? size - 1 : size;
  return static_cast<int>(random.below(static_cast<std::uint32_t>(others)));
}

double initial(std::uint32_t tensor, std::int64_t row, std::int64_t column) {
  return Random(11, tensor, static_cast<std::uint32_t>(row), static_cast<std::uint32_t>(column)).uniform() -
         0.5;
}

constexpr double kLrDense = 0.05;
double lr_of(std::int64_t step) { return 0.05 / (1.0 + 0.1 * static_cast<double>(step)); }

OptimizerOptions optimizer(const std::string& name) {
  OptimizerOptions out = default_options(name);
  out.lr = lr_of(0);
  if (name == "adagrad") out.lr_decay = 0.01;
  return out;
}

using Rows = std::map<std::int64_t, std::vector<double>>;

// How an implementation could be wrong.
struct Faults {
  bool counts_each_part = false;  // two updates a step, each of which counts
  bool own_next_only = false;     // a row that only another rank reads next is late
  bool duplicates = false;        // the rule sees a row once for each token
  bool divides_twice = false;
  bool drops_zeros = false;  // rows whose gradient is zero are not touched
  bool updates_padding = false;
  bool touches_all = false;  // dense Adam: moments of all rows decay
};

struct OneProcess {
  OptimizerOptions options;
  Faults faults;
  Rows in, out, moments[2][2];  // of each table
  std::vector<double> w;
  std::vector<double> losses, norms;
  std::int64_t counted = 0;

  OneProcess(const std::string& name, std::int64_t steps, Faults wrong = {}, double clip = 0, int size = 1,
             std::int64_t bad = -1)
      : options(optimizer(name)), faults(wrong) {
    for (std::int64_t r = 0; r < kRowsIn; ++r) in[r] = row(1, r);
    for (std::int64_t r = 0; r < kRowsOut; ++r) out[r] = row(2, r);
    w = row(3, 0);
    for (std::int64_t step = 0; step < steps; ++step) {
      if (step != bad) train(step, clip, size);
    }
  }
  static std::vector<double> row(std::uint32_t tensor, std::int64_t r) {
    std::vector<double> values;
    for (std::int64_t c = 0; c < kColumns; ++c) values.push_back(initial(tensor, r, c));
    return values;
  }

  void train(std::int64_t step, double clip, int size) {
    const std::vector<Token> tokens = batch_of(step);
    const double n = static_cast<double>(tokens.size()) * (faults.divides_twice ? 2 : 1);
    std::vector<std::pair<std::int64_t, std::vector<double>>> grads[2];
    std::vector<double> grad_w(kColumns, 0);
    double loss = 0;
    for (const Token& t : tokens) {
      std::vector<double> gi(kColumns), go(kColumns);
      for (std::size_t c = 0; c < kColumns; ++c) {
        const double e = in[t.in][c], z = e * w[c] - out[t.out][c], s = std::tanh(z) / n;
        loss += std::log(std::cosh(z));
        gi[c] = w[c] * s;
        go[c] = -s;
        grad_w[c] += e * s;
      }
      if (t.in != kPadding || faults.updates_padding) grads[0].emplace_back(t.in, gi);
      grads[1].emplace_back(t.out, go);
    }
    losses.push_back(loss / static_cast<double>(tokens.size()));
    Rows sums[2];
    double squares = 0;
    for (int t = 0; t < 2; ++t) {
      for (const auto& [id, g] : grads[t]) {
        std::vector<double>& sum = sums[t].try_emplace(id, kColumns, 0.0).first->second;
        for (std::size_t c = 0; c < kColumns; ++c) sum[c] += g[c];
      }
      for (const auto& [id, g] : sums[t]) {
        for (const double v : g) squares += v * v;
      }
    }
    for (const double v : grad_w) squares += v * v;
    const double norm = std::sqrt(squares), scale = clip > 0 ? std::min(1.0, clip / (norm + 1e-6)) : 1;
    norms.push_back(norm);
    counted += faults.counts_each_part ? 2 : 1;
    for (int t = 0; t < 2; ++t) {
      Rows& table = t == 0 ? in : out;
      if (faults.touches_all) {
        for (auto& [id, unused] : table) sums[t].try_emplace(id, kColumns, 0.0);
      }
      if (faults.duplicates) {
        for (const auto& [id, g] : grads[t]) update(t, table[id], id, g, scale, lr_of(step));
        continue;
      }
      for (const auto& [id, g] : sums[t]) {
        if (faults.drops_zeros && id % 5 == 0) continue;
        if (faults.own_next_only && late(step, t, id, size)) continue;
        update(t, table[id], id, g, scale, lr_of(step));
      }
    }
    for (std::size_t c = 0; c < kColumns; ++c) w[c] -= kLrDense * scale * grad_w[c];
  }

  // Read in the next step, but not by a rank that has a gradient for it.
  static bool late(std::int64_t step, int table, std::int64_t id, int size) {
    std::set<int> have, read;
    const auto note = [&](std::int64_t s, std::set<int>& ranks) {
      const std::vector<Token> tokens = batch_of(s);
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        if ((table == 0 ? tokens[i].in : tokens[i].out) == id) ranks.insert(rank_of(s, i, size));
      }
    };
    note(step, have);
    note(step + 1, read);
    for (const int r : have) read.erase(r);
    return !read.empty();
  }

  void update(int t, std::vector<double>& value, std::int64_t id, const std::vector<double>& g, double scale,
              double lr) {
    std::vector<double>& m = moments[t][0].try_emplace(id, kColumns, 0.0).first->second;
    std::vector<double>& v = moments[t][1].try_emplace(id, kColumns, 0.0).first->second;
    const double step = static_cast<double>(counted);
    for (std::size_t c = 0; c < kColumns; ++c) {
      const double x = scale * g[c];
      if (options.name == "sgd") value[c] -= lr * x;
      if (options.name == "adagrad") {
        v[c] += x * x;
        value[c] -= lr / (1 + (step - 1) * options.lr_decay) * x / (std::sqrt(v[c]) + options.eps);
      }
      if (options.name != "adam" && options.name != "adamw") continue;
      if (options.name == "adamw") value[c] *= 1 - lr * options.weight_decay;
      m[c] = options.beta1 * m[c] + (1 - options.beta1) * x;
      v[c] = options.beta2 * v[c] + (1 - options.beta2) * x * x;
      const double size =
          lr * std::sqrt(1 - std::pow(options.beta2, step)) / (1 - std::pow(options.beta1, step));
      value[c] -= size * m[c] / (std::sqrt(v[c]) + options.eps);
    }
  }
};

struct Schedule {
  const char* name;
  bool lookahead, horizontal, vertical, two_sided;
};
constexpr Schedule kSchedules[] = {
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
};

ModelShape shape() {
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
    o.split_below = 1;
    o.cut = job.cut;
    o.owners = job.owners;
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
        if (job.cut == TableCut::rows && layout.owner(r) != rank_) continue;
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
        const double z = in[x] * w[c] - out[y], s = std::tanh(z) / n;
        loss_ += std::log(std::cosh(z));
        grads_[0][x] += w[c] * s;
        grads_[1][c] += in[x] * s;
        grads_[2][y] -= s;
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
  std::vector<double> in = std::vector<double>(kRowsIn * kColumns),
                      out = std::vector<double>(kRowsOut * kColumns);
  std::map<std::string, std::vector<double>> moments;  // by kind and table
  std::vector<double> w, losses, norms;
  std::vector<std::string> skipped;
  std::int64_t counted = 0;
};

Outcome train(int size, const Job& job) {
  Outcome all;
  std::mutex mutex;
  run_ranks(size, [&](World& world) {
    Toy toy(world, job);
    try {
      toy.run();
    } catch (...) {
      abandon(toy.strategies, std::current_exception());
      throw;
    }
    for (int t = 0; t < 2; ++t) {
      std::vector<double>& into = t == 0 ? all.in : all.out;
      std::vector<std::int64_t> ids(static_cast<std::size_t>(toy.hybrid->table(t).info().rows));
      std::iota(ids.begin(), ids.end(), 0);
      std::vector<double> rows(ids.size() * kColumns);
      toy.hybrid->table(t).look_up(ids, Dense(std::span(rows))).wait();
      const std::lock_guard lock(mutex);
      EXPECT_TRUE(world.rank() == 0 || into == rows || into == std::vector<double>(rows.size()));
      into = rows;
    }
    const std::lock_guard lock(mutex);
    if (job.cut == TableCut::rows) {
      if (world.rank() == 0) all.w = toy.w;
      if (world.rank() == 0) all.losses = toy.losses;
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
      EXPECT_EQ(all.w.empty() || all.w == toy.w, true);
    }
  });
  return all;
}

// The largest difference, relative to values of the order of one.
double difference(const OneProcess& one, const Outcome& many) {
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
constexpr double kTolerance = 1e-12;

class HybridSizes : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, HybridSizes, ::testing::Values(1, 2, 3, 4, 8));  // 8: more than columns

TEST_P(HybridSizes, EqualOneProcessWithEveryOptimizer) {
  for (const char* name : {"sgd", "adagrad", "adam", "adamw"}) {
    const Outcome many = train(GetParam(), {.optimizer = name});
    EXPECT_LE(difference(OneProcess(name, kSteps), many), kTolerance) << name;
    EXPECT_EQ(many.counted, kSteps);
  }
}

TEST_P(HybridSizes, SchedulingChangesNoBit) {
  const Outcome expected = train(GetParam(), {.schedule = kSchedules[0]});
  EXPECT_LE(difference(OneProcess("adam", kSteps), expected), kTolerance);
  for (const Schedule& schedule : kSchedules) {
    for (const std::int64_t settle_every : {0, 3}) {
      const Outcome many = train(GetParam(), {.schedule = schedule, .settle_every = settle_every});
      EXPECT_EQ(many.in, expected.in) << schedule.name;
      EXPECT_EQ(many.out, expected.out) << schedule.name;
      EXPECT_EQ(many.moments, expected.moments) << schedule.name;
      EXPECT_EQ(many.losses, expected.losses) << schedule.name;
    }
  }
}

TEST_P(HybridSizes, EveryCutEqualsOneProcess) {
  const OneProcess one("adam", kSteps);
  for (const Schedule& schedule : kSchedules) {
    for (const int owners : {1, (GetParam() + 3) / 4, GetParam()}) {
      const Job job{.schedule = schedule, .cut = TableCut::rows, .owners = owners};
      EXPECT_LE(difference(one, train(GetParam(), job)), kTolerance) << schedule.name << " " << owners;
    }
    EXPECT_LE(difference(one, train(GetParam(), {.schedule = schedule, .cut = TableCut::none})), kTolerance);
  }
  const OneProcess clipped("adam", kSteps, {}, 0.15);
  for (const TableCut cut : {TableCut::rows, TableCut::none})
    EXPECT_LE(difference(clipped, train(GetParam(), {.clip = 0.15, .cut = cut})), kTolerance);
}

TEST_P(HybridSizes, MicroBatchesAreCoalesced) {
  const Outcome many = train(GetParam(), {.micro_batches = 3});
  EXPECT_LE(difference(OneProcess("adam", kSteps), many), kTolerance);
}

TEST_P(HybridSizes, ClippingIsThatOfOneProcess) {
  const double clip = 0.15;
  const OneProcess one("adam", kSteps, {}, clip);
  for (const Schedule& schedule : kSchedules) {
    const Outcome many = train(GetParam(), {.schedule = schedule, .clip = clip});
    EXPECT_LE(difference(one, many), kTolerance) << schedule.name;
    ASSERT_EQ(many.norms.size(), one.norms.size());
    for (std::size_t s = 0; s < one.norms.size(); ++s) EXPECT_NEAR(many.norms[s], one.norms[s], kTolerance);
  }
  EXPECT_GT(one.norms[0], clip);  // it was clipped at all
  EXPECT_GT(difference(OneProcess("adam", kSteps), train(GetParam(), {.clip = clip})), 1e-3);  // control
}

// A job of one size is saved between steps and goes on with another: as if it had always had that size.
TEST(Hybrid, StateMovesToAnotherNumberOfRanks) {
  const std::int64_t half = 9;
  const auto registered = [](Toy& toy, const Comm& comm) {
    const Peers peers{comm.rank(), comm.size()};
    toy.strategies.state().add(
        "model", {.rows = [&toy, peers] { return toy.hybrid->value_rows("model", "value", peers); },
                  .missing = {},
                  .commit = {},
                  .roll_back = {}});
    toy.strategies.state().add("optimizer",
                               {.rows = [&toy, peers] { return toy.hybrid->optimizer_rows(peers); },
                                .missing = {},
                                .commit = {},
                                .roll_back = {}});
  };
  for (const TableCut cut : {TableCut::columns, TableCut::none}) {
    std::vector<StateSnapshot> saved(4);
    std::vector<double> w;
    run_ranks(4, [&](World& world) {
      Toy toy(world, {.steps = half, .cut = cut});
      registered(toy, world.comm());
      toy.run();
      saved[static_cast<std::size_t>(world.rank())] = toy.strategies.state().save(world.rank(), world.size());
      if (world.rank() == 0) w = toy.w;
    });
    const OneProcess one("adam", kSteps);
    for (const int size : {1, 2, 3, 4, 8}) {
      const auto go_on = [&](bool loads) {
        double worst = 0;
        std::mutex mutex;
        run_ranks(size, [&](World& world) {
          Toy toy(world, {.first = half, .cut = cut});
          registered(toy, world.comm());
          if (loads) toy.strategies.state().load(saved, world.rank(), world.size());
          toy.w = w;
          toy.run();
          std::vector<std::int64_t> ids(kRowsIn);
          std::iota(ids.begin(), ids.end(), 0);
          std::vector<double> rows(ids.size() * kColumns);
          toy.hybrid->table(0).look_up(ids, Dense(std::span(rows))).wait();
          const std::lock_guard lock(mutex);
          EXPECT_EQ(toy.hybrid->optimizer().step(0), loads ? kSteps : kSteps - half);
          for (const auto& [id, row] : one.in) {
            for (std::size_t c = 0; c < kColumns; ++c)
              worst = std::max(worst, std::abs(row[c] - rows[static_cast<std::size_t>(id) * kColumns + c]));
          }
        });
        return worst;
      };
      EXPECT_LE(go_on(true), kTolerance) << size;
      EXPECT_GT(go_on(false), 1e-3) << size;  // control
    }
  }
}

TEST(Hybrid, WhatCouldBeWrongIsSeen) {
  const auto broken = [](Faults faults) {
    return difference(OneProcess("adam", kSteps, faults, 0, 4), train(4, {}));
  };
  EXPECT_LE(broken({}), kTolerance);
  EXPECT_GT(broken({.counts_each_part = true}), 1e-6);
  EXPECT_GT(broken({.own_next_only = true}), 1e-6);
  EXPECT_GT(broken({.duplicates = true}), 1e-6);
  EXPECT_GT(broken({.divides_twice = true}), 1e-6);
  EXPECT_GT(broken({.drops_zeros = true}), 1e-6);
  EXPECT_GT(broken({.updates_padding = true}), 1e-6);
  EXPECT_GT(broken({.touches_all = true}), 1e-6);
}

// Lists of a table in a step, rank by rank.
std::vector<std::set<std::int64_t>> lists_of(int table, std::int64_t step, int size) {
  std::vector<std::set<std::int64_t>> out(static_cast<std::size_t>(size));
  const std::vector<Token> tokens = batch_of(step);
  for (std::size_t i = 0; i < tokens.size(); ++i)
    out[static_cast<std::size_t>(rank_of(step, i, size))].insert(table == 0 ? tokens[i].in : tokens[i].out);
  return out;
}

TEST_P(HybridSizes, BytesAreThoseOfTheFormulas) {
  const int size = GetParam();
  for (const Schedule& schedule : kSchedules) {
    run_ranks(size, [&](World& world) {
      Toy toy(world, {.schedule = schedule});
      toy.run();
      for (int t = 0; t < 2; ++t) {
        const HybridTable& table = toy.hybrid->table(t);
        const auto width = static_cast<std::uint64_t>(table.columns(world.rank()).count);
        std::uint64_t ids = 0, rows = 0, gradients = 0;
        // With lookahead the ids and, where it is chained, the rows of a step behind the last one travel too.
        const std::int64_t announced = kSteps + (schedule.lookahead ? 1 : 0);
        const std::int64_t looked_up = kSteps + (schedule.lookahead && schedule.horizontal ? 1 : 0);
        for (std::int64_t step = 0; step < announced; ++step) {
          const auto lists = lists_of(t, step, size);
          std::uint64_t mine = lists[static_cast<std::size_t>(world.rank())].size(), all = 0;
          for (const auto& list : lists) all += list.size();
          ids += 4 * mine * static_cast<std::uint64_t>(size - 1);
          if (step < looked_up) rows += 8 * width * (all - mine);
          if (t == 0) mine -= lists[static_cast<std::size_t>(world.rank())].count(kPadding);
          if (step < kSteps) gradients += 8 * (kColumns - width) * mine;
        }
        EXPECT_EQ(table.sent_bytes(TableExchange::ids), ids);
        EXPECT_EQ(table.sent_bytes(TableExchange::rows) + table.sent_bytes(TableExchange::early), rows);
        EXPECT_EQ(table.sent_bytes(TableExchange::prior) + table.sent_bytes(TableExchange::delayed),
                  gradients);
        const bool splits = schedule.vertical && schedule.lookahead && size > 1 && width < kColumns;
        EXPECT_EQ(table.sent_bytes(TableExchange::delayed) > 0, splits) << schedule.name;
        EXPECT_EQ(table.sent_bytes(TableExchange::early) > 0, schedule.two_sided && size > 1 && width > 0);
      }
    });
  }
}

TEST_P(HybridSizes, ALookupIsPlainIndexing) {
  run_ranks(GetParam(), [&](World& world) {
    Toy toy(world, {});
    const std::vector<std::int64_t> ids{5, 0, 5, kPadding, kRowsIn - 1, world.rank()};
    const std::size_t asked = world.rank() == 1 ? 0 : ids.size();  // a rank may ask for nothing
    std::vector<double> rows(asked * kColumns);
    toy.hybrid->table(0).look_up(std::span(ids).first(asked), Dense(std::span(rows))).wait();
    for (std::size_t i = 0; i < asked; ++i) {
      for (std::int64_t c = 0; c < kColumns; ++c)
        EXPECT_EQ(rows[i * kColumns + static_cast<std::size_t>(c)], initial(1, ids[i], c));
    }
  });
}

TEST(Hybrid, ASplitThatGainsNothingIsSwitchedOff) {
  run_ranks(2, [&](World& world) {
    HybridOptions o;
    o.optimizer = optimizer("sgd");
    Strategies all(world.engine(), world.comm(), chain_shape("one", {{"in", {{"in", {50, 4}, true}}}}),
                   {.tokens = false, .lookahead = true});
    o.first_slot = all.next_slot(world.comm());
    const std::vector<TableInfo> tables{{"in", 50, 4}};
    HybridTable& table =
        all.add(std::make_unique<HybridEmbedding>(world.engine(), world.comm(), tables, o)).table(0);
    all.install();
    struct Plain final : WaitingDriver {
      Strategies* all = nullptr;
      HybridTable* table = nullptr;
      std::vector<std::int64_t> ids;
      std::vector<float> gradient;
      void announce() {
        const std::array<BatchInfo::Lookup, 1> lookups{{{"in", ids}}};
        all->batch_known({.tokens = 1, .lookups = lookups});
      }
      Task<void> compute(Piece piece) override {
        if (piece.work == Work::forward) announce();
        if (piece.work == Work::backward) {
          gradient.assign(static_cast<std::size_t>(table->rows().count), 1.0F);
          all->gradient_ready(0, std::span<const float>(gradient));
        }
        co_return;
      }
    } driver;
    driver.all = &all;
    driver.table = &table;
    driver.ids = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
    Walker walker(driver, all);
    driver.announce();
    walker.walk(all.next_table(1));  // the next batch is the same: all rows are prior
    walker.walk(all.next_table(1));
    walker.walk(all.tables(1).settle);
    EXPECT_EQ(table.prior_share(), 1);
    EXPECT_FALSE(table.splits());
  });
}

TEST(Hybrid, BadInputIsNamed) {
  const auto text_of = [](const auto& f) {
    std::mutex mutex;
    std::string text;
    try {
      run_ranks(2, [&](World& world) {
        try {
          f(world);
        } catch (const Error& e) {
          const std::lock_guard lock(mutex);
          if (dynamic_cast<const UsageError*>(&e) != nullptr || text.empty()) text = e.what();
          world.engine().abandon(std::current_exception());
          throw;
        }
      });
    } catch (const Error&) {
      return text;
    }
    return std::string("nothing was thrown");
  };
  const auto make = [](World& world, std::int64_t columns, const OptimizerOptions& o) {
    HybridOptions options;
    options.optimizer = o;
    const std::vector<TableInfo> tables{{"in", 50, columns}};
    return std::make_unique<HybridEmbedding>(world.engine(), world.comm(), tables, options);
  };
  EXPECT_EQ(text_of([&](World& world) {
              const auto hybrid = make(world, 4, optimizer("sgd"));
              const std::vector<std::int64_t> ids{4, world.rank() == 1 ? 50 : 49};
              const std::array<BatchInfo::Lookup, 1> lookups{{{"in", ids}}};
              hybrid->batch_known({.tokens = 2, .lookups = lookups});
              hybrid->ticket(0, 0).wait();
            }),
            "rank 1: the batch has id 50 of table 'in', which has rows 0 to 49");
  EXPECT_NE(text_of([&](World& world) {
              const auto hybrid = make(world, world.rank() == 0 ? 4 : 5, optimizer("sgd"));
              hybrid->ticket(0, 0).wait();
            }).find("another plan of tables"),
            std::string::npos);
  OptimizerOptions momentum = optimizer("sgd");
  momentum.momentum = 0.9;
  EXPECT_NE(
      text_of([&](World& world) { make(world, 4, momentum); }).find("sgd with momentum moves every row"),
      std::string::npos);
  EXPECT_NE(text_of([&](World& world) {
              const auto hybrid = make(world, 4, optimizer("sgd"));
              hybrid->step_begin();
              hybrid->table(0).start(TableExchange::ids, 0);
            }).find("was not announced"),
            std::string::npos);
}

TEST(Hybrid, AStepThatIsNotFiniteIsLeftOutOnAllRanks) {
  const Outcome many = train(3, {.bad = {1, 4}, .skips = true});
  EXPECT_LE(difference(OneProcess("adam", kSteps, {}, 0, 3, 4),
                       [&] {
                         // The loss of the step that was left out is known all the same.
                         Outcome without = many;
                         without.losses.erase(without.losses.begin() + 4);
                         return without;
                       }()),
            kTolerance);
  EXPECT_EQ(many.counted, kSteps - 1);
  ASSERT_EQ(many.skipped.size(), 1U);
}

TEST(Hybrid, WithoutSkippingItEndsTheJobAndNamesTheRow) {
  std::mutex mutex;
  std::vector<std::string> texts;
  EXPECT_THROW(run_ranks(3,
                         [&](World& world) {
                           Toy toy(world, {.bad = {1, 4}});
                           try {
                             toy.run();
                           } catch (const Error& e) {
                             abandon(toy.strategies, std::current_exception());
                             const std::lock_guard lock(mutex);
                             texts.emplace_back(e.what());
                             throw;
                           }
                         }),
               Error);
  EXPECT_EQ(texts.size(), 3U);
  EXPECT_TRUE(std::ranges::any_of(texts, [](const std::string& t) {
    return t.find("of table 'in' is not finite") != std::string::npos;
  })) << texts[0];
}

}  // namespace
}  // namespace weft
