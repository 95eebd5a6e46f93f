// What the tests of checkpoints share: a folder, a job with something of everything, and equality of bits.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "data_parallel/checkpoint.h"
#include "files.h"
#include "reference/data.h"
#include "weft/error.h"

namespace weft::checkpoint_samples {

namespace fs = std::filesystem;
using Bytes = std::vector<std::byte>;
using Strings = std::vector<std::string>;

using testing::Folder;
inline Strings names(const fs::path& folder) { return testing::names_in(folder); }
inline std::string read_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
inline void write_text(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

template <class T>
Bytes bytes_of(const std::vector<T>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return {bytes.begin(), bytes.end()};
}

// What a call says, or "" if it succeeds.
inline std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const UsageError& e) {
    return e.what();
  }
  return "";
}

// Small multiples of 1/8: any sum of some of them is exact.
inline float summable(int rank, std::int64_t i) {
  return static_cast<float>(static_cast<int>(reference::hash(7, rank, i) % 2001) - 1000) / 8;
}

inline StateSnapshot state_of(int rank, int size) {
  StateSnapshot s{.step = 40, .rank = rank, .size = size, .parameters = {}, .controllers = {}};
  s.parameters = {{.name = "wte", .count = 12, .residual = {}, .scale = 0.1},
                  {.name = "h.0/ü", .count = 5, .residual = {}, .scale = kUnmeasured},
                  {.name = "none yet", .count = 7, .residual = {}, .scale = 3e-300},
                  {.name = "empty", .count = 0, .residual = {}, .scale = 0}};
  s.parameters[0].factor = {0.5F, -0.0F, 1e-42F, 3, 4, 1.0F / 3};
  s.parameters[0].factor_rank = 2;
  for (std::size_t p = 0; p < 2; ++p) {
    for (std::int64_t i = 0; i < s.parameters[p].count; ++i)
      s.parameters[p].residual.push_back(summable(rank, 100 * static_cast<std::int64_t>(p) + i));
  }
  for (std::int64_t i = 0; i < 5; ++i) s.parameters[1].velocity.push_back(summable(rank, 300 + i));
  Thresholds t{
      .local = 0.3F + static_cast<float>(rank), .global = 1e-40F, .k = 3, .steps = 41, .regions = {0}};
  for (int r = 1; r < size; ++r) t.regions.push_back(10 * r / size);
  t.regions.push_back(17);
  s.controllers = {{.parameters = {"h.0/ü", "wte"},
                    .team_quota = {.entries = 4, .step = -2, .inertia = true},
                    .thresholds = t},
                   {.parameters = {"none yet"}, .team_quota = {}, .thresholds = {}},
                   {.parameters = {}, .team_quota = {}, .thresholds = {}}};
  return s;
}

inline Optimizer make_optimizer(const std::string& name) {
  OptimizerOptions options = default_options(name == "momentum" ? "sgd" : name);
  if (name == "momentum") options.momentum = 0.9;
  options.lr = 0.1 / 3;  // not a short decimal
  const std::vector<OptimizerParameter> parameters = {{.name = "wte", .count = 12, .dtype = DType::float32},
                                                      {.name = "h.0/ü", .count = 5, .dtype = DType::float64},
                                                      {.name = "empty", .count = 0, .dtype = DType::float32}};
  return {options, parameters};
}
inline void step(Optimizer& o, std::vector<float>& wte, std::vector<double>& h, int round) {
  std::vector<float> g(wte.size());
  std::vector<double> gh(h.size());
  for (std::size_t i = 0; i < g.size(); ++i)
    g[i] = std::sin(static_cast<float>(i) + static_cast<float>(round));
  for (std::size_t i = 0; i < gh.size(); ++i) gh[i] = std::cos(static_cast<double>(i) / 3 + round);
  o.update(0, wte, g);
  if (round % 2 == 0) o.update(1, h, gh);
}

