#include "embedding/hybrid.h"

#include <algorithm>
#include <limits>

#include "weft/error.h"

namespace weft {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw UsageError("embedding: " + what); }

void check(const std::vector<TableInfo>& tables, const HybridOptions& options) {
  if (options.dtype != DType::float32 && options.dtype != DType::float64)
    refuse("tables are float32 or float64, not " + std::string(name_of(options.dtype)));
  if (!(options.divisor >= 0)) refuse("the divisor is negative");
  for (const TableInfo& t : tables) {
    if (t.rows < 1 || t.columns < 1 || t.rows > std::numeric_limits<std::int32_t>::max())
      refuse("table '" + t.name + "' has " + std::to_string(t.rows) + " x " + std::to_string(t.columns) +
             " elements; a table has 1 to 2,147,483,647 rows and some columns");
    if (t.padding < -1 || t.padding >= t.rows)
      refuse("table '" + t.name + "' has no row " + std::to_string(t.padding) + " for padding");
  }
}

HybridOptions completed(HybridOptions options, int size) {
  validate_rows(options.optimizer);
  if (options.divisor == 0) options.divisor = size;
  if (options.owners == 0) options.owners = size;
  if (options.owners < 1 || options.owners > size)
    refuse(std::to_string(options.owners) + " of " + std::to_string(size) + " ranks are to hold rows");
  if (options.memory_rows < 0) refuse("a rank has memory for some rows, or for all");
  if (options.gather != TableGather::rows && options.cut != TableCut::none)
    refuse("rows are gathered by everybody only where every rank holds all of them");
  if (options.gather == TableGather::tokens)
    options.vertical = options.two_sided = false;  // ids are not known
  if (!options.lookahead) options.vertical = options.two_sided = false;
  if (options.updates_wait || !options.horizontal) options.two_sided = false;
  if (options.updates_wait) options.vertical = false;
  return options;
}

std::vector<OptimizerParameter> parameters_of(const std::vector<TableInfo>& tables, const Comm& comm,
                                              const HybridOptions& options) {
  std::vector<OptimizerParameter> out;
  for (const TableInfo& t : tables) {
    const TableLayout layout = layout_of(t, options, comm.size());
    const BlockRange mine = layout.columns(comm.rank());
    OptimizerParameter parameter{
        .name = t.name, .count = layout.memory_rows(comm.rank()) * mine.count, .dtype = options.dtype};
    if (!layout.dealt() && options.memory_rows == 0)
      parameter.shard = Shard::range({t.rows, t.columns}, 1, mine.first, mine.count);
    out.push_back(std::move(parameter));
  }
  return out;
}

constexpr int kComparison = 0;

}  // namespace

HybridEmbedding::HybridEmbedding(Engine& engine, const Comm& comm, const std::vector<TableInfo>& tables,
                                 HybridOptions options)
    : comm_(comm),
      options_((check(tables, options), completed(std::move(options), comm.size()))),
      optimizer_(options_.optimizer, parameters_of(tables, comm, options_)) {
  std::uint32_t slot = options_.first_slot + 1;
  for (std::size_t t = 0; t < tables.size(); ++t) {
    const int number = static_cast<int>(t);
    tables_.push_back(HybridTable::make(engine, comm, tables[t], options_, slot, optimizer_, number));
    slot += kTableExchanges;
    kinds_.push_back({number, TableExchange::ids});
    if (options_.two_sided) kinds_.push_back({number, TableExchange::early});
    kinds_.push_back({number, TableExchange::rows});
    kinds_.push_back({number, TableExchange::prior});
    if (options_.vertical) kinds_.push_back({number, TableExchange::delayed});
    if (options_.updates_wait) kinds_.push_back({number, TableExchange::update});
  }
  std::vector<std::uint64_t> parts{hash_part(options_.divisor),
                                   static_cast<std::uint64_t>(options_.dtype),
                                   static_cast<std::uint64_t>(options_.cut),
                                   static_cast<std::uint64_t>(options_.owners),
                                   static_cast<std::uint64_t>(options_.gather),
                                   options_.updates_wait,
                                   options_.lookahead,
                                   options_.horizontal,
                                   options_.vertical,
                                   options_.two_sided,
                                   hash_part(options_.split_below),
                                   hash_of(options_.optimizer)};
  for (const TableInfo& t : tables) {
    for (const std::int64_t v : {t.rows, t.columns, std::int64_t{t.use}, t.padding})
      parts.push_back(static_cast<std::uint64_t>(v));
  }
  const SubmitOptions submit{.name = "plan of tables", .slot = options_.first_slot};
  comparison_ = compare_plans(engine, comm, submit, hash_of(rows(), {}, parts),
                              "plan of tables (names, shapes or options)");
}

