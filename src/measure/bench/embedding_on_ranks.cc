// One rank's part of a way of `weft bench embedding`: a model of one table and nothing else, walked as in
// training. There is nothing to compute, so a step is its exchanges, one behind the other, and the update.
#include <algorithm>
#include <cmath>
#include <memory>

#include "data_parallel/data_parallel.h"
#include "embedding/hybrid.h"
#include "kernels/rows.h"
#include "measure/bench/embedding.h"
#include "step/run_step.h"

namespace weft {

namespace {

constexpr int kWarmUp = 3;
constexpr double kSecondsPerCase = 1.0;
constexpr int kFewest = 10, kMost = 1000;
constexpr std::size_t kAsked = 256;
constexpr const char* kName = "table";

// A table under data parallelism: all of its gradient is there, and all of it is updated.
struct DenseTable {
  std::vector<float> values, gradient;

  DenseTable(const EmbeddingBench& bench)
      : values(static_cast<std::size_t>(bench.rows * bench.columns)), gradient(values.size()) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto columns = static_cast<std::size_t>(bench.columns);
      values[i] = embedding_value(static_cast<std::int64_t>(i / columns), i % columns);
    }
  }
};

class TableRank final : public Driver {
 public:
  TableRank(const BenchOptions& options, const TableWay& way, const EmbeddingIds& ids, std::uint32_t slot,
            const BenchRank& rank)
      : options_(options),
        bench_(options.embedding),
        ids_(ids),
        rank_(rank),
        strategies_(rank.world.engine(), rank.world.comm(),
                    chain_shape("table", {{kName, {{kName, {bench_.rows, bench_.columns}, true}}}}),
                    {.tokens = false, .lookahead = true, .first_slot = slot}),
        walker_(*this, strategies_) {
    if (way.kind == TableWay::Kind::dense)
      add_dense(way);
    else
      add_hybrid(way);
    strategies_.install();
    const auto columns = static_cast<std::size_t>(bench_.columns);
    gradient_.resize(static_cast<std::size_t>(bench_.tokens + bench_.negatives) * columns);
    for (std::size_t i = 0; i < gradient_.size(); ++i)
      gradient_[i] = embedding_gradient(rank_.world.rank(), i / columns, i % columns);
  }

  EmbeddingMeasured measure() {
    try {
      next_ = ids_.ids(rank_.world.rank(), 0);
      announce();
      for (int i = 0; i < kWarmUp; ++i) seconds_.push_back(step());
      std::vector<double> slowest(1, seconds_.back());
      largest_of_ranks(rank_.world, slowest);
      const double fits = std::min<double>(kMost, kSecondsPerCase / std::max(slowest[0], 1e-9));
      const int iterations =
          options_.iterations > 0 ? options_.iterations : std::max(kFewest, static_cast<int>(fits));
      seconds_.clear();
      for (int i = 0; i < iterations; ++i) seconds_.push_back(step());
      walker_.walk(strategies_.tables(1).settle);
    } catch (...) {
      abandon(strategies_, std::current_exception());
      throw;
    }
    return agree();
  }

  Task<void> compute(Piece piece) override {
    if (piece.work == Work::forward) announce();
    if (piece.work == Work::backward) strategies_.gradient_ready(0, gradient());
    if (piece.work == Work::update && parallel_ != nullptr) update();
    co_return;
  }
  Task<void> wait(Ticket ticket) override {
    ticket.wait();
    co_return;
  }

 private:
  void add_dense(const TableWay& way) {
    dense_ = std::make_unique<DenseTable>(bench_);
    DataParallelOptions o;
    o.scheme.name = "dense";
    o.scheme.all_reduce = way.all_reduce;
    o.scheme.buckets.dense_below = 0;
    o.divisor = 1;
    o.first_slot = strategies_.next_slot(rank_.world.comm());
    const std::vector<ParameterInfo> parameters{{kName, bench_.rows * bench_.columns, 0}};
    parallel_ = &strategies_.add(std::make_unique<DataParallel>(rank_.world.engine(), rank_.world.comm(),
                                                                parameters, o, &strategies_.state()));
    parallel_->give_memory(0, dense_->gradient);
  }

  void add_hybrid(const TableWay& way) {
    HybridOptions o = hybrid_options(way, {.way = std::string(way.name)}, rank_.world.size());
    o.divisor = 1;
    o.optimizer = default_options("sgd");
    o.optimizer.lr = 1;
    o.first_slot = strategies_.next_slot(rank_.world.comm());
    chained_ = o.horizontal;
    const std::vector<TableInfo> tables{{kName, bench_.rows, bench_.columns}};
    hybrid_ = &strategies_.add(
        std::make_unique<HybridEmbedding>(rank_.world.engine(), rank_.world.comm(), tables, o));
    HybridTable& table = hybrid_->table(0);
    const TableLayout& layout = table.layout();
    const BlockRange columns = layout.columns(rank_.world.rank());
    auto* const values = reinterpret_cast<float*>(table.values().data);
    for (std::int32_t row = 0; row < bench_.rows; ++row) {
      if (!layout.holds(row, rank_.world.rank())) continue;
      for (std::int64_t c = 0; c < columns.count; ++c)
        values[layout.place(row) * columns.count + c] =
            embedding_value(row, static_cast<std::size_t>(columns.first + c));
    }
  }

