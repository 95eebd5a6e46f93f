#include "weft_torch/train/agree.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "transports/endpoint.h"
#include "weft/collective.h"
#include "weft/error.h"

namespace weft {

namespace {

constexpr std::size_t kLongest = 1 << 20;

void broadcast_from(World& world, Dense data, int root) {
  const BroadcastOptions options{.root = root};
  world.run({.name = "tell", .traffic = TrafficClass::blocking},
            [data, options](Comm comm) { return broadcast(comm, data, options); });
}

std::string tell(World& world, std::string text, int root) {
  std::vector<std::int64_t> length{static_cast<std::int64_t>(std::min(text.size(), kLongest))};
  broadcast_from(world, Dense(std::span(length)), root);
  text.resize(static_cast<std::size_t>(length[0]));
  std::vector<std::byte> bytes(text.size());
  std::transform(text.begin(), text.end(), bytes.begin(), [](char c) { return static_cast<std::byte>(c); });
  if (!bytes.empty()) broadcast_from(world, Dense(std::span(bytes)), root);
  std::transform(bytes.begin(), bytes.end(), text.begin(), [](std::byte b) { return static_cast<char>(b); });
  return text;
}

template <class F>
std::optional<std::string> failure_of(F&& f) {
  try {
    f();
    return std::nullopt;
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace

std::string from_rank_0(World& world, const std::function<std::string()>& f) {
  std::string text;
  std::optional<std::string> failure;
  if (world.rank() == 0) failure = failure_of([&] { text = f(); });
  const std::string told = tell(world, failure ? "!" + *failure : "=" + text, 0);
  if (told.front() == '!') throw Error(told.substr(1));
  return told.substr(1);
}

void on_all_ranks(World& world, const std::function<void()>& f) {
  const std::optional<std::string> failure = failure_of(f);
  std::vector<std::int32_t> failed(static_cast<std::size_t>(world.size()));
  failed[static_cast<std::size_t>(world.rank())] = failure ? 1 : 0;
  world.run({.name = "whether all could", .traffic = TrafficClass::blocking},
            [&failed](Comm comm) { return all_gather(comm, Dense(std::span(failed))); });
  const auto first = std::find(failed.begin(), failed.end(), 1);
  if (first == failed.end()) return;
  const int root = static_cast<int>(first - failed.begin());
  const std::string text = tell(world, failure.value_or(""), root);
  throw Error(root == 0 ? text : "rank " + std::to_string(root) + ": " + text);
}

}  // namespace weft
