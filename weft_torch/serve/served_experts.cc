#include "weft_torch/serve/served_experts.h"

#include <torch/torch.h>

#include <algorithm>

#include "experts/route.h"

namespace weft {

namespace {

Dense dense_of(const torch::Tensor& rows) {
  const DType dtype = rows.scalar_type() == torch::kFloat64 ? DType::float64 : DType::float32;
  return {static_cast<std::byte*>(rows.data_ptr()), rows.numel(), dtype};
}

torch::Tensor numbers(std::span<const std::int64_t> values) {
  torch::Tensor out = torch::empty({static_cast<std::int64_t>(values.size())}, torch::kInt64);
  std::ranges::copy(values, out.data_ptr<std::int64_t>());
  return out;
}

}  // namespace

ServedExperts::ServedExperts(World& world, const Decoder& decoder, Options options)
    : world_(world), decoder_(decoder), profile_(std::move(options.profile)) {
  const ExpertOptions& experts = decoder.model().options().experts;
  ServingOptions serving;
  serving.width = decoder.model().options().width;
  serving.placer = options.placer;
  serving.placer.layers = static_cast<int>(decoder.experts().size());
  serving.placer.choices = experts.choices;
  serving.placer.place.ranks = world.size();
  serving.placer.place.experts = experts.count;
  // Everything is here anyway: no rank has fewer than it takes to have them all.
  serving.placer.place.most =
      std::max(serving.placer.place.most, (experts.count + world.size() - 1) / world.size());
  if (profile_ == nullptr)
    profile_ = std::make_shared<Popularity>(PopularityOptions{
        .layers = serving.placer.layers, .experts = experts.count, .choices = experts.choices});
  serving.profile = profile_;
  ServingDriver& driver = *this;
  serving_ = std::make_unique<ExpertServing>(world.engine(), world.comm(), serving, driver);
}

void ServedExperts::begin(std::int64_t tokens) {
  paths_.assign(static_cast<std::size_t>(tokens) * decoder_.experts().size() *
                    static_cast<std::size_t>(decoder_.model().options().experts.choices),
                0);
  serving_->begin(tokens);
}

void ServedExperts::end() {
  world_.run({.name = "end of a batch of experts", .traffic = TrafficClass::blocking},
             [this](Comm comm) { return serving_->end(comm); });
  if (!serving_->placer().kind().estimates) return;
  const std::size_t a_token =
      decoder_.experts().size() * static_cast<std::size_t>(decoder_.model().options().experts.choices);
  for (std::size_t at = 0; at < paths_.size(); at += a_token)
    profile_->record(std::span(paths_).subspan(at, a_token));
}

torch::Tensor ServedExperts::pass(int layer, const torch::Tensor& rows, const torch::Tensor& chosen) {
  const auto choices = static_cast<std::size_t>(chosen.size(1));
  const torch::Tensor flat = chosen.flatten().contiguous();
  chosen_.assign(flat.data_ptr<std::int64_t>(), flat.data_ptr<std::int64_t>() + flat.numel());
  for (std::size_t copy = 0; copy < chosen_.size(); ++copy)
    paths_[(copy / choices * decoder_.experts().size() + static_cast<std::size_t>(layer)) * choices +
           copy % choices] = chosen_[copy];
  rows_ = rows.contiguous();
  world_.run({.name = "layer of experts", .traffic = TrafficClass::blocking},
             [this, layer](Comm comm) { return serving_->pass(comm, layer, chosen_); });
  torch::Tensor out = torch::empty({static_cast<std::int64_t>(chosen_.size()), rows.size(1)}, rows.options());
  out.index_copy_(0, order_, returned_);
  return out.view({rows.size(0), chosen.size(1), rows.size(1)});
}

Dense ServedExperts::rows_to_send(int, std::span<const std::int64_t> copies) {
  const torch::NoGradGuard no_grad;
  order_ = numbers(copies);
  sent_ = rows_.index_select(0, order_.div(decoder_.model().options().experts.choices, "floor")).contiguous();
  return dense_of(sent_);
}

Dense ServedExperts::room(int, std::int64_t rows) {
  if (!here_.defined() || here_.size(0) != rows) here_ = torch::empty({rows, rows_.size(1)}, rows_.options());
  return dense_of(here_);
}

Dense ServedExperts::room_for_return(int, std::int64_t rows) {
  returned_ = torch::empty({rows, rows_.size(1)}, rows_.options());
  return dense_of(returned_);
}

Task<void> ServedExperts::compute(Comm comm, int layer, std::span<const std::int64_t> counts) {
  const auto work = [this, layer, counts] { compute_here(layer, counts); };
  co_await comm.compute(work);
}

// One expert after the other, its rows of all ranks together.
void ServedExperts::compute_here(int layer, std::span<const std::int64_t> counts) {
  const torch::NoGradGuard no_grad;
  const ExpertLayer& of = decoder_.experts()[static_cast<std::size_t>(layer)];
  const std::int64_t experts = of.up.size(0);
  const torch::Tensor order = numbers(by_expert(counts, experts));
  std::int64_t first = 0;
  for (std::int64_t e = 0; e < experts; ++e) {
    std::int64_t rows = 0;
    for (std::size_t at = static_cast<std::size_t>(e); at < counts.size();
         at += static_cast<std::size_t>(experts))
      rows += counts[at];
    if (rows == 0) continue;
    const torch::Tensor mine = order.slice(0, first, first + rows);
    here_.index_copy_(0, mine, pass_expert(of, e, here_.index_select(0, mine)));
    first += rows;
  }
}

}  // namespace weft
