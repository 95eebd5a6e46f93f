#include "data_parallel/checkpoint_files.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <deque>
#include <limits>
#include <system_error>
#include <unordered_map>
#include <utility>

#include "data_parallel/checkpoint_rules.h"
#include "wire/safetensors.h"
#include "wire/safetensors_header.h"

namespace weft {

namespace {

namespace fs = std::filesystem;
using wire::safetensors::fail;
using wire::safetensors::printable;
using Names = std::vector<std::string>;
using Integers = std::vector<std::int64_t>;

constexpr std::string_view kVersion = "1";

std::string number(std::int64_t n) { return std::to_string(n); }

// ---- one file ----

template <class Items>
Names names_of(const Items& items) {
  Names out;
  for (const auto& item : items) out.push_back(item.name);
  return out;
}

std::string joined(const Names& names) {
  std::string out;
  for (const std::string& name : names) out += (out.empty() ? "" : "\n") + name;
  return out;
}

// What is about to be written; what was made for it is kept here, the rest is the caller's.
class Contents {
 public:
  Contents(const char* kind, const TrainingSnapshot& s, wire::Metadata metadata)
      : metadata_(std::move(metadata)) {
    text("checkpoint", kind);
    text("version", std::string(kVersion));
    text("step", number(s.step));
    text("seed", std::to_string(s.seed));
    text("size", number(s.state.size));
  }
  void text(const std::string& key, std::string value) {
    metadata_[std::string(kReservedKeys) + key] = std::move(value);
  }
  void tensor(std::string name, std::string_view dtype, Integers shape, std::span<const std::byte> data) {
    entries_.push_back(
        {.name = std::move(name), .dtype = std::string(dtype), .shape = std::move(shape), .data = data});
  }
  template <class T>
  void vector(std::string name, const std::vector<T>& values) {
    tensor(std::move(name), wire::safetensors_dtype<T>(), {static_cast<std::int64_t>(values.size())},
           std::as_bytes(std::span(values)));
  }
  template <class T>
  void keep(std::string name, std::vector<T> values) {
    const std::span<const std::byte> bytes = std::as_bytes(std::span(values));
    const auto count = static_cast<std::int64_t>(values.size());
    tensor(std::move(name), wire::safetensors_dtype<T>(), {count},
           kept_.emplace_back(bytes.begin(), bytes.end()));
  }
  void write(const fs::path& path) const { wire::write_safetensors(path, entries_, metadata_); }

 private:
  wire::Metadata metadata_;
  std::vector<wire::TensorEntry> entries_;
  std::deque<std::vector<std::byte>> kept_;
};

// A file whose kind and version were found right. Every tensor is asked for once; finish() refuses others.
class Part {
 public:
  Part(const fs::path& path, const std::string& kind) : where_(path.string()), file_(path) {
    const auto found = file_.metadata().find(std::string(kReservedKeys) + "checkpoint");
    if (found == file_.metadata().end() || found->second != kind) {
      fail(where_, "it is not the " + kind + " file of a weft checkpoint");
    }
    if (text("version") != kVersion) {
      fail(where_, "it is a checkpoint of version " + printable(text("version")) +
                       ", this weft reads version " + std::string(kVersion));
    }
  }
  const std::string& where() const { return where_; }
  const wire::SafetensorsFile& file() const { return file_; }

  const std::string& text(const std::string& key) const {
    const auto found = file_.metadata().find(std::string(kReservedKeys) + key);
    if (found == file_.metadata().end())
      fail(where_, "its metadata has no " + std::string(kReservedKeys) + key);
    return found->second;
  }
  template <class T>
  T value(const std::string& key) const {
    const std::string& told = text(key);
    T out{};
    const auto [end, error] = std::from_chars(told.data(), told.data() + told.size(), out);
    if (error != std::errc() || end != told.data() + told.size()) {
      fail(where_, std::string(kReservedKeys) + key + " is " + printable(told) + ", which is no such number");
    }
    return out;
  }
  Names names(const std::string& key) const {
    const std::string& all = text(key);
    Names out;
    for (std::size_t at = 0; at < all.size();) {
      const std::size_t end = std::min(all.find('\n', at), all.size());
      out.push_back(all.substr(at, end - at));
      at = end + 1;
    }
    if (all.ends_with('\n')) fail(where_, std::string(kReservedKeys) + key + " ends with an empty name");
    return out;
  }
  const wire::TensorEntry& tensor(const std::string& name) {
    const wire::TensorEntry* found = file_.find(name);
    if (found == nullptr) fail(where_, "there is no tensor " + printable(name));
    ++used_;
    return *found;
  }
  // One dimension, of `count` elements if that is not negative.
  template <class T>
  std::vector<T> vector(const std::string& name, std::int64_t count = -1) {
    const wire::TensorEntry& entry = tensor(name);
    std::vector<T> out(entry.data.size() / sizeof(T));
    file_.copy<T>(name, {count < 0 ? static_cast<std::int64_t>(out.size()) : count}, out);
    return out;
  }
  void finish() const {
    if (used_ != file_.entries().size()) {
      fail(where_, "it has " + std::to_string(file_.entries().size()) + " tensors where " +
                       std::to_string(used_) + " are expected");
    }
  }

