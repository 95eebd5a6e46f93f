#include "tables_step.h"

#include <charconv>
#include <iterator>
#include <memory>
#include <utility>

#include "wait.h"
#include "weft/error.h"

namespace weft::python {

namespace {

ModelShape shape_of(const std::vector<TableSpec>& tables) {
  std::vector<ChainBlock> blocks;
  for (const TableSpec& spec : tables) {
    const TableInfo& t = spec.info;
    blocks.push_back({t.name, {{.name = t.name, .dims = {t.rows, t.columns}, .table = true}}});
  }
  return chain_shape("of Python", blocks);
}

StepOptions step_options(const TablesStepOptions& options, std::uint32_t first_slot) {
  StepOptions out{
      .skip_not_finite = options.skips, .tokens = false, .lookahead = !options.waits, .updates_wait = {}};
  if (options.waits) out.updates_wait = "the norm is of gradients outside of this step, too";
  out.first_slot = first_slot + 1;  // behind that of the comparisons
  return out;
}

std::string text_of(double value) {
  char digits[32];
  const auto end = std::to_chars(std::begin(digits), std::end(digits), value).ptr;
  return std::string(digits, end);
}

std::string text_of(const TableSpec& table) {
  const TableInfo& t = table.info;
  return std::to_string(t.rows) + " x " + std::to_string(t.columns) + " of " +
         std::string(name_of(table.dtype)) +
         (t.padding < 0 ? "" : " with padding in row " + std::to_string(t.padding));
}

std::string text_of(const OptimizerOptions& rule) {
  std::string out =
      rule.name + " with lr " + text_of(rule.lr) + ", weight decay " + text_of(rule.weight_decay);
  if (rule.name == "sgd") return out;
  if (rule.name != "adagrad") out += ", betas " + text_of(rule.beta1) + " and " + text_of(rule.beta2);
  out += ", eps " + text_of(rule.eps);
  if (rule.name == "adagrad")
    out += ", lr_decay " + text_of(rule.lr_decay) + ", first sums of " + text_of(rule.initial_accumulator);
  return out;
}

AgreedLine line_of(const std::string& table, const OptimizerOptions& rule) {
  return {"the rule of table '" + table + "'", text_of(rule)};
}

constexpr const char* kSameTables = "all ranks make the same tables, in the same order";
constexpr const char* kSameRules =
    "the options of an optimizer's groups are the same on all ranks, in every step";

HybridOptions hybrid_options(const TablesStepOptions& options, const TableSpec& spec) {
  HybridOptions out;
  out.dtype = spec.dtype;
  out.divisor = options.divisor;
  out.optimizer = spec.optimizer;
  out.updates_wait = options.waits;
  out.lookahead = !options.waits;
  return out;
}

}  // namespace

TablesStep::TablesStep(World& world, const std::vector<TableSpec>& tables, const TablesStepOptions& options,
                       std::uint32_t first_slot)
    : options_(options),
      slot_(first_slot),
      strategies_(world.engine(), world.comm(), shape_of(tables), step_options(options, first_slot)),
      walker_(*this, strategies_) {
  const Comm comm = world.comm();
  compare_tables(tables);
  outside_ = &strategies_.add(std::make_unique<Outside>(comm));
  places_.resize(tables.size());
  // Tables of one group and one type are one strategy.
  std::vector<bool> dealt(tables.size(), false);
  for (std::size_t first = 0; first < tables.size(); ++first) {
    if (dealt[first]) continue;
    std::vector<TableInfo> infos;
    std::vector<std::size_t> members;
    for (std::size_t t = first; t < tables.size(); ++t) {
      if (dealt[t] || tables[t].dtype != tables[first].dtype || tables[t].group != tables[first].group)
        continue;
      dealt[t] = true;
      members.push_back(t);
      infos.push_back(tables[t].info);
      infos.back().use = static_cast<int>(t);
    }
    HybridOptions mine = hybrid_options(options, tables[first]);
    mine.first_slot = strategies_.next_slot(comm);
    HybridEmbedding* const embedding =
        &strategies_.add(std::make_unique<HybridEmbedding>(world.engine(), comm, infos, mine));
    embeddings_.push_back(embedding);
    for (std::size_t i = 0; i < members.size(); ++i) places_[members[i]] = {embedding, static_cast<int>(i)};
  }
  strategies_.install();
  for (const Ticket& ticket : strategies_.tickets()) await(ticket);
}

void TablesStep::compare_tables(const std::vector<TableSpec>& tables) {
  const Comm& world = strategies_.world();
  if (world.size() == 1) return;
  std::vector<AgreedLine> shapes, rules;
  for (const TableSpec& table : tables) {
    shapes.push_back({"table '" + table.info.name + "'", text_of(table)});
    rules.push_back(line_of(table.info.name, table.optimizer));
  }
  Agreement agreement;
  for (const auto* lines : {&shapes, &rules}) {
    const SubmitOptions submit{.name = "sharded tables", .slot = slot_, .step = comparisons_++};
    agreement.start(strategies_.engine(), world, submit, *lines, lines == &shapes ? kSameTables : kSameRules);
    await(agreement.ticket());
    agreement.check();
  }
}

// Of the step whose gradients are handed over.
void TablesStep::compare_rules() {
  const Comm& world = strategies_.world();
  if (world.size() == 1) return;
  const bool first = !rules_.ticket().valid();
  check_rules();
  std::vector<AgreedLine> lines;
  for (int t = 0; t < num_tables(); ++t) {
    const HybridEmbedding& embedding = *places_[static_cast<std::size_t>(t)].embedding;
    lines.push_back(line_of(table(t).info().name, embedding.optimizer().options()));
  }
  const SubmitOptions submit{.name = "rules of rows", .slot = slot_, .step = comparisons_++};
  rules_.start(strategies_.engine(), world, submit, lines, kSameRules);
  if (first) check_rules();
}

void TablesStep::check_rules() {
  if (!rules_.ticket().valid()) return;
  await(rules_.ticket());
  rules_.check();
}

HybridTable& TablesStep::table(int t) {
  if (t < 0 || t >= num_tables()) throw UsageError("there is no table " + std::to_string(t));
  const Place& place = places_[static_cast<std::size_t>(t)];
  return place.embedding->table(place.local);
}

void TablesStep::await(const Ticket& ticket) {
  python::wait(strategies_.engine(), ticket);
  if (ticket.error()) std::rethrow_exception(ticket.error());
}

template <class F>
void TablesStep::walk(F go) {
  if (interrupted_)
    throw UsageError(
        "the last step of sharded tables was interrupted: this job cannot go on (start it again from a "
        "checkpoint)");
  interrupted_ = true;
  go();
  interrupted_ = false;
}

void TablesStep::announce(const std::vector<std::span<const std::int64_t>>& ids, bool reads) {
  if (ids.size() != places_.size()) throw UsageError("a batch announces ids for every table of a step");
  std::vector<BatchInfo::Lookup> lookups;
  lookups.reserve(ids.size());
  for (int t = 0; t < num_tables(); ++t)
    lookups.push_back(
        {.table = table(t).info().name, .ids = ids[static_cast<std::size_t>(t)], .reads = reads});
  strategies_.batch_known({.tokens = 0, .lookups = lookups});
}

void TablesStep::begin() {
  walk([this] { walker_.begin(strategies_.next_table(1)); });
}

void TablesStep::read(int t) {
  while (in_step() && at_.work == weft::Work::forward && at_.block < t) walk([this] { walker_.go_on(); });
}

void TablesStep::end_forward() {
  while (in_step() && at_.work == weft::Work::forward) walk([this] { walker_.go_on(); });
}

void TablesStep::end_backward(const std::vector<Gradient>& gradients) {
  if (!in_step() || at_.work != weft::Work::backward || gradients.size() != places_.size())
    throw UsageError("gradients of sharded tables come once, for all of them, when their forward has ended");
  for (std::size_t t = 0; t < gradients.size(); ++t) set_rule(*places_[t].embedding, gradients[t].rule);
  compare_rules();
  while (in_step()) {
    const Gradient& gradient = gradients[static_cast<std::size_t>(at_.block)];
    const auto count = static_cast<std::size_t>(gradient.values.count);
    walk([&] {
      if (gradient.values.dtype == DType::float64)
        strategies_.gradient_ready(at_.block,
                                   std::span(reinterpret_cast<const double*>(gradient.values.data), count));
      else
        strategies_.gradient_ready(at_.block,
                                   std::span(reinterpret_cast<const float*>(gradient.values.data), count));
      walker_.go_on();
    });
  }
}

void TablesStep::set_rule(HybridEmbedding& embedding, const OptimizerOptions& rule) {
  OptimizerOptions before = embedding.optimizer().options();
  before.lr = rule.lr;
  if (hash_of(before) == hash_of(rule)) return embedding.set_lr(rule.lr);
  // Delayed rows of the step before have its rule. (Its learning rate they have with them.)
  for (const Ticket& ticket : strategies_.tickets()) await(ticket);
  embedding.set_rule(rule);
}

void TablesStep::settle() {
  if (options_.waits) throw UsageError("where updates wait a step settles by its verdict");
  check_rules();
  walk([this] { walker_.walk(strategies_.tables(1).settle); });
}

StepResult TablesStep::judge(double clip_norm, double squares, std::string veto) {
  if (!options_.waits || !under_way() || in_step())
    throw UsageError("there is a verdict once a step, where updates wait and backward has ended");
  check_rules();
  strategies_.set_clip_norm(clip_norm);
  outside_->say(squares, std::move(veto));
  walk([this] { walker_.begin(strategies_.tables(1).settle); });
  return *strategies_.result();
}

void TablesStep::update() {
  while (in_step()) walk([this] { walker_.go_on(); });
}

void TablesStep::rest() {
  if (!in_step() && under_way() && !options_.waits) return settle();
  for (const Ticket& ticket : strategies_.tickets()) await(ticket);
}

Ticket TablesStep::look_up(int t, std::span<const std::int64_t> ids, Dense out) {
  rest();
  return table(t).look_up(ids, out);
}

Task<void> TablesStep::compute(Piece piece) {
  at_ = piece;
  const bool stops = piece.work != weft::Work::update || (options_.waits && piece.block == 0);
  Walker::Gate& resumed = walker_.gate();
  if (stops) co_await resumed;
}

Task<void> TablesStep::wait(Ticket ticket) {
  await(ticket);
  co_return;
}

}  // namespace weft::python
