// What the tests of checkpoints share: a folder, a job with something of everything, and ways to save it.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "data_parallel/state.h"
#include "files.h"
#include "reference/data.h"
#include "state/checkpoint.h"
#include "state/optimizer.h"
#include "state_rows.h"
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

// Tensors whose values follow from their places, as a rank of any layout holds them.
class Tensors {
 public:
  template <class T>
  void add(const std::string& name, const Shard& shard, const Peers& peers) {
    Tensor& t = tensors_.emplace_back();
    t.row = {{"model", "value", name}, dtype_of<T>(), LayoutRule::moves, shard, peers};
    std::vector<T> values(static_cast<std::size_t>(shard.num_elements()));
    const auto put = [&](std::int64_t from, std::int64_t to, std::int64_t count) {
      for (std::int64_t i = 0; i < count; ++i) {
        const double place =
            static_cast<double>(reference::hash(11, static_cast<int>(name.size()), from + i) % 100000);
        values[static_cast<std::size_t>(to + i)] = static_cast<T>((place - 50000) / 3);
      }
    };
    for_each_run(Shard::whole(shard.shape), shard, put);
    if (!values.empty() && name == "wte") values[0] = -T{0};
    if (values.size() > 3 && name == "wte") values[3] = std::numeric_limits<T>::denorm_min();
    t.bytes = bytes_of(values);
  }
  std::vector<LiveRow> rows() {
    std::vector<LiveRow> out;
    for (Tensor& t : tensors_) {
      LiveRow row;
      row.row = t.row;
      row.read = [&t](auto&) { return std::span<const std::byte>(t.bytes); };
      row.write = [&t](std::span<const std::byte> values) { t.bytes.assign(values.begin(), values.end()); };
      out.push_back(std::move(row));
    }
    return out;
  }
  void forget() {
    for (Tensor& t : tensors_) std::fill(t.bytes.begin(), t.bytes.end(), std::byte{0x3f});
  }
  Bytes& bytes(std::size_t i) { return tensors_[i].bytes; }
  StateRow& row(std::size_t i) { return tensors_[i].row; }

 private:
  struct Tensor {
    StateRow row;
    Bytes bytes;
  };
  std::deque<Tensor> tensors_;
};