HybridEmbedding::~HybridEmbedding() = default;

int HybridEmbedding::find(std::string_view name) const {
  const auto found =
      std::ranges::find_if(tables_, [&](const auto& table) { return table->info().name == name; });
  return found == tables_.end() ? -1 : static_cast<int>(found - tables_.begin());
}

int HybridEmbedding::place_of(int table, TableExchange exchange) const {
  const auto found = std::ranges::find_if(
      kinds_, [&](const Kind& kind) { return kind.table == table && kind.exchange == exchange; });
  return found == kinds_.end() ? -1 : kComparison + 1 + static_cast<int>(found - kinds_.begin());
}

std::vector<std::string> HybridEmbedding::gradients() const {
  std::vector<std::string> out;
  out.reserve(tables_.size());
  for (const auto& table : tables_) out.push_back(table->info().name);
  return out;
}

std::vector<Exchange> HybridEmbedding::exchanges() const {
  std::vector<Exchange> out{{.name = "plan of tables",
                             .group = comm_.group_id(),
                             .slot = options_.first_slot,
                             .at_installation = true}};
  for (const Kind& kind : kinds_) {
    const HybridTable& table = *tables_[static_cast<std::size_t>(kind.table)];
    Exchange exchange{.name = std::string(name_of(kind.exchange)) + " of " + table.info().name,
                      .traffic = table.traffic(kind.exchange),
                      .group = comm_.group_id(),
                      .slot = table.slot(kind.exchange)};
    const TensorName gradient{TensorName::Of::gradient, table.info().name};
    if (kind.exchange == TableExchange::prior) exchange.reads = exchange.writes = {gradient};
    if (kind.exchange == TableExchange::delayed) exchange.reads = {gradient};
    if (kind.exchange == TableExchange::update)
      exchange.writes = {{TensorName::Of::parameter, table.info().name}};
    out.push_back(std::move(exchange));
  }
  return out;
}

// Tables of moves, of each table of rows:
//   ids       started as soon as the next batch is known: when forward has ended, or where the step begins
//   rows      started behind the prior rows of the step before (a chain, so inside of backward), or where the
//             step begins, or where they are read; awaited by the first part that reads them
//   prior     started inside of the backward that completes the gradient, awaited before the update
//   delayed   the same, awaited when the next step's backward has ended: before the lookup behind it
void HybridEmbedding::weave(Weaver& weaver) const {
  const ModelShape& shape = weaver.shape();
  const Phase phase = weaver.phase();
  const int micro_batches = weaver.micro_batches();
  const int last_block = shape.num_blocks() - 1;
  const int last_part = static_cast<int>(shape.blocks.back().parts.size()) - 1;
  const Piece forward_end{Work::forward, last_block, last_part, micro_batches - 1};
  const Piece last_update{Work::update, last_block, 0, 0};
  if (phase == Phase::first) weaver.at_begin(wait_of(kComparison, 0));
  for (int t = 0; t < num_tables(); ++t) {
    const auto place = [&](TableExchange e) { return place_of(t, e); };
    const int ids = place(TableExchange::ids), rows = place(TableExchange::rows);
    const int prior = place(TableExchange::prior), delayed = place(TableExchange::delayed);
    const int early = place(TableExchange::early), update = place(TableExchange::update);
    const auto found = std::ranges::find(shape.parameters, table(t).info().name, &ParameterShape::name);
    if (found == shape.parameters.end()) refuse("the model has no table '" + table(t).info().name + "'");
    const int parameter = static_cast<int>(found - shape.parameters.begin());
    const Piece ready = weaver.completes({&parameter, 1});
    const Piece first_use = shape.ready_after(parameter, 1);
    const Piece reads{Work::forward, first_use.block, first_use.part, 0};
    const Piece updates{Work::update, first_use.block, 0, 0};
    const bool chained = options_.lookahead && options_.horizontal && !options_.updates_wait;

    if (phase != Phase::settle) {
      const bool starts = !options_.lookahead || phase == Phase::first;
      if (starts) weaver.at_begin(start_of(ids, 0));
      if (options_.lookahead) weaver.after(forward_end, start_of(ids, -1));
      if (early >= 0) weaver.after(forward_end, start_of(early, -1));
      weaver.after(ready, start_inside(prior));
      if (delayed >= 0) weaver.after(ready, start_inside(delayed));
      if (chained) {
        Move next = start_of(rows, -1);
        next.inside = true;
        weaver.after(ready, next);
      }
    }
    weaver.before(updates, wait_of(prior, weaver.last()));
    if (update >= 0) {
      weaver.after(last_update, start_of(update, weaver.last()));
      if (phase == Phase::settle) weaver.at_end(wait_of(update, 0));
      if (phase == Phase::steady) weaver.before(reads, wait_of(update, 1));
    }
    if (phase != Phase::settle) {
      const bool steady = phase == Phase::steady;
      const bool behind_verdict = steady && options_.horizontal && options_.updates_wait;
      const bool where_read = steady && !options_.horizontal;
      if (behind_verdict)
        weaver.after(last_update, start_of(rows, 0));
      else if (where_read)
        weaver.before(reads, start_of(rows, 0));
      else if (!steady || !chained)
        weaver.at_begin(start_of(rows, 0));
      weaver.before(reads, wait_of(ids, 0));
      if (early >= 0 && phase == Phase::steady) weaver.before(reads, wait_of(early, 0));
      weaver.before(reads, wait_of(rows, 0));
      if (delayed >= 0 && phase == Phase::steady) weaver.at_end(wait_of(delayed, 1));
    } else {
      if (options_.lookahead) weaver.at_end(wait_of(ids, -1));
      if (early >= 0) weaver.at_end(wait_of(early, -1));
      if (chained) weaver.at_end(wait_of(rows, -1));
      if (delayed >= 0) weaver.at_end(wait_of(delayed, 0));
    }
  }
}

