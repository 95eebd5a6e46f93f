#include "step/strategies.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "weft/collective.h"

namespace weft {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw UsageError("step: " + what); }

ModelShape checked(ModelShape shape) {
  shape.check();
  return shape;
}

Piece update_of(int block) { return {Work::update, block, 0, 0}; }

constexpr std::size_t kVerdictValues = 3;  // of a rank

// Tables that are verified say this of their own exchanges.
constexpr const char* kNames[] = {"plan of the step", "verdict of the step", "tokens of the step"};

}  // namespace

Strategies::Strategies(Engine& engine, const Comm& world, ModelShape shape, StepOptions options)
    : engine_(engine),
      world_(world),
      shape_(checked(std::move(shape))),
      options_(std::move(options)),
      clock_(shape_),
      figures_(engine, world, state_) {
  if (!(options_.clip_norm >= 0)) refuse("the norm to clip to must not be negative");
}

Strategies::~Strategies() { withdraw(); }

// A walk that failed leaves traffic announced that will never come.
void Strategies::withdraw() {
  for (std::size_t e = 0; e < announced_.size(); ++e) {
    if (announced_[e]) engine_.release();
    announced_[e] = false;
  }
}

std::uint32_t Strategies::next_slot(const Comm& group) const {
  const auto found = taken_slots_.find(group.group_id());
  const std::uint32_t own = group.group_id() == world_.group_id() ? kNumOwn : 1;  // 1: its comparison
  return options_.first_slot + own + (found == taken_slots_.end() ? 0 : found->second);
}

void Strategies::take(std::unique_ptr<Strategy> strategy) {
  if (!exchanges_.empty()) refuse("a strategy that is added after install()");
  taken_slots_[strategy->group().group_id()] += strategy->num_slots();
  const auto place = std::find(strategies_.begin(), strategies_.end(), nullptr);
  if (place != strategies_.end())
    *place = std::move(strategy);
  else
    strategies_.push_back(std::move(strategy));
}

void Strategies::make_place(ModelShape shape, std::span<const Strategy* const> leaving) {
  if (under_way_) refuse("another layout while a step is under way");
  const auto same = [](const ParameterShape& a, const ParameterShape& b) { return a.name == b.name; };
  if (shape.blocks != shape_.blocks || !std::ranges::equal(shape.parameters, shape_.parameters, same))
    refuse("another layout has the same parts and parameters");
  shape_ = checked(std::move(shape));
  for (auto& strategy : strategies_) {
    if (std::ranges::find(leaving, strategy.get()) == leaving.end()) continue;
    const auto slots = taken_slots_.find(strategy->group().group_id());
    slots->second -= strategy->num_slots();
    if (slots->second == 0) taken_slots_.erase(slots);
    strategy.reset();
  }
  exchanges_.clear();
  announced_.clear();
  group_comparisons_.clear();
  tables_.clear();
  forward_.reset();
}