  // Ids are drawn before the clock runs.
  double step() {
    std::vector<std::int64_t> now = std::move(next_);
    next_ = ids_.ids(rank_.world.rank(), steps_ + 1);
    if (dense_ != nullptr) list_ = unique_ids(now);
    ++steps_;
    const Time start = clock_.now();
    walker_.walk(strategies_.next_table(1));
    return seconds(clock_.now() - start);
  }
  void announce() {
    const std::array<BatchInfo::Lookup, 1> lookups{{{kName, next_}}};
    strategies_.batch_known({.tokens = bench_.tokens, .lookups = lookups});
  }

  std::span<const float> gradient() {
    const auto columns = static_cast<std::size_t>(bench_.columns);
    if (hybrid_ != nullptr)
      return std::span<const float>(gradient_).first(static_cast<std::size_t>(hybrid_->table(0).num_rows()) *
                                                     columns);
    std::ranges::fill(dense_->gradient, 0.0F);
    place_rows(std::span<const float>(gradient_).first(list_.size() * columns), {columns, 0, columns}, list_,
               std::span<float>(dense_->gradient));
    return dense_->gradient;
  }
  void update() {
    for (std::size_t i = 0; i < dense_->values.size(); ++i) dense_->values[i] -= dense_->gradient[i];
    sent_ += static_cast<double>(parallel_->result(0).entry_bytes_sent());
  }

  EmbeddingMeasured::Sent sent() const {
    if (hybrid_ == nullptr) return {.gradients = sent_};
    const auto bytes = [this](TableExchange e) {
      return static_cast<double>(hybrid_->table(0).sent_bytes(e));
    };
    return {.ids = bytes(TableExchange::ids),
            .rows = bytes(TableExchange::rows) + bytes(TableExchange::early),
            .gradients = bytes(TableExchange::prior) + bytes(TableExchange::delayed)};
  }

  // Rows of the last batch of rank 0, which all ranks look up.
  void look_up(EmbeddingMeasured& m) {
    m.asked = ids_.ids(0, steps_ - 1);
    m.asked.resize(std::min(m.asked.size(), kAsked));
    const auto columns = static_cast<std::size_t>(bench_.columns);
    m.values.resize(m.asked.size() * columns);
    if (hybrid_ != nullptr) {
      hybrid_->table(0).look_up(m.asked, Dense(std::span(m.values))).wait();
    } else {
      const std::vector<std::int32_t> rows(m.asked.begin(), m.asked.end());
      gather_rows(std::span<const float>(dense_->values), {columns, 0, columns}, rows, std::span(m.values));
    }
    if (options_.spoil && rank_.world.rank() == 0) m.values[0] += 1;
  }

  EmbeddingMeasured agree() {
    EmbeddingMeasured m;
    m.steps = steps_;
    m.looked_up = steps_ + (chained_ ? 1 : 0);
    m.announced = steps_ + 1;
    m.seconds = seconds_;
    look_up(m);
    World& world = rank_.world;
    largest_of_ranks(world, m.seconds);
    m.same_bits = same_on_ranks(world, {m.values.begin(), m.values.end()});
    const EmbeddingMeasured::Sent mine = sent();
    std::vector<double> all(3 * static_cast<std::size_t>(world.size()));
    const std::size_t at = 3 * static_cast<std::size_t>(world.rank());
    all[at] = mine.ids;
    all[at + 1] = mine.rows;
    all[at + 2] = mine.gradients;
    largest_of_ranks(world, all);
    for (std::size_t r = 0; r < all.size(); r += 3) m.sent.push_back({all[r], all[r + 1], all[r + 2]});
    return m;
  }

  const BenchOptions& options_;
  const EmbeddingBench& bench_;
  const EmbeddingIds& ids_;
  const BenchRank& rank_;
  SteadyClock clock_;
  std::unique_ptr<DenseTable> dense_;  // outlives the strategies that name its memory
  Strategies strategies_;
  Walker walker_;
  HybridEmbedding* hybrid_ = nullptr;
  DataParallel* parallel_ = nullptr;
  bool chained_ = false;  // the rows of a step that has not begun are fetched
  std::int64_t steps_ = 0;
  std::vector<std::int64_t> next_;  // ids of the batch that is announced next
  std::vector<std::int32_t> list_;  // of the step that is walked
  std::vector<float> gradient_;
  std::vector<double> seconds_;
  double sent_ = 0;
};

}  // namespace

EmbeddingMeasured measure_embedding(const BenchOptions& options, const TableWay& way, const EmbeddingIds& ids,
                                    std::uint32_t slot, const BenchRank& rank) {
  return TableRank(options, way, ids, slot, rank).measure();
}

}  // namespace weft
