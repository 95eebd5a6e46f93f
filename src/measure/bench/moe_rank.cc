// One rank of `weft bench moe`.
#include <numeric>

#include "measure/bench/moe.h"
#include "weft/error.h"

namespace weft {

namespace {

constexpr const char* kName = "moe";

// A small integer, so that sums have no rounding.
float value_of(int rank, std::int64_t token, std::int64_t column) {
  return static_cast<float>((5 * rank + 3 * token + 7 * column) % 11);
}
float mark_of(std::int64_t expert) { return static_cast<float>(expert + 1); }

ModelShape shape_of(const MoeBench& bench, int slices) {
  ExpertShape layer{.name = kName, .block = 0, .gate = 1, .first_slice = 2, .slices = slices};
  layer.width = bench.width;
  layer.experts = bench.experts;
  layer.choices = bench.choices;
  layer.capacity_factor = bench.capacity_factor;
  BlockShape block{.name = kName, .parts = {{.name = "tokens", .takes = {}, .gives = {"tokens"}}}};
  for (PartShape& part : expert_parts(layer, "tokens", "", kLoss)) block.parts.push_back(std::move(part));
  return {.model = kName, .parameters = {}, .blocks = {std::move(block)}, .experts = {layer}};
}

}  // namespace

MoeRank::MoeRank(const BenchOptions& options, const MoeRouting& routing, const MoeCase& c, Engine& engine,
                 bool in_virtual_time)
    : bench_(options.moe),
      choices_(routing.of(engine.world().rank())),
      comm_(engine.world()),
      options_{.experts = bench_.experts,
               .choices = bench_.choices,
               .capacity_factor = bench_.capacity_factor,
               .slices = c.slices},
      route_(route(choices_, options_)),
      strategies_(engine, engine.world(), shape_of(bench_, c.slices),
                  {.tokens = false, .first_slot = c.slot}),
      in_virtual_time_(in_virtual_time),
      made_(static_cast<std::size_t>(c.slices)) {
  ExpertsOptions o;
  o.route = options_;
  o.all_to_all = c.algorithm;
  o.first_slot = strategies_.next_slot(comm_);
  experts_ =
      &strategies_.add(std::make_unique<Experts>(engine, comm_, strategies_.shape().experts, std::move(o)));
  strategies_.install();
  rows_.resize(static_cast<std::size_t>(route_.num_rows() * bench_.width));
  for (std::size_t row = 0; row < route_.token_of_row.size(); ++row) {
    const std::int64_t token = route_.token_of_row[row];
    for (std::int64_t w = 0; token >= 0 && w < bench_.width; ++w)
      rows_[row * static_cast<std::size_t>(bench_.width) + static_cast<std::size_t>(w)] =
          value_of(comm_.rank(), token, w);
  }
  for (int s = 0; s <= c.slices; ++s) {
    const std::span before =
        std::span(route_.counts)
            .first(static_cast<std::size_t>(s) * static_cast<std::size_t>(bench_.experts));
    first_.push_back(std::reduce(before.begin(), before.end()));
  }
}

std::span<const std::int64_t> MoeRank::counts(int slice) const {
  const auto experts = static_cast<std::size_t>(bench_.experts);
  return std::span(route_.counts).subspan(static_cast<std::size_t>(slice) * experts, experts);
}

void MoeRank::prepare(bool looked_at) {
  looked_at_ = looked_at;
  const std::int64_t tokens = static_cast<std::int64_t>(choices_.size()) / bench_.choices;
  experts_->set_tokens({&tokens, 1});
}

Task<void> MoeRank::forward(MoeRank* me) {
  const Table* const table = &me->strategies_.forward_table();
  co_await run_step(me, &me->strategies_, table);
}

Experts::Rows MoeRank::computed(int slice) const {
  if (!alone()) return experts_->arrived(0, RowExchange::dispatch, slice, 0);
  const auto s = static_cast<std::size_t>(slice);
  Experts::Rows out;
  out.count = first_[s + 1] - first_[s];
  out.counts.assign(counts(slice).begin(), counts(slice).end());
  const auto values = static_cast<std::size_t>(out.count * bench_.width);
  const Dense own(std::span(const_cast<float*>(rows_.data()) + first_[s] * bench_.width, values));
  out.memory = std::make_shared_for_overwrite<std::byte[]>(own.size_bytes());
  std::ranges::copy(own.bytes(), out.memory.get());
  return out;
}

Task<void> MoeRank::compute(Piece piece) {
  const int slice = piece.part - layer().first_slice;
  if (piece.work == Work::forward && piece.part == layer().merge()) keep_home();
  if (piece.work != Work::forward || slice < 0 || slice >= layer().slices) co_return;
  Experts::Rows& rows = made_[static_cast<std::size_t>(slice)] = computed(slice);
  if (!looked_at_) co_return;
  const std::int64_t local = experts_->local_experts();
  float* value = reinterpret_cast<float*>(rows.memory.get());
  for (std::size_t at = 0; at < rows.counts.size(); ++at) {
    const std::int64_t expert = comm_.rank() * local + static_cast<std::int64_t>(at) % local;
    for (std::int64_t i = 0; i < rows.counts[at] * bench_.width; ++i) *value++ += mark_of(expert);
  }
}

Task<void> MoeRank::wait(Ticket ticket) {
  if (in_virtual_time_)
    co_await ticket;
  else
    ticket.wait();
}

Dense MoeRank::tensor(const TensorName& name) {
  for (int s = 0; s < layer().slices; ++s) {
    const auto at = static_cast<std::size_t>(s);
    if (name.name == layer().dispatch(s))
      return Dense(
          std::span(rows_).subspan(static_cast<std::size_t>(first_[at] * bench_.width),
                                   static_cast<std::size_t>((first_[at + 1] - first_[at]) * bench_.width)));
    if (name.name == layer().counts(s)) {
      const std::span<const std::int64_t> given = counts(s);
      return {reinterpret_cast<std::byte*>(const_cast<std::int64_t*>(given.data())),
              static_cast<std::int64_t>(given.size()), DType::int64};
    }
    if (name.name == layer().combine(s))
      return {made_[at].memory.get(), made_[at].count * bench_.width, DType::float32};
  }
  return TensorSource::tensor(name);
}

std::uint64_t MoeRank::bytes_sent() {
  experts_->step_end();
  experts_->close(true, 1);  // nobody else gives a verdict here
  return experts_->step_bytes();
}

// What has come home is let go of when the merge is over.
void MoeRank::keep_home() {
  home_.clear();
  for (int s = 0; s < layer().slices && looked_at_; ++s)
    home_.push_back(alone() ? made_[static_cast<std::size_t>(s)]
                            : experts_->arrived(0, RowExchange::combine, s, 0));
}

bool MoeRank::correct(bool spoil) const {
  const std::vector<Experts::Rows>& home = home_;
  const auto choices = static_cast<std::size_t>(bench_.choices);
  const std::size_t tokens = choices_.size() / choices;
  const std::int64_t places = bench_.capacity_factor > 0
                                  ? capacity_of(options_, static_cast<std::int64_t>(tokens))
                                  : static_cast<std::int64_t>(choices_.size());
  std::vector<std::int64_t> taken(static_cast<std::size_t>(bench_.experts));
  bool out = true;
  for (std::size_t choice = 0; choice < choices; ++choice) {
    for (std::size_t t = 0; t < tokens; ++t) {
      const std::size_t copy = t * choices + choice;
      const bool kept = taken[static_cast<std::size_t>(choices_[copy])]++ < places;
      const std::int64_t row = route_.row_of_copy[copy];
      out = out && kept == (row >= 0);
      if (!out || !kept) continue;
      std::size_t s = 0;
      while (first_[s + 1] <= row) ++s;
      const float* const values =
          reinterpret_cast<const float*>(home[s].memory.get()) + (row - first_[s]) * bench_.width;
      for (std::int64_t w = 0; w < bench_.width; ++w) {
        const float spoilt = spoil && w == 0 ? 1 : 0;
        out = out && values[w] + spoilt ==
                         value_of(comm_.rank(), static_cast<std::int64_t>(t), w) + mark_of(choices_[copy]);
      }
    }
  }
  return out;
}

}  // namespace weft