void Strategies::install() {
  if (std::find(strategies_.begin(), strategies_.end(), nullptr) != strategies_.end())
    refuse("a strategy went away and none came in its place");
  takes_.assign(shape_.parameters.size(), {});
  parameter_of_.assign(strategies_.size(), {});
  why_updates_wait_.clear();
  world_verdict_ = false;
  for (std::size_t s = 0; s < strategies_.size(); ++s) {
    const std::vector<std::string> names = strategies_[s]->gradients();
    for (std::size_t i = 0; i < names.size(); ++i) {
      const auto found = std::find_if(shape_.parameters.begin(), shape_.parameters.end(),
                                      [&](const ParameterShape& p) { return p.name == names[i]; });
      if (found == shape_.parameters.end()) refuse("the model has no parameter '" + names[i] + "'");
      Place& place = takes_[static_cast<std::size_t>(found - shape_.parameters.begin())];
      if (place.strategy >= 0) refuse("two strategies take the gradient of '" + names[i] + "'");
      place = {static_cast<int>(s), static_cast<int>(i)};
      parameter_of_[s].push_back(static_cast<int>(found - shape_.parameters.begin()));
    }
    if (strategies_[s]->group().size() != world_.size()) world_verdict_ = true;
  }
  for (std::size_t p = 0; p < takes_.size(); ++p) {
    if (takes_[p].strategy < 0)
      refuse("no strategy takes the gradient of '" + shape_.parameters[p].name + "'");
  }
  const auto add = [this](bool holds, const std::string& reason) {
    if (holds && why_updates_wait_.find(reason) == std::string::npos)
      why_updates_wait_ += (why_updates_wait_.empty() ? "" : ", ") + reason;
  };
  add(options_.clip_norm > 0, "clip-norm is of all gradients");
  add(options_.skip_not_finite, "skip-not-finite may leave the step out");
  add(!options_.updates_wait.empty(), options_.updates_wait);
  for (const auto& s : strategies_) add(!s->why_updates_wait().empty(), s->why_updates_wait());
  // Where updates go ahead, a shard that is not finite has ended the job before there is a verdict.
  for (const auto& s : strategies_) world_verdict_ |= s->has_shards() && !why_updates_wait_.empty();
  list_exchanges();
  compare();
  tables(fewest_micro_batches(options_.stage));
}

// Each group for itself; in that of the world the ranks also tell each other who needs a verdict of all.
void Strategies::compare() {
  const std::uint64_t parts[] = {hash_part(options_.clip_norm),       options_.skip_not_finite ? 1U : 0U,
                                 options_.tokens ? 1U : 0U,           options_.lookahead ? 1U : 0U,
                                 why_updates_wait_.empty() ? 0U : 1U, options_.compared};
  const SubmitOptions submit{.name = kNames[kPlan],
                             .traffic = TrafficClass::prior,
                             .slot = options_.first_slot + kPlan,
                             .step = installed_++};
  const auto hash_of_group = [&](std::uint64_t group) {
    std::vector<PlanRow> rows;
    std::vector<Exchange> exchanges;
    std::vector<std::uint64_t> options(std::begin(parts), std::end(parts));
    for (const auto& s : strategies_) {
      if (s->group().group_id() != group) continue;
      if (const std::optional<std::uint64_t> instead = s->compared()) {
        options.push_back(*instead);
        continue;
      }
      const std::vector<PlanRow> more = s->rows();
      rows.insert(rows.end(), more.begin(), more.end());
    }
    std::ranges::copy_if(exchanges_, std::back_inserter(exchanges), [group](const Exchange& e) {
      return e.group == group && e.kind == Exchange::Kind::collective;
    });
    return hash_of(rows, exchanges, options);
  };
  constexpr const char* kWhat =
      "plan of the step (tensors, schedule, schemes, divisors, exchanges, clipping, skipping, lookahead, "
      "not_finite, "
      "optimizer or other options)";
  verdict_wishes_ = std::make_shared<std::vector<std::int64_t>>();
  comparison_ = compare_plans(engine_, world_, submit, hash_of_group(world_.group_id()), kWhat,
                              world_verdict_ ? 1 : 0, verdict_wishes_);
  for (std::size_t e = 0; e < exchanges_.size(); ++e) {
    if (exchanges_[e].name != kNames[kPlan] || e == kPlan) continue;
    const auto with = std::ranges::find_if(
        strategies_, [&](const auto& s) { return s->group().group_id() == exchanges_[e].group; });
    group_comparisons_[static_cast<int>(e)] =
        compare_plans(engine_, (*with)->group(), submit, hash_of_group(exchanges_[e].group), kWhat);
  }
}