 private:
  std::string where_;
  wire::SafetensorsFile file_;
  std::size_t used_ = 0;
};

// ---- the shared file ----

OptimizerSnapshot read_optimizer(Part& part) {
  OptimizerSnapshot out{
      .optimizer = part.text("optimizer"), .lr = part.value<double>("lr"), .parameters = {}};
  const Names names = part.names("optimizer_parameters");
  const Names vectors = part.names("optimizer_vectors");
  const auto steps = part.vector<std::int64_t>("optimizer/step", static_cast<std::int64_t>(names.size()));
  for (std::size_t i = 0; i < names.size(); ++i) {
    OptimizerSnapshot::Parameter& p = out.parameters.emplace_back();
    p.name = names[i];
    p.step = steps[i];
    for (const std::string& vector : vectors) {
      const std::string name = "optimizer/" + p.name + "/" + vector;
      const wire::TensorEntry* found = part.file().find(name);
      if (found != nullptr && found->dtype == wire::safetensors_dtype<double>()) {
        p.vectors.push_back({vector, part.vector<double>(name)});
      } else {
        p.vectors.push_back({vector, part.vector<float>(name)});
      }
    }
  }
  return out;
}

TrainingSnapshot::Tensor read_model_tensor(Part& part, const std::string& name) {
  const wire::TensorEntry& entry = part.tensor("model/" + name);
  const bool wide = entry.dtype == wire::safetensors_dtype<double>();
  if (!wide && entry.dtype != wire::safetensors_dtype<float>()) {
    fail(part.where(), "tensor " + printable(name) + " of the model is " + entry.dtype + ", not F32 or F64");
  }
  return {.name = name,
          .dtype = wide ? DType::float64 : DType::float32,
          .shape = entry.shape,
          .bytes = {entry.data.begin(), entry.data.end()}};
}

// ---- the file of a rank ----

void put_controllers(Contents& out, const StateSnapshot& s) {
  std::unordered_map<std::string, std::int64_t> place_of;
  for (const StateSnapshot::Parameter& p : s.parameters) {
    place_of.emplace(p.name, static_cast<std::int64_t>(place_of.size()));
  }
  Integers num_parameters, parameters, quotas, steps, num_regions, regions;
  std::vector<float> thresholds;
  for (const StateSnapshot::Controllers& c : s.controllers) {
    num_parameters.push_back(static_cast<std::int64_t>(c.parameters.size()));
    for (const std::string& name : c.parameters) parameters.push_back(place_of.at(name));
    const Thresholds& t = c.thresholds;
    quotas.insert(quotas.end(), {c.team_quota.entries, c.team_quota.step, c.team_quota.inertia ? 1 : 0});
    thresholds.insert(thresholds.end(), {t.local, t.global});
    steps.insert(steps.end(), {t.k, t.steps});
    num_regions.push_back(static_cast<std::int64_t>(t.regions.size()));
    regions.insert(regions.end(), t.regions.begin(), t.regions.end());
  }
  out.text("buckets", std::to_string(s.controllers.size()));
  out.keep("bucket/num_parameters", std::move(num_parameters));
  out.keep("bucket/parameters", std::move(parameters));
  out.keep("bucket/team_quota", std::move(quotas));
  out.keep("bucket/thresholds", std::move(thresholds));
  out.keep("bucket/threshold_steps", std::move(steps));
  out.keep("bucket/num_regions", std::move(num_regions));
  out.keep("bucket/regions", std::move(regions));
}

// Lists that lie end to end.
class Lists {
 public:
  Lists(Part& part, const std::string& counts, const std::string& values, std::int64_t buckets)
      : where_(part.where()),
        counts_(part.vector<std::int64_t>(counts, buckets)),
        values_(part.vector<std::int64_t>(values)) {}
  std::span<const std::int64_t> next() {
    const std::int64_t count = counts_[list_++];
    if (count < 0 || static_cast<std::uint64_t>(count) > values_.size() - at_) wrong();
    const std::span<const std::int64_t> out =
        std::span(values_).subspan(at_, static_cast<std::size_t>(count));
    at_ += out.size();
    return out;
  }
  void finish() const {
    if (at_ != values_.size()) wrong();
  }

