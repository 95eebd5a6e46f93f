#include "embedding/table.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "base/large_vector.h"
#include "embedding/formula.h"
#include "embedding/row_fetch.h"
#include "embedding/row_lists.h"
#include "embedding/row_sum.h"
#include "kernels/rows.h"
#include "weft/error.h"

namespace weft {

HybridTable::HybridTable(Engine& engine, const Comm& comm, const TableInfo& info,
                         const HybridOptions& options, std::uint32_t first_slot, Optimizer& optimizer,
                         int parameter)
    : engine_(engine),
      comm_(comm),
      info_(info),
      options_(options),
      layout_(layout_of(info, options, comm.size())),
      first_slot_(first_slot),
      optimizer_(optimizer),
      parameter_(parameter),
      splits_(options.vertical) {}

// Class outranks priority: only what is read first may go before all gradients. What is read later goes among
// them, by its place of use.
TrafficClass HybridTable::traffic(TableExchange e) const {
  if (e == TableExchange::delayed) return TrafficClass::delayed;
  return e == TableExchange::ids || info_.use == 0 ? TrafficClass::prior : TrafficClass::gradient;
}

SubmitOptions HybridTable::submit_options(TableExchange e) {
  return {.name = name_of(e),
          .traffic = traffic(e),
          .priority = info_.use,
          .slot = slot(e),
          .step = attempts_[static_cast<std::size_t>(e)]++};
}

void HybridTable::check(std::span<const std::int64_t> ids) const {
  for (const std::int64_t id : ids) {
    if (id >= 0 && id < info_.rows) continue;
    throw UsageError("rank " + std::to_string(comm_.rank()) + ": the batch has id " + std::to_string(id) +
                     " of table '" + info_.name + "', which has rows 0 to " + std::to_string(info_.rows - 1));
  }
}

void HybridTable::announce(std::span<const std::int64_t> ids, bool reads) {
  check(ids);
  reads_ = reads;
  pending_.assign(ids.begin(), ids.end());
  announced_ = true;
}

Shard HybridTable::shard() const {
  if (layout_.dealt())
    throw UsageError("table '" + info_.name +
                     "' is dealt by rows, for comparisons: it is neither saved nor loaded");
  const BlockRange mine = columns(comm_.rank());
  return Shard::range({info_.rows, info_.columns}, 1, mine.first, mine.count);
}

namespace {

template <class T>
class Table final : public HybridTable {
 public:
  Table(Engine& engine, const Comm& comm, const TableInfo& info, const HybridOptions& options,
        std::uint32_t first_slot, Optimizer& optimizer, int parameter)
      : HybridTable(engine, comm, info, options, first_slot, optimizer, parameter),
        rules_{.layout = &layout_,
               .gather = options.gather,
               .rows = info.rows,
               .columns = info.columns,
               .divisor = options.divisor},
        width_(static_cast<std::size_t>(columns(comm.rank()).count)),
        values_(static_cast<std::size_t>(layout_.memory_rows(comm.rank())) * width_) {
    for (Step& step : steps_) step.ids.of_rank.resize(static_cast<std::size_t>(comm.size()));
  }

  void start(TableExchange exchange, int offset) override {
    switch (exchange) {
      case TableExchange::ids:
        return start_ids(step(offset));
      case TableExchange::early:
        return start_early(step(offset), step(offset + 1), step(offset + 2));
      case TableExchange::rows:
        return start_rows(step(offset), step(offset + 1));
      case TableExchange::update:
        return start_update(step(offset));
      case TableExchange::prior:
      case TableExchange::delayed:
        return;  // inside a backward: gradient_ready()
    }
  }

  void gradient_ready(std::span<const float> gradient) override { take(gradient); }
  void gradient_ready(std::span<const double> gradient) override { take(gradient); }

  Ticket ticket(TableExchange exchange, int offset) const override {
    const Step& s = steps_[index(offset)];
    return s.number == walked_ - offset ? s.tickets[static_cast<std::size_t>(exchange)] : Ticket();
  }

  std::vector<Ticket> work() const override {
    std::vector<Ticket> out;
    out.reserve(std::size(steps_));
    for (const Step& s : steps_) out.push_back(s.split);
    return out;
  }

  std::string trouble() const override {
    const Step& s = ended();
    return s.prior.sum.bad() < 0 ? "" : text_of(s, s.prior);
  }
  double squares() const override { return sum_of_squares(ended().prior.sum.values()); }
  void close(bool committed, double scale) override {
    Step& s = steps_[static_cast<std::size_t>(ended_ % 3)];
    s.applies = committed;
    s.scale = scale;
    closed_ = ended_;
    if (committed) optimizer_.count_step(parameter_);
  }