void Strategies::list_exchanges() {
  exchanges_.clear();
  owner_.clear();
  for (int own = 0; own < num_own(); ++own) {
    exchanges_.push_back({.name = kNames[own],
                          .traffic = TrafficClass::prior,
                          .group = world_.group_id(),
                          .slot = options_.first_slot + static_cast<std::uint32_t>(own),
                          .at_installation = own == kPlan});
  }
  for (std::size_t s = 0; s < strategies_.size(); ++s) {
    const std::vector<Exchange> more = strategies_[s]->exchanges();
    for (std::size_t e = 0; e < more.size(); ++e) {
      exchanges_.push_back(more[e]);
      owner_.push_back({static_cast<int>(s), static_cast<int>(e)});
    }
  }
  for (const auto& [group, slots] : taken_slots_) {
    if (group == world_.group_id()) continue;
    exchanges_.push_back({.name = kNames[kPlan],
                          .traffic = TrafficClass::prior,
                          .group = group,
                          .slot = options_.first_slot + kPlan,
                          .at_installation = true});
  }
}

std::vector<PlanRow> Strategies::rows() const {
  std::vector<PlanRow> out;
  for (const auto& s : strategies_) {
    const std::vector<PlanRow> more = s->rows();
    out.insert(out.end(), more.begin(), more.end());
  }
  return out;
}

// ---- tables ----

std::vector<Piece> Strategies::order_of(Phase phase, int micro_batches) const {
  std::vector<Piece> updates;
  updates.reserve(shape_.blocks.size());
  for (int b = 0; b < shape_.num_blocks(); ++b) updates.push_back(update_of(b));
  if (phase == Phase::settle) return updates;
  std::vector<Piece> computed = step_order(shape_, options_.stage, micro_batches);
  if (phase == Phase::first) return computed;
  std::vector<Piece> out;
  const bool together = !why_updates_wait_.empty();
  if (together) out = updates;
  for (const Piece& piece : computed) {
    const bool enters = piece.work == Work::forward && piece.part == 0 && piece.micro_batch == 0;
    if (enters && !together) out.push_back(update_of(piece.block));
    out.push_back(piece);
  }
  return out;
}

// The verdict of a step that has ended is known before the next one's first gradient: by then its state is
// committed. (Behind the first forward a stage would wait for all stages behind it.)
void Strategies::weave_own(Weaver& weaver) const {
  const Phase phase = weaver.phase();
  const int last_block = shape_.num_blocks() - 1;
  const int last_part = static_cast<int>(shape_.blocks.back().parts.size()) - 1;
  const Piece forward_end{Work::forward, last_block, last_part, weaver.micro_batches() - 1};
  if (phase == Phase::first) {
    weaver.at_begin(wait_of(kPlan, 0));
    for (const auto& [exchange, ticket] : group_comparisons_) weaver.at_begin(wait_of(exchange, 0));
  }
  if (options_.tokens) {
    // A settled step's loss comes with the next one's tokens.
    const int step = phase == Phase::settle ? -1 : 0;
    const bool starts = !options_.lookahead || phase == Phase::first;
    if (starts) weaver.at_begin(start_of(kBatch, step));
    if (options_.lookahead && phase == Phase::first)
      weaver.after(weaver.before_backward(), wait_of(kBatch, 0));
    else
      weaver.at_begin(wait_of(kBatch, step));
    if (options_.lookahead) weaver.after(forward_end, start_of(kBatch, -1));
  }
  if (!why_updates_wait_.empty()) return;  // gate() puts the verdict in front of the updates
  if (phase == Phase::steady) {
    weaver.after(update_of(last_block), start_of(kVerdict, 1));
    weaver.after(weaver.before_backward(), wait_of(kVerdict, 1));
  } else if (phase == Phase::settle) {
    weaver.at_end(start_of(kVerdict, 0));
    weaver.at_end(wait_of(kVerdict, 0));
  }
}