 private:
  [[noreturn]] void wrong() const {
    fail(where_, "the lists of its buckets do not have the lengths it tells");
  }

  std::string where_;
  Integers counts_, values_;
  std::size_t list_ = 0, at_ = 0;
};

std::vector<StateSnapshot::Controllers> read_controllers(Part& part, const Names& names) {
  const auto buckets = part.value<std::int64_t>("buckets");
  if (buckets < 0 || buckets > kMostCounted) fail(part.where(), "it has " + number(buckets) + " buckets");
  Lists parameters(part, "bucket/num_parameters", "bucket/parameters", buckets);
  Lists regions(part, "bucket/num_regions", "bucket/regions", buckets);
  const auto quotas = part.vector<std::int64_t>("bucket/team_quota", 3 * buckets);
  const auto thresholds = part.vector<float>("bucket/thresholds", 2 * buckets);
  const auto steps = part.vector<std::int64_t>("bucket/threshold_steps", 2 * buckets);
  std::vector<StateSnapshot::Controllers> out(static_cast<std::size_t>(buckets));
  for (std::size_t b = 0; b < out.size(); ++b) {
    for (const std::int64_t place : parameters.next()) {
      if (place < 0 || static_cast<std::uint64_t>(place) >= names.size()) {
        fail(part.where(), "a bucket has parameter " + number(place) + " of " + std::to_string(names.size()));
      }
      out[b].parameters.push_back(names[static_cast<std::size_t>(place)]);
    }
    const std::int64_t inertia = quotas[3 * b + 2];
    if (inertia != 0 && inertia != 1) fail(part.where(), "the inertia of a team quota is " + number(inertia));
    out[b].team_quota = {.entries = quotas[3 * b], .step = quotas[3 * b + 1], .inertia = inertia == 1};
    const std::span<const std::int64_t> mine = regions.next();
    out[b].thresholds = {.local = thresholds[2 * b],
                         .global = thresholds[2 * b + 1],
                         .k = steps[2 * b],
                         .steps = steps[2 * b + 1],
                         .regions = {mine.begin(), mine.end()}};
  }
  parameters.finish();
  regions.finish();
  return out;
}

void read_factor(Part& part, StateSnapshot::Parameter& into) {
  const wire::TensorEntry& entry = part.tensor("factor/" + into.name);
  if (entry.shape.size() != 2 || entry.shape[0] < 1 || entry.shape[0] > std::numeric_limits<int>::max()) {
    fail(part.where(), "the factor of " + printable(into.name) + " is not a matrix");
  }
  into.factor_rank = static_cast<int>(entry.shape[0]);
  into.factor.resize(entry.data.size() / sizeof(float));
  part.file().copy<float>(entry.name, entry.shape, into.factor);
}

template <class T>
void check_same(const Part& part, const std::string& key, T wanted) {
  const T found = part.value<T>(key);
  if (found != wanted) {
    fail(part.where(), std::string(kReservedKeys) + key + " is " + std::to_string(found) + ", expected " +
                           std::to_string(wanted));
  }
}

}  // namespace

void write_shared_file(const fs::path& path, const TrainingSnapshot& s) {
  check_shared(s, path.string());
  Contents out("shared", s, s.metadata);
  out.text("model", joined(names_of(s.model)));
  for (const TrainingSnapshot::Tensor& t : s.model) {
    const std::string_view dtype =
        t.dtype == DType::float32 ? wire::safetensors_dtype<float>() : wire::safetensors_dtype<double>();
    out.tensor("model/" + t.name, dtype, t.shape, t.bytes);
  }
  const OptimizerSnapshot& o = s.optimizer;
  std::array<char, 32> lr{};  // the shortest text that gives the same bits back
  const auto written = std::to_chars(lr.data(), lr.data() + lr.size(), o.lr);
  out.text("optimizer", o.optimizer);
  out.text("lr", std::string(lr.data(), written.ptr));
  out.text("optimizer_parameters", joined(names_of(o.parameters)));
  out.text("optimizer_vectors", o.parameters.empty() ? "" : joined(names_of(o.parameters[0].vectors)));
  Integers steps;
  for (const OptimizerSnapshot::Parameter& p : o.parameters) {
    steps.push_back(p.step);
    for (const OptimizerSnapshot::Vector& v : p.vectors) {
      const std::string name = "optimizer/" + p.name + "/" + v.name;
      std::visit([&](const auto& values) { out.vector(name, values); }, v.values);
    }
  }
  out.keep("optimizer/step", std::move(steps));
  for (const auto& [name, bytes] : s.extra) out.vector("extra/" + name, bytes);
  out.write(path);
}

void write_rank_file(const fs::path& path, const TrainingSnapshot& snapshot) {
  const StateSnapshot& s = snapshot.state;
  check_rank(snapshot, path.string());
  Contents out("rank", snapshot, {});
  out.text("rank", number(s.rank));
  out.text("state_step", number(s.step));
  out.text("parameters", joined(names_of(s.parameters)));
  Integers counts;
  std::vector<double> scales;
  std::int64_t residuals = 0;
  std::int64_t factors = 0;
  std::int64_t velocities = 0;
  for (const StateSnapshot::Parameter& p : s.parameters) {
    counts.push_back(p.count);
    scales.push_back(p.scale);
    if (!p.factor.empty()) {
      const std::int64_t length = static_cast<std::int64_t>(p.factor.size()) / p.factor_rank;
      out.tensor("factor/" + p.name, wire::safetensors_dtype<float>(), {p.factor_rank, length},
                 std::as_bytes(std::span(p.factor)));
      ++factors;
    }
    if (!p.velocity.empty()) {
      out.vector("velocity/" + p.name, p.velocity);
      ++velocities;
    }
    if (p.residual.empty()) continue;
    out.vector("residual/" + p.name, p.residual);
    ++residuals;
  }
  out.text("residuals", number(residuals));
  out.text("factors", number(factors));
  out.text("velocities", number(velocities));
  out.keep("parameter/count", std::move(counts));
  out.keep("parameter/scale", std::move(scales));
  put_controllers(out, s);
  out.write(path);
}

TrainingSnapshot read_shared_file(const fs::path& path, std::int64_t step) {
  Part part(path, "shared");
  check_same(part, "step", step);
  TrainingSnapshot out;
  out.step = step;
  out.seed = part.value<std::uint64_t>("seed");
  out.state.size = part.value<int>("size");
  for (const auto& [key, value] : part.file().metadata()) {
    if (!key.starts_with(kReservedKeys)) out.metadata.emplace(key, value);
  }
  for (const std::string& name : part.names("model")) out.model.push_back(read_model_tensor(part, name));
  out.optimizer = read_optimizer(part);
  constexpr std::string_view kExtra = "extra/";
  for (const wire::TensorEntry& entry : part.file().entries()) {
    if (!entry.name.starts_with(kExtra)) continue;
    out.extra.emplace(entry.name.substr(kExtra.size()), part.vector<std::byte>(entry.name));
  }
  part.finish();
  check_shared(out, part.where());
  return out;
}

StateSnapshot read_rank_file(const fs::path& path, const TrainingSnapshot& shared, int rank) {
  Part part(path, "rank");
  check_same(part, "step", shared.step);
  check_same(part, "seed", shared.seed);
  check_same(part, "size", shared.state.size);
  check_same(part, "rank", rank);
  StateSnapshot out;
  out.step = part.value<std::int64_t>("state_step");
  out.rank = rank;
  out.size = shared.state.size;
  const Names names = part.names("parameters");
  const auto count = static_cast<std::int64_t>(names.size());
  const auto counts = part.vector<std::int64_t>("parameter/count", count);
  const auto scales = part.vector<double>("parameter/scale", count);
  std::int64_t residuals = 0;
  std::int64_t factors = 0;
  std::int64_t velocities = 0;
  for (std::size_t i = 0; i < names.size(); ++i) {
    StateSnapshot::Parameter& p = out.parameters.emplace_back();
    p.name = names[i];
    p.count = counts[i];
    p.scale = scales[i];
    if (part.file().find("factor/" + p.name) != nullptr) {
      read_factor(part, p);
      ++factors;
    }
    if (const std::string velocity = "velocity/" + p.name; part.file().find(velocity) != nullptr) {
      p.velocity = part.vector<float>(velocity);
      ++velocities;
    }
    const std::string residual = "residual/" + p.name;
    if (part.file().find(residual) == nullptr) continue;
    p.residual = part.vector<float>(residual);
    ++residuals;
  }
  check_same(part, "residuals", residuals);
  check_same(part, "factors", factors);
  // (Files from before there were velocities do not count them.)
  const bool counted = part.file().metadata().contains(std::string(kReservedKeys) + "velocities");
  if (counted || velocities > 0) check_same(part, "velocities", velocities);
  out.controllers = read_controllers(part, names);
  part.finish();
  check_state(out, part.where());
  return out;
}

}  // namespace weft