std::string HybridEmbedding::why_of(const HybridTable& table) const {
  std::string why;
  switch (options_.cut) {
    case TableCut::columns:
      why = "columns of every row are on all ranks: rows that a batch reads travel, the table does not";
      break;
    case TableCut::rows:
      why = "rows are on " + std::to_string(options_.owners) + " of " + std::to_string(comm_.size()) +
            " ranks: those that a batch reads travel, the table does not";
      break;
    case TableCut::none:
      why = "every rank holds all of it: gradients of the rows that a batch reads go to everybody";
      break;
    case TableCut::pushed:
      why = "every rank holds all of it: rows that a batch reads are updated by " +
            std::to_string(options_.owners) + " of " + std::to_string(comm_.size()) +
            ", which send them to all";
      break;
  }
  if (options_.updates_wait) why += "; updates wait for the verdict of the step, so no row is delayed";
  if (!options_.lookahead) why += "; batches are not known ahead, so no row is delayed";
  if (table.info().use != 0 && options_.horizontal)
    why += "; it is read later, so it goes among the gradients";
  if (const std::string note = table.note(); !note.empty()) why += "; " + note;
  return why;
}

std::vector<PlanRow> HybridEmbedding::rows() const {
  std::vector<PlanRow> out;
  for (const auto& table : tables_) {
    const TableInfo& info = table->info();
    const double ids = info.rows_per_step * sizeof(std::int32_t) * (comm_.size() - 1);
    const double bytes = ids + table->layout().elements_expected(info.rows_per_step) *
                                   static_cast<double>(size_of(options_.dtype));
    out.push_back({.tensor = info.name,
                   .count = info.rows * info.columns,
                   .strategy = options_.name,
                   .group = comm_.group_id(),
                   .ranks = comm_.size(),
                   .divisor = options_.divisor,
                   .scheme = options_.way,
                   .codec = std::string(name_of(options_.dtype)),
                   .traffic = table->traffic(TableExchange::rows),
                   .slot = table->slot(TableExchange::ids),
                   .bytes = bytes,
                   .seconds = bytes * comm_.cost().seconds_per_byte,
                   .why = why_of(*table)});
  }
  return out;
}

// ---- events ----

void HybridEmbedding::step_begin() {
  for (const auto& table : tables_) table->begin_step();
}