// All that updates wait for comes first, then the verdict, then the updates.
void Strategies::gate(Table& table) const {
  if (why_updates_wait_.empty() || table.phase == Phase::first) return;
  const auto is_update = [](const Move& m) {
    return m.kind == Move::Kind::compute && m.piece.work == Work::update;
  };
  // After the last update.
  const auto behind = std::find_if(table.moves.rbegin(), table.moves.rend(), is_update).base();
  const int last = table.phase == Phase::settle ? 0 : 1;
  std::vector<Move> moves;
  std::copy_if(table.moves.begin(), behind, std::back_inserter(moves),
               [&](const Move& m) { return !is_update(m); });
  moves.push_back(start_of(kVerdict, last));
  moves.push_back(wait_of(kVerdict, last));
  std::copy_if(table.moves.begin(), behind, std::back_inserter(moves), is_update);
  moves.insert(moves.end(), behind, table.moves.end());
  table.moves = std::move(moves);
}

// Behind it the weaver means the exchanges of the list itself.
void Strategies::weave_strategies(Weaver& weaver) const {
  int base = num_own();
  for (const auto& strategy : strategies_) {
    weaver.set_base(base);
    strategy->weave(weaver);
    base += static_cast<int>(strategy->exchanges().size());
  }
  weaver.set_base(0);
}

Tables Strategies::make_tables(int micro_batches) const {
  Tables out;
  out.exchanges = exchanges_;
  const auto add_group = [&out](const Comm& group) {
    std::vector<int>& members = out.groups[group.group_id()];
    members.clear();
    for (int r = 0; r < group.size(); ++r) members.push_back(group.world_rank(r));
  };
  add_group(world_);
  for (const auto& strategy : strategies_) add_group(strategy->group());
  for (Table* table : {&out.first, &out.steady, &out.settle}) {
    Weaver weaver(table->phase, shape_, micro_batches, order_of(table->phase, micro_batches));
    weave_strategies(weaver);
    weave_own(weaver);
    *table = weaver.take();
    gate(*table);
  }
  return out;
}

const Tables& Strategies::tables(int micro_batches) {
  if (exchanges_.empty()) refuse("tables before install()");
  if (micro_batches < 1) refuse("a step has at least one micro-batch, if an empty one");
  const auto found = tables_.find(micro_batches);
  if (found != tables_.end()) return found->second;
  Tables made = make_tables(micro_batches);
  const std::vector<std::string> breaches = verify_alone(verified(made, micro_batches)).breaches;
  if (!breaches.empty()) refuse("the table does not hold: " + breaches.front());
  return tables_.emplace(micro_batches, std::move(made)).first->second;
}

VerifiedRank Strategies::verified(const Tables& tables, int micro_batches) const {
  return {.tables = &tables,
          .shape = &shape_,
          .micro_batches = micro_batches,
          .verdict = why_updates_wait_.empty() ? -1 : static_cast<int>(kVerdict)};
}

int verify_together(std::span<Strategies* const> ranks, int micro_batches) {
  std::vector<VerifiedRank> all;
  for (Strategies* rank : ranks) all.push_back(rank->verified(micro_batches));
  const Verification found = verify(all);
  if (!found.breaches.empty())
    refuse("the tables of the ranks do not hold together: " + found.breaches.front());
  return found.distinct;
}

const Table& Strategies::forward_table() {
  if (under_way_) refuse("a forward alone while a step is under way");
  if (forward_) return *forward_;
  Weaver weaver(Phase::forward, shape_, 1, forward_order(shape_));
  weave_strategies(weaver);
  const std::vector<Move> moves = weaver.take().moves;
  const auto is_awaited = [&](int exchange) {
    return std::ranges::any_of(
        moves, [&](const Move& m) { return m.kind == Move::Kind::wait && m.exchange == exchange; });
  };
  Table out{.phase = Phase::forward, .moves = {}};
  std::ranges::copy_if(moves, std::back_inserter(out.moves), [&](const Move& m) {
    if (m.kind == Move::Kind::compute) return true;
    const bool moves_data = m.kind == Move::Kind::start || m.kind == Move::Kind::wait;
    return moves_data && exchanges_[static_cast<std::size_t>(m.exchange)].each_micro_batch &&
           is_awaited(m.exchange);
  });
  return forward_.emplace(std::move(out));
}

