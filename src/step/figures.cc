#include "step/figures.h"

#include <array>
#include <cmath>
#include <cstring>

#include "transports/endpoint.h"
#include "weft/error.h"

namespace weft {

namespace {

using Values = std::array<double, 3>;

std::array<double LinkCost::*, 3> fields() {
  return {&LinkCost::hop_seconds, &LinkCost::seconds_per_byte, &LinkCost::fold_seconds_per_byte};
}

bool takes(std::span<const std::byte> bytes) {
  Values values{};
  if (bytes.size() == sizeof values) {
    std::memcpy(values.data(), bytes.data(), sizeof values);
    if (values[0] > 0 && values[1] > 0 && values[2] >= 0) return true;
  }
  throw UsageError("the figures of the link are not three, or not positive");
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
    const LinkCost figures = current();
    scratch.clear();
    for (double LinkCost::* const field : fields()) {
      const std::span<const std::byte> value = std::as_bytes(std::span(&(figures.*field), 1));
      scratch.insert(scratch.end(), value.begin(), value.end());
    }
    return scratch;
  };
  out.write = [this](std::span<const std::byte> bytes) {
    Values values{};
    loaded_ = own_;
    if (!bytes.empty()) {
      std::memcpy(values.data(), bytes.data(), sizeof values);
      for (std::size_t i = 0; i < values.size(); ++i) loaded_.*fields()[i] = values[i];
    }
    planned_ = plan_by(engine_, loaded_);
  };
  out.takes = [](const Shard&, std::span<const std::byte> bytes) { return takes(bytes); };
  return out;
}

}  // namespace weft