inline OptimizerOptions optimizer_options(const std::string& name) {
  OptimizerOptions options = default_options(name == "momentum" ? "sgd" : name);
  if (name == "momentum") options.momentum = 0.9;
  options.lr = 0.1 / 3;  // not a short decimal
  return options;
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

inline BucketPlan plan() {
  return {{{.name = "wte", .count = 12, .use = 1, .rows = 4},
           {.name = "h.0/ü", .count = 5, .use = 0},
           {.name = "none yet", .count = 7, .use = 2},
           {.name = "empty", .count = 0, .use = 2}},
          {.bucket_bytes = 17 * 4, .dense_below = 0}};
}

// One rank of a job: replicated tensors, a table in columns, one in rows, experts, an optimizer, and what
// data parallelism keeps.
struct Sample {
  StateRegistry registry;
  ParameterState state;
  Optimizer optimizer;
  Tensors tensors;
  int rank, size;

  Sample(int r, int p, const std::string& optimizer_name = "adamw")
      : state(plan(), registry, {.peers = {r, p}, .velocities = true, .factors = true}),
        optimizer(optimizer_options(optimizer_name),
                  std::vector<OptimizerParameter>{{"wte", 12, DType::float32, Shard::whole({4, 3})},
                                                  {"h.0/ü", 5, DType::float64, {}},
                                                  {"empty", 0, DType::float32, {}}}),
        rank(r),
        size(p) {
    const Peers all{r, p};
    tensors.add<float>("wte", Shard::whole({4, 3}), all);
    tensors.add<double>("h.0/ü", Shard::whole({5}), all);
    tensors.add<float>("a scalar", Shard::whole({}), all);
    tensors.add<float>("empty", Shard::whole({0, 3}), all);
    const auto part = [&](std::int64_t n) { return std::pair(n * r / p, n * (r + 1) / p - n * r / p); };
    const auto [column, columns] = part(10);
    tensors.add<float>("columns", Shard::range({6, 10}, 1, column, columns), {});
    const auto [row, rows] = part(9);
    tensors.add<double>("of rows", Shard::range({9, 4}, 0, row, rows), {});
    for (int e = r; e < 8; e += p) {
      tensors.add<float>("experts", Shard::range({8, 2, 3}, 0, e, 1), {});
      tensors.add<double>("wide experts", Shard::range({8, 3, 2}, 0, e, 1), {});
    }
    registry.add("model",
                 {.rows = [this] { return tensors.rows(); }, .missing = {}, .commit = {}, .roll_back = {}});
    registry.add("optimizer", {.rows = [this] { return optimizer.rows({rank, size}); },
                               .missing = {},
                               .commit = {},
                               .roll_back = {}});
    fill();
  }

  // The state of a rank that has just begun, in the same layout.
  void begin_anew() {
    tensors.forget();
    for (const LiveRow& row : registry.rows()) {
      if (row.row.key.owner != "model") row.write({});
    }
  }
  StateSnapshot save() { return registry.save(rank, size); }

 private:
  void fill() {
    std::vector<float> wte(12, 1);
    std::vector<double> h(5, 1.0 / 3);
    for (int i = 0; i < 3; ++i) step(optimizer, wte, h, i);
    for (int b = 0; b < plan().num_buckets(); ++b) {
      const bool first = plan().bucket(b).pieces[0].parameter == 1;
      SparseWork& work = state.bucket(b).work();
      work.next_team_quota = first ? TeamQuota{.entries = 4, .step = -2, .inertia = true} : TeamQuota{};
      if (first) {
        work.next_team_figures = {.operations = 63,
                                  .choice = {.teams = size},
                                  .k = 3,
                                  .entry_bytes = 4.7,
                                  .overlap = 0.1,
                                  .has_overlap = true,
                                  .lists = 0.3 + rank};
      }
      work.has_staged = true;
      if (!first) continue;
      Velocity& velocity = state.bucket_velocity(b);
      for (std::int64_t i = 0; i < work.length; ++i) {
        work.staged.push_back(summable(rank, i));
        velocity.staged.push_back(summable(rank, 300 + i));
      }
      velocity.has_staged = true;
      Thresholds& t = work.next_thresholds;
      t = {.local = 0.3F + static_cast<float>(rank), .global = 1e-40F, .k = 3, .steps = 41, .regions = {0}};
      for (int r = 1; r < size; ++r) t.regions.push_back(10 * r / size);
      t.regions.push_back(17);
      state.stage_scale(b, 0.1);
    }
    state.factor(0).staged = {0.5F, -0.0F, 1e-42F, 3, 4, 1.0F / 3};
    state.factor(0).has_staged = true;
    registry.commit();
  }
};

inline CheckpointInfo info_of(std::int64_t at) {
  return {
      .step = at,
      .seed = 0xfedcba9876543210,
      .metadata = {{"config", "model = \"gpt\"\nranks = 4\n"}, {"", "π"}},
      .extra = {{"random", bytes_of<int>({1, -2, 3})}, {"data/cursor", bytes_of<int>({4})}, {"nothing", {}}}};
}

inline void write_rank(const fs::path& dir, Sample& sample, std::int64_t at) {
  write_shards(dir, info_of(at), sample.registry, sample.rank, sample.size);
}
inline void write_parts(const fs::path& dir, int size, std::int64_t at,
                        const std::string& optimizer = "adamw") {
  begin_checkpoint(dir, at);
  for (int r = 0; r < size; ++r) {
    Sample sample(r, size, optimizer);
    write_rank(dir, sample, at);
  }
}
inline void save(const fs::path& dir, int size, std::int64_t at, const std::string& optimizer = "adamw") {
  write_parts(dir, size, at, optimizer);
  commit_checkpoint(dir, info_of(at), size);
}

// What rank `rank` of `size` has after it loaded the checkpoint.
inline StateSnapshot load(const fs::path& dir, std::int64_t at, int rank, int size,
                          const std::string& optimizer = "adamw") {
  Sample fresh(rank, size, optimizer);
  fresh.begin_anew();
  fresh.registry.load(Checkpoint(dir, at));
  return fresh.save();
}
inline bool loads_its_own(const fs::path& dir, std::int64_t at, int rank, int size,
                          const std::string& optimizer = "adamw") {
  return load(dir, at, rank, size, optimizer) == Sample(rank, size, optimizer).save();
}

}  // namespace weft::checkpoint_samples