const Table& Strategies::next_table(int micro_batches) {
  const Tables& all = tables(micro_batches);
  return under_way_ ? all.steady : all.first;
}

// ---- events ----

void Strategies::batch_known(const BatchInfo& batch) {
  next_batch_ = batch;
  for (const auto& s : strategies_) s->batch_known(batch);
}

template <class T>
void Strategies::hand_over(int parameter, std::span<const T> gradient) {
  const Time from = engine_.now();
  const Place& place = takes_[static_cast<std::size_t>(parameter)];
  at(place.strategy).gradient_ready(place.local, gradient);
  clock_.handed_over(parameter, from, engine_.now());
}
void Strategies::gradient_ready(int parameter, std::span<const float> gradient) {
  hand_over(parameter, gradient);
}
void Strategies::gradient_ready(int parameter, std::span<const double> gradient) {
  hand_over(parameter, gradient);
}

void Strategies::number_step(std::int64_t number) { next_number_ = number; }

void Strategies::begin(const Table& table) {
  last_loss_.reset();
  result_.reset();
  norm_ = 0;
  settles_ = table.phase == Phase::settle;
  clock_.begin(table);
  announced_.resize(exchanges_.size());
  if (settles_ || table.phase == Phase::forward) return;
  for (const auto& s : strategies_) s->step_begin();
  step_before_ = step_;
  step_ = next_number_.value_or(step_ + 1);
  next_number_.reset();
  backwards_left_ = static_cast<int>(std::count_if(table.moves.begin(), table.moves.end(), [](const Move& m) {
    return m.kind == Move::Kind::compute && adds_gradients(m.piece.work);
  }));
}

void Strategies::computed(const Piece& piece) {
  clock_.computed(piece, engine_.now());
  for (const auto& s : strategies_) s->computed(piece);
  if (!adds_gradients(piece.work) || --backwards_left_ > 0) return;
  for (const auto& s : strategies_) s->step_end();
}

// Gradient traffic gives way from here on, until the announced exchange has started.
void Strategies::announce(const Move& move) {
  const auto which = static_cast<std::size_t>(move.exchange);
  if (announced_[which]) return;
  announced_[which] = true;
  double predicted = exchanges_[which].predicted_seconds;
  if (move.exchange >= num_own()) {
    const Place& place = owner_[which - static_cast<std::size_t>(num_own())];
    predicted = std::max(predicted, at(place.strategy).announced(place.local, move.when()));
  }
  engine_.hold(predicted);
}

void Strategies::start(const Move& move, TensorSource& tensors) {
  if (move.inside) return;
  if (move.exchange == kVerdict) return start_verdict();
  if (is_batch(move.exchange)) return start_batch(move.offset);
  const Place& place = owner_[static_cast<std::size_t>(move.exchange - num_own())];
  at(place.strategy).start(place.local, move.when(), tensors);
  if (!announced_[static_cast<std::size_t>(move.exchange)]) return;
  announced_[static_cast<std::size_t>(move.exchange)] = false;
  engine_.release();
}

Ticket Strategies::ticket(const Move& wait) const {
  if (wait.exchange == kPlan) return comparison_;
  if (wait.exchange == kVerdict) return verdict_ticket_;
  if (is_batch(wait.exchange)) return batch_ticket_;
  if (const auto group = group_comparisons_.find(wait.exchange); group != group_comparisons_.end())
    return group->second;
  const Place& place = owner_[static_cast<std::size_t>(wait.exchange - num_own())];
  return at(place.strategy).ticket(place.local, wait.when());
}

std::string_view Strategies::strategy_of(int exchange) const {
  const int behind_own = exchange - num_own();
  if (behind_own < 0 || static_cast<std::size_t>(behind_own) >= owner_.size()) return kOwnExchanges;
  return at(owner_[static_cast<std::size_t>(behind_own)].strategy).name();
}