  Dense rows() override { return Dense(std::span<T>(step(0).rows)); }
  std::span<const std::int32_t> ids() const override { return own(steps_[index(0)]); }
  std::span<const std::int32_t> places() const override { return steps_[index(0)].places; }
  std::uint64_t step_bytes() const override { return closed_ < 0 ? 0 : closed().sent; }
  std::int64_t formula_bytes(const LinkCost& link) const override {
    if (closed_ < 0) return 0;
    const Step& s = closed();
    TableBatch batch{.rows = info_.rows,
                     .columns = info_.columns,
                     .value_bytes = sizeof(T),
                     .padding = info_.padding,
                     .lists = s.ids.of_rank,
                     .tokens = std::vector<std::int64_t>(s.ids.of_rank.size())};
    const auto me = static_cast<std::size_t>(comm_.rank());
    for (const std::int32_t place : s.places)
      batch.tokens[me] += own(s)[static_cast<std::size_t>(place)] == info_.padding ? 0 : 1;
    return table_traffic(layout_, options_.gather, batch, link).ports[me].all_sent();
  }
  std::int64_t num_rows() const override { return static_cast<std::int64_t>(own(steps_[index(0)]).size()); }
  Dense values() override { return Dense(std::span<T>(values_)); }

  Ticket look_up(std::span<const std::int64_t> ids, Dense out) override {
    check(ids);
    if (out.dtype != dtype_of<T>() || out.count != static_cast<std::int64_t>(ids.size()) * info_.columns)
      throw UsageError("table '" + info_.name +
                       "': rows are looked up into memory of another length or type");
    auto asked = std::make_shared<Asked>();
    asked->out = {reinterpret_cast<T*>(out.data), static_cast<std::size_t>(out.count)};
    asked->step.ids.of_rank.resize(static_cast<std::size_t>(comm_.size()));
    own(asked->step) = unique_ids(ids);
    asked->step.places = places_of(ids, own(asked->step));
    SubmitOptions submit = submit_options(TableExchange::rows);
    submit.traffic = TrafficClass::blocking;
    return engine_.submit(comm_, submit,
                          [this, asked](Comm comm) { return answer(comm, this, asked.get()); });
  }

 private:
  // Rows of a step whose gradients travel together.
  struct Part {
    RowSum<T> sum;
    RowPull<T> pull;  // TableCut::pushed
  };
  struct Step {
    std::int64_t number = -1;
    RowLists ids;
    std::vector<std::int32_t> places;  // of this rank's tokens in its list
    std::vector<T> rows;               // of that list, all columns
    RowLists early, late;              // of the ids, where some were looked up in advance
    bool reads = true;
    RowFetch<T> early_fetch, fetch;
    std::span<const T> gradient;
    std::vector<T> zeros;
    Part prior, delayed;
    Optimizer::At at;
    bool applies = false;  // updates that wait: the step was committed, and so far nothing was done with it
    double scale = 1;
    std::uint64_t sent = 0;  // payload of its exchanges; the engine's thread adds
    Ticket split;
    std::array<Ticket, kTableExchanges> tickets;
    Ticket& ticket(TableExchange e) { return tickets[static_cast<std::size_t>(e)]; }
  };
  struct Asked {
    Step step;
    std::span<T> out;
  };

  std::size_t index(int offset) const { return static_cast<std::size_t>(((walked_ - offset) % 3 + 3) % 3); }
  const Step& closed() const { return steps_[static_cast<std::size_t>(closed_ % 3)]; }
  const Step& ended() const { return steps_[static_cast<std::size_t>(ended_ % 3)]; }
  Step& step(int offset) { return steps_[index(offset)]; }
  std::vector<std::int32_t>& own(Step& s) { return s.ids.of_rank[static_cast<std::size_t>(comm_.rank())]; }
  const std::vector<std::int32_t>& own(const Step& s) const {
    return s.ids.of_rank[static_cast<std::size_t>(comm_.rank())];
  }
  template <class F>
  Ticket submit(TableExchange e, F make) {
    return engine_.submit(comm_, submit_options(e), std::move(make));
  }
  bool is_of(const Step& s, std::int64_t number) const { return s.number == number; }

  // ---- ids ----