void HybridEmbedding::batch_known(const BatchInfo& batch) {
  for (const auto& table : tables_) {
    const auto found = std::ranges::find(batch.lookups, table->info().name, &BatchInfo::Lookup::table);
    if (found == batch.lookups.end()) refuse("the batch has no ids of table '" + table->info().name + "'");
    table->announce(found->ids, found->reads);
  }
}

void HybridEmbedding::gradient_ready(int parameter, std::span<const float> gradient) {
  table(parameter).gradient_ready(gradient);
}
void HybridEmbedding::gradient_ready(int parameter, std::span<const double> gradient) {
  table(parameter).gradient_ready(gradient);
}

void HybridEmbedding::step_end() {
  for (const auto& table : tables_) table->end_step();
}

void HybridEmbedding::start(int exchange, const When& when, TensorSource&) {
  const Kind& kind = kinds_[static_cast<std::size_t>(exchange - kComparison - 1)];
  table(kind.table).start(kind.exchange, when.offset);
}

Ticket HybridEmbedding::ticket(int exchange, const When& when) const {
  if (exchange == kComparison) return comparison_;
  const Kind& kind = kinds_[static_cast<std::size_t>(exchange - kComparison - 1)];
  return table(kind.table).ticket(kind.exchange, when.offset);
}

std::vector<Ticket> HybridEmbedding::work() const {
  std::vector<Ticket> out;
  for (const auto& table : tables_) {
    for (const Ticket& ticket : table->work()) out.push_back(ticket);
  }
  return out;
}

StepResult HybridEmbedding::verdict() {
  StepResult out{.committed = true, .step = committed_, .bad = {}, .text = {}};
  if (!options_.updates_wait) return out;  // what is not finite has ended the job
  for (int t = 0; t < num_tables(); ++t) {
    const std::string trouble = table(t).trouble();
    if (trouble.empty()) continue;
    out.committed = false;
    out.text += (out.text.empty() ? "" : "; ") + trouble;
  }
  return out;
}

double HybridEmbedding::squares() const {
  if (!options_.counted) return 0;
  double sum = 0;
  for (const auto& table : tables_) sum += table->squares();
  return sum;
}

void HybridEmbedding::close(bool committed, double scale) {
  if (committed) ++committed_;
  for (const auto& table : tables_) table->close(committed, scale);
}

std::uint64_t HybridEmbedding::sent_bytes() const {
  std::uint64_t sum = 0;
  for (const auto& table : tables_) {
    for (int e = 0; e < kTableExchanges; ++e) sum += table->sent_bytes(static_cast<TableExchange>(e));
  }
  return sum;
}

std::uint64_t HybridEmbedding::step_bytes() const {
  std::uint64_t sum = 0;
  for (const auto& table : tables_) sum += table->step_bytes();
  return sum;
}

std::int64_t HybridEmbedding::formula_bytes(const LinkCost& link) const {
  std::int64_t sum = 0;
  for (const auto& table : tables_) sum += table->formula_bytes(link);
  return sum;
}

// ---- state ----

std::vector<LiveRow> HybridEmbedding::value_rows(std::string_view owner, std::string_view kind,
                                                 const Peers& peers) {
  std::vector<LiveRow> out;
  for (const auto& table : tables_) {
    LiveRow row;
    row.row = {.key = {std::string(owner), std::string(kind), table->info().name},
               .dtype = options_.dtype,
               .rule = LayoutRule::moves,
               .shard = table->shard(),
               .peers = holders(peers)};
    row.read = [values = table->values()](auto&) { return std::span<const std::byte>(values.bytes()); };
    row.write = [values = table->values()](std::span<const std::byte> from) {
      if (from.empty())
        std::ranges::fill(values.bytes(), std::byte{0});
      else
        std::ranges::copy(from, values.data);
    };
    out.push_back(std::move(row));
  }
  return out;
}

// Counters are the same on all ranks; a part of a table is one rank's.
std::vector<LiveRow> HybridEmbedding::optimizer_rows(const Peers& peers) {
  std::vector<LiveRow> out = optimizer_.rows(peers);
  for (LiveRow& row : out) {
    if (row.row.rule == LayoutRule::moves) row.row.peers = holders(peers);
  }
  return out;
}

Peers HybridEmbedding::holders(const Peers& all) const {
  return options_.cut == TableCut::none ? all : Peers{};
}

}  // namespace weft