inline TrainingSnapshot snapshot_of(int rank, int size, std::int64_t at = 1000,
                                    const std::string& optimizer = "adamw") {
  std::vector<float> wte(12, -0.0F);
  wte[3] = std::numeric_limits<float>::denorm_min();
  std::vector<double> h(5, 1.0 / 3);
  Optimizer o = make_optimizer(optimizer);
  for (int i = 0; i < 3; ++i) step(o, wte, h, i);
  TrainingSnapshot s;
  s.step = at;
  s.seed = 0xfedcba9876543210;
  s.metadata = {{"config", "model = \"gpt\"\nranks = 4\n"}, {"", "π"}};
  s.model = {{.name = "wte", .dtype = DType::float32, .shape = {4, 3}, .bytes = bytes_of(wte)},
             {.name = "h.0/ü", .dtype = DType::float64, .shape = {5}, .bytes = bytes_of(h)},
             {.name = "a scalar", .dtype = DType::float32, .shape = {}, .bytes = bytes_of<float>({-0.0F})},
             {.name = "empty", .dtype = DType::float32, .shape = {0, 3}, .bytes = {}}};
  s.optimizer = o.save();
  s.extra = {{"random", bytes_of<int>({1, -2, 3})}, {"data/cursor", bytes_of<int>({4})}, {"nothing", {}}};
  s.state = state_of(rank, size);
  return s;
}

inline void write_parts(const fs::path& dir, int size, std::int64_t at) {
  begin_checkpoint(dir, at);
  for (int r = 0; r < size; ++r) write_rank(dir, snapshot_of(r, size, at));
  write_shared(dir, snapshot_of(0, size, at));
}
inline void save(const fs::path& dir, int size, std::int64_t at) {
  write_parts(dir, size, at);
  commit_checkpoint(dir, at, size);
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return bytes_of(a) == bytes_of(b);
}
inline bool same(const StateSnapshot& a, const StateSnapshot& b) {
  const auto parameter = [](const StateSnapshot::Parameter& x, const StateSnapshot::Parameter& y) {
    return x.name == y.name && x.count == y.count && same_bits(x.residual, y.residual) &&
           same_bits(x.factor, y.factor) && same_bits(x.velocity, y.velocity) &&
           x.factor_rank == y.factor_rank &&
           std::bit_cast<std::uint64_t>(x.scale) == std::bit_cast<std::uint64_t>(y.scale);
  };
  const auto controllers = [](const StateSnapshot::Controllers& x, const StateSnapshot::Controllers& y) {
    const Thresholds& s = x.thresholds;
    const Thresholds& t = y.thresholds;
    return x.parameters == y.parameters && x.team_quota == y.team_quota &&
           same_bits<float>({s.local, s.global}, {t.local, t.global}) && s.k == t.k && s.steps == t.steps &&
           s.regions == t.regions;
  };
  return a.step == b.step && a.rank == b.rank && a.size == b.size &&
         std::ranges::equal(a.parameters, b.parameters, parameter) &&
         std::ranges::equal(a.controllers, b.controllers, controllers);
}
inline bool same(const OptimizerSnapshot& a, const OptimizerSnapshot& b) {
  const auto bits = [](const OptimizerSnapshot& s) {
    Strings out{s.optimizer, std::to_string(std::bit_cast<std::uint64_t>(s.lr))};
    for (const auto& p : s.parameters) {
      out.push_back(p.name + " " + std::to_string(p.step));
      for (const auto& v : p.vectors) {
        const Bytes bytes = std::visit([](const auto& values) { return bytes_of(values); }, v.values);
        out.push_back(v.name + " " + std::to_string(v.values.index()) + " " +
                      std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
      }
    }
    return out;
  };
  return bits(a) == bits(b);
}
inline bool same(const TrainingSnapshot& a, const TrainingSnapshot& b) {
  return a.step == b.step && a.seed == b.seed && a.metadata == b.metadata && a.model == b.model &&
         same(a.optimizer, b.optimizer) && a.extra == b.extra && same(a.state, b.state);
}

}  // namespace weft::checkpoint_samples