  void start_ids(Step& s) {
    if (!announced_)
      throw UsageError("table '" + info_.name +
                       "': the batch of the next step was not announced (batch_known)");
    announced_ = false;
    const std::int64_t number = &s == &step(0) ? walked_ : walked_ + 1;
    if (std::exchange(s.number, number) != number) s.sent = 0;
    s.tickets = {};
    s.split = {};
    s.applies = false;
    s.reads = reads_;
    own(s) = unique_ids(pending_);
    s.places = places_of(std::span<const std::int64_t>(pending_), own(s));
    SubmitOptions how = submit_options(TableExchange::ids);
    how.local = options_.gather == TableGather::tokens;  // ids travel with the rows
    s.ticket(TableExchange::ids) = engine_.submit(comm_, how, [this, &s](Comm comm) {
      return counted(comm, this, TableExchange::ids, &s, learn(comm, this, &s));
    });
  }
  static Task<void> learn(Comm comm, Table* table, Step* s) {
    if (table->options_.gather == TableGather::tokens) co_return;
    co_await gather_ids(comm, &s->ids, table->info_.rows);
  }

  // ---- forward ----

  // Rows that no rank has touched since, of the next batch: the last step's delayed ones are applied first.
  void start_early(Step& s, Step& now, Step& last) {
    Step* const before = is_of(last, s.number - 2) ? &last : nullptr;
    s.ticket(TableExchange::early) = submit(TableExchange::early, [this, &s, &now, before](Comm comm) {
      return counted(comm, this, TableExchange::early, &s, early(comm, this, &s, &now, before));
    });
  }
  static Task<void> early(Comm comm, Table* table, Step* s, Step* now, Step* before) {
    const Ticket gathered = s->ticket(TableExchange::ids);
    co_await gathered;
    auto divide = [s, now, &comm] {
      s->early.of_rank.resize(s->ids.of_rank.size());
      s->late.of_rank.resize(s->ids.of_rank.size());
      for (std::size_t r = 0; r < s->ids.of_rank.size(); ++r) {
        const SplitIds parts = split_ids(s->ids.of_rank[r], now->ids.all);
        s->early.of_rank[r] = ids_at(s->ids.of_rank[r], parts.out);
        s->late.of_rank[r] = ids_at(s->ids.of_rank[r], parts.in);
      }
      return comm.kernels().unite_index * static_cast<double>(2 * s->ids.total());
    };
    co_await comm.compute(divide);
    if (before != nullptr) {
      const Ticket applied = before->ticket(TableExchange::delayed);
      if (applied.valid()) co_await applied;
    }
    co_await table->forward(comm, s, &s->early, &s->early_fetch);
  }

  void start_rows(Step& s, Step& last) {
    if (!s.ticket(TableExchange::ids).valid() || s.ticket(TableExchange::rows).valid())
      throw UsageError("table '" + info_.name + "': rows of a batch that was not announced, or twice");
    Step* const before = is_of(last, s.number - 1) ? &last : nullptr;
    s.ticket(TableExchange::rows) = submit(TableExchange::rows, [this, &s, before](Comm comm) {
      return counted(comm, this, TableExchange::rows, &s, looked_up(comm, this, &s, before));
    });
  }
  static Task<void> looked_up(Comm comm, Table* table, Step* s, Step* before) {
    const Ticket gathered = s->ticket(TableExchange::ids);
    co_await gathered;
    if (before != nullptr) {
      const Ticket updated =
          before->ticket(table->options_.updates_wait ? TableExchange::update : TableExchange::prior);
      if (updated.valid()) co_await updated;
    }
    const Ticket in_advance = s->ticket(TableExchange::early);
    if (in_advance.valid()) co_await in_advance;
    if (!s->reads) co_return;
    co_await table->forward(comm, s, in_advance.valid() ? &s->late : &s->ids, &s->fetch);
  }

  Task<void> forward(Comm comm, Step* s, const RowLists* lists, RowFetch<T>* fetch) {
    const typename RowFetch<T>::From from{
        .layout = &layout_, .columns = info_.columns, .values = std::span<const T>(values_)};
    const typename RowFetch<T>::Into into{.list = own(*s), .rows = &s->rows};
    return fetch->run(std::move(comm), lists, from, into);
  }

  static Task<void> answer(Comm comm, Table* table, Asked* asked) {
    co_await gather_ids(comm, &asked->step.ids, table->info_.rows);
    const Comm behind = comm.hops_from(1);
    co_await table->forward(behind, &asked->step, &asked->step.ids, &asked->step.fetch);
    auto place = [table, asked, &comm] {
      const auto width = static_cast<std::size_t>(table->info_.columns);
      gather_rows(std::span<const T>(asked->step.rows), {width, 0, width}, asked->step.places, asked->out);
      return comm.kernels().copy_byte * static_cast<double>(asked->out.size_bytes());
    };
    co_await comm.compute(place);
  }

