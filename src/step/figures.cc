#include "step/figures.h"

#include <array>
#include <cmath>
#include <cstring>

#include "transports/endpoint.h"
#include "weft/error.h"

namespace weft {

namespace {

using Values = std::array<double, 6>;

Values values_of(const LinkCost& f) {
  return {f.hop_seconds,           f.seconds_per_byte,
          f.fold_seconds_per_byte, static_cast<double>(f.node_ranks),
          f.scale_up_hop_seconds,  f.scale_up_seconds_per_byte};
}
LinkCost figures_of(const Values& v) {
  return {.hop_seconds = v[0],
          .seconds_per_byte = v[1],
          .fold_seconds_per_byte = v[2],
          .node_ranks = static_cast<int>(v[3]),
          .scale_up_hop_seconds = v[4],
          .scale_up_seconds_per_byte = v[5]};
}

constexpr std::size_t kOneLevel = 3 * sizeof(double);  // of checkpoints that know no nodes

Values values_in(std::span<const std::byte> bytes) {
  Values out = values_of(LinkCost{});
  std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

bool takes(std::span<const std::byte> bytes) {
  Values values{};
  if (bytes.size() == sizeof values || bytes.size() == kOneLevel) {
    values = values_in(bytes);
    const bool nodes = values[3] >= 1 && values[3] <= 1e6;
    if (values[0] > 0 && values[1] > 0 && values[2] >= 0 && nodes && values[4] >= 0 && values[5] >= 0)
      return true;
  }
  throw UsageError("the figures of the link are not six, or three of one level, or not positive");
}

}  // namespace

Ticket plan_by(Engine& engine, const LinkCost& figures) {
  const auto set = [](Comm comm, LinkCost cost) -> Task<void> {
    comm.endpoint().set_cost(cost);
    co_return;
  };
  const SubmitOptions options{.name = "link figures", .local = true};
  return engine.submit(engine.world(), options, [set, figures](Comm comm) { return set(comm, figures); });
}

LinkFigures::LinkFigures(Engine& engine, const Comm& world, StateRegistry& registry)
    : engine_(engine), world_(world), registry_(registry), own_(world.cost()) {
  registry_.add(
      kOwner,
      {.rows = [this] { return std::vector<LiveRow>{row()}; }, .missing = {}, .commit = {}, .roll_back = {}});
}

LinkFigures::~LinkFigures() { registry_.remove(kOwner); }

LiveRow LinkFigures::row() {
  LiveRow out;
  out.row = {.key = {kOwner, "figures", "world"},
             .dtype = DType::float64,
             .rule = LayoutRule::restart,
             .shard = Shard::whole({std::tuple_size_v<Values>}),
             .peers = {world_.rank(), world_.size()}};
  out.read = [this](std::vector<std::byte>& scratch) -> std::span<const std::byte> {
    const Values values = values_of(current());
    const std::span<const std::byte> bytes = std::as_bytes(std::span(values));
    scratch.assign(bytes.begin(), bytes.end());
    return scratch;
  };
  out.write = [this](std::span<const std::byte> bytes) {
    loaded_ = bytes.empty() ? own_ : figures_of(values_in(bytes));
    planned_ = plan_by(engine_, loaded_);
  };
  out.takes = [](const Shard&, std::span<const std::byte> bytes) { return takes(bytes); };
  return out;
}

}  // namespace weft