void Strategies::waited(const Move& wait, Time since) {
  clock_.waited(exchange(wait.exchange).each_micro_batch, since, engine_.now());
  if (wait.exchange == kPlan)
    world_verdict_ = std::ranges::any_of(*verdict_wishes_, [](std::int64_t wish) { return wish != 0; });
  if (wait.exchange == kVerdict) take_verdict();
  if (is_batch(wait.exchange)) batch_agreed();
}

void Strategies::end(const Table& table) {
  clock_.end(engine_.now());
  under_way_ = table.phase == Phase::first || table.phase == Phase::steady;
}

// ---- tokens and losses ----

void Strategies::start_batch(int offset) {
  if (!next_batch_ && !settles_) refuse("the batch of the next step was not announced (batch_known)");
  const BatchInfo batch = settles_ ? BatchInfo{} : *std::exchange(next_batch_, std::nullopt);
  const auto size = static_cast<std::size_t>(world_.size()), mine = static_cast<std::size_t>(world_.rank());
  batch_values_.assign(2 * size, 0);
  batch_values_[2 * mine] = static_cast<double>(batch.tokens);
  batch_values_[2 * mine + 1] = loss_sum_;
  // The loss that comes along: of the step that is walked where its forward is over, else of the one before.
  loss_pending_ = offset < 0 || under_way_;
  loss_step_ = offset < 0 ? step_ : step_before_;
  tokens_before_ = tokens_;
  const SubmitOptions submit{.name = kNames[kBatch],
                             .traffic = TrafficClass::prior,
                             .slot = options_.first_slot + kBatch,
                             .step = batches_++};
  const Dense data(std::span<double>{batch_values_});
  batch_ticket_ = engine_.submit(world_, submit, [data](Comm comm) { return all_gather(comm, data); });
}

void Strategies::batch_agreed() {
  batch_ticket_ = {};
  double tokens = 0, loss = 0;
  for (std::size_t r = 0; r < batch_values_.size(); r += 2) {
    tokens += batch_values_[r];
    loss += batch_values_[r + 1];
  }
  tokens_ = tokens;
  if (!std::exchange(loss_pending_, false)) return;
  if (tokens_before_ > 0) last_loss_ = loss / tokens_before_;
  if (std::isfinite(loss) || options_.skip_not_finite) return;
  std::string text = "step " + std::to_string(loss_step_) + ": the loss is ";
  bool first = true;
  for (std::size_t r = 0; r < batch_values_.size(); r += 2) {
    const double value = batch_values_[r + 1];
    if (std::isfinite(value)) continue;
    text += std::string(first ? "" : ", ") + (std::isnan(value) ? "NaN" : "infinite") + " on rank " +
            std::to_string(r / 2);
    first = false;
  }
  if (first) text += "not finite in its sum over the ranks";
  throw Error(text + "; a smaller learning rate or --clip-norm may help");
}

// ---- the verdict ----

void Strategies::start_verdict() {
  StepResult all{.committed = true, .step = 0, .bad = {}, .text = {}};
  for (std::size_t s = 0; s < strategies_.size(); ++s) {
    const StepResult one = strategies_[s]->verdict();
    all.step = std::max(all.step, one.step);  // who has state knows of the steps before a checkpoint
    if (one.committed) continue;
    all.committed = false;
    all.text += (all.text.empty() ? "" : "; ") + one.text;
    for (StepResult::Bad bad : one.bad) {
      bad.parameter = parameter_of_[s][static_cast<std::size_t>(bad.parameter)];
      all.bad.push_back(bad);
    }
  }
  double squares = 0;
  if (options_.clip_norm > 0 && all.committed) {
    for (const auto& s : strategies_) {
      if (!world_verdict_ || s->group().rank() == 0 || s->has_shards()) squares += s->squares();
    }
  }
  result_ = std::move(all);
  verdict_values_ = {result_->committed ? 0.0 : 1.0, squares, options_.clip_norm};
  if (!world_verdict_) return;
  const auto size = static_cast<std::size_t>(world_.size()), mine = static_cast<std::size_t>(world_.rank());
  const std::vector<double> own = std::exchange(verdict_values_, std::vector<double>(kVerdictValues * size));
  std::copy(own.begin(), own.end(),
            verdict_values_.begin() + static_cast<std::ptrdiff_t>(kVerdictValues * mine));
  const SubmitOptions submit{.name = kNames[kVerdict],
                             .traffic = TrafficClass::prior,
                             .slot = options_.first_slot + kVerdict,
                             .step = verdicts_++};
  const Dense data(std::span<double>{verdict_values_});
  verdict_ticket_ = engine_.submit(world_, submit, [data](Comm comm) { return all_gather(comm, data); });
}