  // ---- backward ----

  template <class U>
  void take(std::span<const U> gradient) {
    if constexpr (std::is_same_v<U, T>) {
      Step& s = step(0);
      const std::size_t wanted = own(s).size() * static_cast<std::size_t>(info_.columns);
      if (gradient.size() != wanted || has_gradient_)
        throw UsageError("table '" + info_.name + "': a gradient of " + std::to_string(gradient.size()) +
                         " elements, not one of " + std::to_string(wanted) + " in a step");
      has_gradient_ = true;
      s.gradient = gradient;
      s.at = {.step = optimizer_.step(parameter_) + 1, .lr = optimizer_.options().lr};
      backward(s);
    } else {
      throw UsageError("table '" + info_.name + "' takes gradients of " +
                       std::string(name_of(dtype_of<T>())));
    }
  }

  void take_zeros() override {
    Step& s = step(0);
    s.zeros.assign(own(s).size() * static_cast<std::size_t>(info_.columns), T{0});
    take(std::span<const T>(s.zeros));
  }

  void backward(Step& s) {
    Step& next = step(-1);
    Step& last = step(1);
    const bool known = is_of(next, s.number + 1);
    const bool split = known && splits_ && options_.vertical && !options_.updates_wait;
    Step* const ahead = split ? &next : nullptr;
    SubmitOptions local = submit_options(TableExchange::prior);
    local.name = "split of rows";
    local.local = true;
    s.split =
        engine_.submit(comm_, local, [this, &s, ahead](Comm comm) { return divide(comm, this, &s, ahead); });
    Step* const before = is_of(last, s.number - 1) ? &last : nullptr;
    s.ticket(TableExchange::prior) = submit(TableExchange::prior, [this, &s, before](Comm comm) {
      return counted(comm, this, TableExchange::prior, &s, prior(comm, this, &s, before));
    });
    if (split) {
      s.ticket(TableExchange::delayed) = submit(TableExchange::delayed, [this, &s](Comm comm) {
        return counted(comm, this, TableExchange::delayed, &s, delayed(comm, this, &s));
      });
    }
    if (known && options_.horizontal && !options_.updates_wait) start_rows(next, s);
  }

  // Which rows are prior, and both parts packed: to each rank the rows of this one's list, its columns.
  static Task<void> divide(Comm comm, Table* table, Step* s, Step* ahead) {
    if (ahead != nullptr) {
      const Ticket known = ahead->ticket(TableExchange::ids);
      co_await known;
    }
    auto work = [table, s, ahead, &comm] {
      const std::size_t ranks = s->ids.of_rank.size();
      s->prior.sum.lists.of_rank.assign(ranks, {});
      s->delayed.sum.lists.of_rank.assign(ranks, {});
      for (std::size_t r = 0; r < ranks; ++r) {
        std::vector<std::int32_t> list = s->ids.of_rank[r];
        std::erase(list, static_cast<std::int32_t>(table->info_.padding));
        if (ahead == nullptr) {
          s->prior.sum.lists.of_rank[r] = std::move(list);
          continue;
        }
        const SplitIds parts = split_ids(list, ahead->ids.all);
        s->prior.sum.lists.of_rank[r] = ids_at(list, parts.in);
        s->delayed.sum.lists.of_rank[r] = ids_at(list, parts.out);
      }
      if (ahead != nullptr) table->look_at_share(*s);
      double seconds = comm.kernels().unite_index * static_cast<double>(2 * s->ids.total());
      for (Part* part : {&s->prior, &s->delayed}) seconds += table->pack(comm, *s, *part);
      return seconds;
    };
    co_await comm.compute(work);
  }

  double pack(const Comm& comm, const Step& s, Part& part) {
    if (options_.cut == TableCut::pushed) part.pull.plan(comm, layout_, part.sum.lists);
    return part.sum.pack(comm, rules_, {s.gradient, own(s), s.places});
  }

  static Task<void> prior(Comm comm, Table* table, Step* s, Step* before) {
    const Ticket split = s->split;
    co_await split;
    co_await s->prior.sum.run(comm, &table->rules_);
    if (table->options_.updates_wait) co_return;  // for the verdict
    if (before != nullptr) {
      const Ticket applied = before->ticket(TableExchange::delayed);
      if (applied.valid()) co_await applied;
    }
    co_await table->apply(comm, s, &s->prior);
  }

