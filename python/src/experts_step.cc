#include "experts_step.h"

#include <algorithm>
#include <numeric>

#include "wait.h"
#include "weft/collective.h"
#include "weft/error.h"
#include "world/mesh.h"

namespace weft::python {

namespace {

constexpr int kGate = 1;  // part, behind that which gives the tokens

ModelShape shape_of(const ExpertsSpec& spec) {
  ExpertShape layer{.name = spec.name, .block = 0, .gate = kGate, .first_slice = kGate + 1};
  if (spec.shared) ++layer.first_slice;
  layer.slices = spec.route.slices;
  layer.width = spec.width;
  layer.experts = spec.route.experts;
  layer.choices = spec.route.choices;
  layer.capacity_factor = spec.route.capacity_factor;
  BlockShape block{.name = spec.name, .parts = {{.name = "tokens", .takes = {}, .gives = {"tokens"}}}};
  const std::string shared = spec.shared ? spec.name + ".shared" : "";
  for (PartShape& part : expert_parts(layer, "tokens", shared, kLoss)) block.parts.push_back(std::move(part));
  return {.model = "of Python", .parameters = {}, .blocks = {std::move(block)}, .experts = {layer}};
}

ExpertOptions losses_of(const ExpertsSpec& spec) {
  ExpertOptions out;
  out.count = spec.route.experts;
  out.choices = spec.route.choices;
  out.balance_loss = spec.balance_loss;
  out.z_loss = spec.z_loss;
  return out;
}

Mesh mesh_of(World& world, const ExpertsSpec& spec) {
  if (spec.ranks < 1 || world.size() % spec.ranks != 0)
    throw UsageError("layer '" + spec.name + "': " + std::to_string(world.size()) +
                     " ranks do not make groups of " + std::to_string(spec.ranks) +
                     " that share its experts");
  return {.dp = world.size(), .ep = spec.ranks};
}

}  // namespace

// ---- a call ----

ExpertCall::ExpertCall(ExpertsStep& step, int number)
    : step_(step),
      number_(number),
      forward_table_(step.forward_table(number)),
      backward_table_(step.backward_table(number)),
      walker_(*this, step.strategies()),
      given_(static_cast<std::size_t>(step.spec().route.slices)) {}

ExpertCall::Stop ExpertCall::walk(const std::function<void()>& go) {
  return step_.uninterrupted([&] {
    stop_ = {};
    go();
    return stop_;
  });
}

ExpertCall::Stop ExpertCall::begin_forward(std::int64_t tokens) {
  step_.experts(number_).set_tokens({&tokens, 1});
  return walk([this] { walker_.begin(forward_table_); });
}

ExpertCall::Stop ExpertCall::begin_backward() {
  if (backward_)
    throw UsageError("layer '" + step_.spec().name +
                     "': backward passes once through a call of the layer, and this one has had it");
  if (walking())
    throw UsageError("layer '" + step_.spec().name + "': backward begins before forward has ended");
  backward_ = true;
  return walk([this] { walker_.begin(backward_table_); });
}

ExpertCall::Stop ExpertCall::go_on() {
  return walk([this] { walker_.go_on(); });
}

const Route& ExpertCall::route(std::span<const std::int64_t> choices) {
  const RouteOptions& options = step_.spec().route;
  route_ = weft::route(choices, options);
  first_.assign(1, 0);
  for (int s = 0; s < options.slices; ++s) {
    const std::span<const std::int64_t> mine = counts(s);
    first_.push_back(first_.back() + std::reduce(mine.begin(), mine.end()));
  }
  return route_;
}

std::span<const std::int64_t> ExpertCall::counts(int slice) const {
  const auto experts = static_cast<std::size_t>(step_.spec().route.experts);
  return std::span(route_.counts).subspan(static_cast<std::size_t>(slice) * experts, experts);
}

void ExpertCall::give(RowExchange kind, int slice, Dense rows) {
  if (slice < 0 || static_cast<std::size_t>(slice) >= given_.size())
    throw UsageError("there is no slice " + std::to_string(slice));
  if (kind == RowExchange::dispatch)
    rows_ = rows;
  else
    given_[static_cast<std::size_t>(slice)][static_cast<std::size_t>(kind)] = rows;
}

void ExpertCall::give_router(std::span<const double> values) { router_.assign(values.begin(), values.end()); }

Experts::Rows ExpertCall::arrived(RowExchange kind, int slice) const {
  return step_.experts(number_).arrived(0, kind, slice, 0);
}

Task<void> ExpertCall::compute(Piece piece) {
  const ExpertShape& layer = step_.layer();
  using At = Stop::At;
  if (piece.part == layer.gate)
    stop_ = {At::gate, 0};
  else if (piece.part == layer.merge())
    stop_ = {At::merge, 0};
  else if (piece.part >= layer.first_slice)
    stop_ = {At::slice, piece.part - layer.first_slice};
  else if (piece.part > layer.gate)
    stop_ = {At::shared, 0};
  else
    co_return;  // tokens come from elsewhere
  Walker::Gate& resumed = walker_.gate();
  co_await resumed;
  step_.experts(number_).computed(piece);
}

Task<void> ExpertCall::wait(Ticket ticket) {
  step_.await(ticket);
  co_return;
}

Dense ExpertCall::tensor(const TensorName& name) {
  const ExpertShape& layer = step_.layer();
  const bool back = name.of == TensorName::Of::gradient;
  if (name.name == layer.router()) return Dense(std::span(router_));
  for (int s = 0; s < layer.slices; ++s) {
    const auto at = static_cast<std::size_t>(s);
    if (name.name == layer.counts(s)) {
      const std::span<const std::int64_t> mine = counts(s);
      return {reinterpret_cast<std::byte*>(const_cast<std::int64_t*>(mine.data())),
              static_cast<std::int64_t>(mine.size()), DType::int64};
    }
    if (name.name == layer.dispatch(s)) {
      if (back) return given_[at][static_cast<std::size_t>(RowExchange::dispatch_back)];
      if (rows_.count != first_.back() * layer.width)
        throw UsageError("layer '" + layer.name + "': " + std::to_string(rows_.count) +
                         " values are not the rows that were routed");
      return rows_.sub(first_[at] * layer.width, (first_[at + 1] - first_[at]) * layer.width);
    }
    if (name.name == layer.combine(s))
      return given_[at][static_cast<std::size_t>(back ? RowExchange::combine_back : RowExchange::combine)];
  }
  return TensorSource::tensor(name);
}

// ---- the layer ----

ExpertsStep::ExpertsStep(World& world, ExpertsSpec spec, std::uint32_t first_slot)
    : spec_(std::move(spec)),
      strategies_(world.engine(), world.comm(), shape_of(spec_), {.tokens = false, .first_slot = first_slot}),
      first_slot_(first_slot) {
  const Mesh mesh = mesh_of(world, spec_);
  const Comm group = axis_group(world, mesh, Axis::ep);
  replicas_ = axis_group(world, mesh, Axis::expert_dp);
  const std::vector<ExpertShape> layers = strategies_.shape().experts;
  Engine& engine = world.engine();
  ExpertsOptions experts;
  experts.name = spec_.name;
  experts.route = spec_.route;
  experts.dtype = spec_.dtype;
  experts.first_slot = strategies_.next_slot(group);
  experts_ = &strategies_.add(
      std::make_unique<OfCalls<Experts>>([&engine, group, layers, experts](std::uint32_t call) {
        ExpertsOptions mine = experts;
        mine.first_step = call;
        return std::make_unique<Experts>(engine, group, layers, std::move(mine));
      }));
  RouterSums::Options sums{.name = spec_.name + ".router", .experts = losses_of(spec_)};
  sums.first_slot = strategies_.next_slot(world.comm());
  sums_ = &strategies_.add(
      std::make_unique<OfCalls<RouterSums>>([&engine, comm = world.comm(), layers, sums](std::uint32_t call) {
        RouterSums::Options mine = sums;
        mine.first_step = call;
        return std::make_unique<RouterSums>(engine, comm, layers, std::move(mine));
      }));
  strategies_.install();
  const std::vector<Move>& moves = strategies_.tables(1).first.moves;
  const auto is_forward = [](const Move& m) {
    return m.kind == Move::Kind::compute && m.piece.work == weft::Work::forward;
  };
  const auto end = std::find_if(moves.rbegin(), moves.rend(), is_forward).base();
  forward_ = {.phase = Phase::forward, .moves = {moves.begin(), end}};
  backward_ = {.phase = Phase::forward, .moves = {end, moves.end()}};
  for (const Ticket& ticket : strategies_.tickets()) await(ticket);
}

std::uint32_t ExpertsStep::num_slots() const {
  return std::max({strategies_.next_slot(strategies_.world()), strategies_.next_slot(experts_->group()),
                   first_slot_ + 1}) -
         first_slot_;
}

Table ExpertsStep::numbered(Table table, int call) {
  for (Move& move : table.moves) {
    if (move.kind != Move::Kind::compute) move.micro_batch = call;
  }
  return table;
}

int ExpertsStep::begin(std::int64_t tokens) {
  if (tokens < 0) throw UsageError("a batch has no fewer than 0 tokens");
  for (const int number : std::exchange(forgotten_, {})) forget(number);
  const int number = next_++;
  experts_->add(number);
  sums_->add(number).set_micro_batches(1);
  calls_[number] = std::make_unique<ExpertCall>(*this, number);
  calls_[number]->begin_forward(tokens);
  return number;
}

ExpertCall& ExpertsStep::call(int number) {
  const auto found = calls_.find(number);
  if (found == calls_.end())
    throw UsageError("layer '" + spec_.name + "': there is no call " + std::to_string(number));
  return *found->second;
}

RouterSums& ExpertsStep::sums(int number) {
  RouterSums& out = sums_->at(number);
  const Ticket ticket = out.ticket(0, {});
  if (ticket.valid()) await(ticket);
  return out;
}

Ticket ExpertsStep::reduce(int number, Dense values) {
  const SubmitOptions how{.name = "gradients of experts",
                          .traffic = TrafficClass::gradient,
                          .slot = first_slot_,
                          .step = static_cast<std::uint32_t>(number)};
  Ticket out =
      strategies_.engine().submit(replicas_, how, [values](Comm comm) { return all_reduce(comm, values); });
  reduced_[number] = out;
  return out;
}

bool ExpertsStep::forget(int number) {
  const auto found = calls_.find(number);
  if (found == calls_.end()) return true;
  std::vector<Ticket> tickets = experts_->at(number).work();
  for (const Ticket& ticket : sums_->at(number).work()) tickets.push_back(ticket);
  if (const auto reduced = reduced_.find(number); reduced != reduced_.end())
    tickets.push_back(reduced->second);
  const bool ended = std::ranges::all_of(tickets, [](const Ticket& t) { return !t.valid() || t.done(); });
  if (!ended || found->second->walking()) {
    forgotten_.push_back(number);
    return false;
  }
  calls_.erase(found);
  experts_->remove(number);
  sums_->remove(number);
  reduced_.erase(number);
  return true;
}

std::vector<Ticket> ExpertsStep::tickets() const {
  std::vector<Ticket> out = strategies_.tickets();
  for (const auto& [number, ticket] : reduced_) out.push_back(ticket);
  return out;
}

void ExpertsStep::await(const Ticket& ticket) {
  if (!ticket.valid()) return;
  python::wait(strategies_.engine(), ticket);
  if (ticket.error()) std::rethrow_exception(ticket.error());
}

}  // namespace weft::python