std::string Strategies::clips_apart() const {
  for (std::size_t r = kVerdictValues; r < verdict_values_.size(); r += kVerdictValues) {
    if (verdict_values_[r + 2] == verdict_values_[2]) continue;
    return fmt::format(
        "step {}: gradients are clipped to a norm of {} on rank 0 and of {} on rank {} (0: not at all): all "
        "ranks clip to the same one",
        step_, verdict_values_[2], verdict_values_[r + 2], r / kVerdictValues);
  }
  return {};
}

void Strategies::take_verdict() {
  verdict_ticket_ = {};
  double squares = 0;
  std::string elsewhere;
  for (std::size_t r = 0; r < verdict_values_.size(); r += kVerdictValues) {
    squares += verdict_values_[r + 1];
    if (verdict_values_[r] != 0)
      elsewhere += (elsewhere.empty() ? "" : ", ") + std::to_string(r / kVerdictValues);
  }
  if (result_->committed && !elsewhere.empty()) {
    result_->committed = false;
    result_->text = "step " + std::to_string(result_->step) +
                    " was not committed; gradients of a group with rank " + elsewhere + " are not finite";
  }
  const std::string apart = clips_apart();
  if (!apart.empty()) result_->committed = false;
  norm_ = std::sqrt(squares);
  // torch's rule, with its small number against a division by zero.
  scale_ = options_.clip_norm > 0 ? std::min(1.0, options_.clip_norm / (norm_ + 1e-6)) : 1;
  if (result_->committed) {
    for (const auto& s : strategies_) s->stage();
    state_.commit();
  } else {
    state_.roll_back();
  }
  for (const auto& s : strategies_) s->close(result_->committed, scale_);
  if (!apart.empty()) throw UsageError(apart);
  if (!result_->committed && !options_.skip_not_finite) throw Error(result_->text);
}

// ---- what the driver asks ----

void Strategies::result_of(int parameter, std::span<float> out) const {
  const Place& place = takes_[static_cast<std::size_t>(parameter)];
  at(place.strategy).result_of(place.local, out);
}
void Strategies::result_of(int parameter, std::span<double> out) const {
  const Place& place = takes_[static_cast<std::size_t>(parameter)];
  at(place.strategy).result_of(place.local, out);
}
bool Strategies::used(int parameter) const {
  const Place& place = takes_[static_cast<std::size_t>(parameter)];
  return at(place.strategy).used(place.local);
}

std::vector<Ticket> Strategies::tickets() const {
  std::vector<Ticket> out{comparison_, batch_ticket_, verdict_ticket_};
  for (const auto& [exchange, ticket] : group_comparisons_) out.push_back(ticket);
  for (const Place& place : owner_) {
    for (const int offset : {-1, 0, 1}) out.push_back(at(place.strategy).ticket(place.local, {offset, 0}));
  }
  for (const auto& s : strategies_) {
    const std::vector<Ticket> more = s->work();
    out.insert(out.end(), more.begin(), more.end());
  }
  std::erase_if(out, [](const Ticket& t) { return !t.valid(); });
  return out;
}

}  // namespace weft