  static Task<void> delayed(Comm comm, Table* table, Step* s) {
    const Ticket split = s->split;
    co_await split;
    co_await s->delayed.sum.run(comm, &table->rules_);
    co_await table->apply(comm, s, &s->delayed);
  }

  Task<void> apply(Comm comm, Step* s, Part* part) {
    if (part->sum.bad() >= 0) throw Error(text_of(*s, *part));
    auto update = [this, s, part, &comm] { return update_rows(comm, *s, *part); };
    co_await comm.compute(update);
    if (options_.cut != TableCut::pushed) co_return;
    const Comm behind = comm.hops_from(static_cast<std::uint32_t>(comm.size()));
    co_await part->pull.run(behind, std::span<T>(values_), info_.columns);
  }

  double update_rows(const Comm& comm, const Step& s, const Part& part) {
    const std::span<const T> sum = part.sum.values();
    optimizer_.update_rows(parameter_, std::span<T>(values_), sum, {part.sum.places(), width_}, s.at);
    const auto streams = static_cast<double>(1 + moments_of(optimizer_.options()).size());
    return comm.kernels().fold(dtype_of<T>()) * streams * static_cast<double>(sum.size_bytes());
  }

  // Behind the verdict: of the step that was committed, or nothing.
  void start_update(Step& s) {
    SubmitOptions how = submit_options(TableExchange::update);
    how.local = options_.cut != TableCut::pushed;
    s.ticket(TableExchange::update) = engine_.submit(comm_, how, [this, &s](Comm comm) {
      return counted(comm, this, TableExchange::update, &s, update(comm, this, &s));
    });
  }
  static Task<void> update(Comm comm, Table* table, Step* s) {
    if (!std::exchange(s->applies, false)) co_return;
    auto clip = [s] {
      const T scale = static_cast<T>(s->scale);
      for (T& v : s->prior.sum.values()) v *= scale;
    };
    if (s->scale != 1) co_await comm.compute(clip);
    co_await table->apply(comm, s, &s->prior);
  }

  // ---- the rest ----

  // The same on all ranks: they have the same lists. One batch that is like the next says nothing of all.
  void look_at_share(const Step& s) {
    const double prior = static_cast<double>(s.prior.sum.lists.total());
    const double all = prior + static_cast<double>(s.delayed.sum.lists.total());
    if (all == 0) return;
    prior_share_ = prior / all;
    useless_ = prior_share_ > options_.split_below ? useless_ + 1 : 0;
    if (useless_ < kUselessSteps) return;
    note_ = std::to_string(std::lround(100 * prior_share_)) +
            " % of its rows are read again by the next batch: none are delayed any more";
    splits_ = false;
    if (comm_.rank() == 0) engine_.log_line("table '" + info_.name + "': " + note_);
  }

  std::string text_of(const Step& s, const Part& part) const {
    return "step " + std::to_string(s.at.step - 1) + ": the gradient of row " +
           std::to_string(part.sum.bad()) + " of table '" + info_.name + "' is not finite";
  }

  // What the operation sends is added to the bytes of the exchange, and of the step that it belongs to.
  static Task<void> counted(Comm comm, Table* table, TableExchange e, Step* s, Task<void> inner) {
    co_await std::move(inner);
    table->sent_[static_cast<std::size_t>(e)].fetch_add(comm.bytes_sent(), std::memory_order_relaxed);
    s->sent += comm.bytes_sent();
  }

  RowSumRules rules_;
  static constexpr int kUselessSteps = 3;
  int useless_ = 0;    // steps in a row in which hardly a row could be delayed
  std::size_t width_;  // own columns
  LargeVector<T> values_;
  std::array<Step, 3> steps_;
};

}  // namespace

void HybridTable::end_step() {
  if (!has_gradient_) take_zeros();
  has_gradient_ = false;
  ended_ = walked_;
}

std::unique_ptr<HybridTable> HybridTable::make(Engine& engine, const Comm& comm, const TableInfo& info,
                                               const HybridOptions& options, std::uint32_t first_slot,
                                               Optimizer& optimizer, int parameter) {
  if (options.dtype == DType::float64)
    return std::make_unique<Table<double>>(engine, comm, info, options, first_slot, optimizer, parameter);
  return std::make_unique<Table<float>>(engine, comm, info, options, first_slot, optimizer, parameter);
}

}  // namespace weft
