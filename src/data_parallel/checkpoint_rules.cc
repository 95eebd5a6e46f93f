#include "data_parallel/checkpoint_rules.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <unordered_map>
#include <variant>
#include <vector>

#include "wire/safetensors_header.h"

namespace weft {

namespace {

using wire::safetensors::fail;
using wire::safetensors::printable;
using Names = std::vector<std::string>;

constexpr int kMostRanks = 1 << 20;

std::string number(std::int64_t n) { return std::to_string(n); }

void check_names(const Names& names, const std::string& what, const std::string& where) {
  Names sorted = names;
  std::sort(sorted.begin(), sorted.end());
  if (const auto twin = std::adjacent_find(sorted.begin(), sorted.end()); twin != sorted.end()) {
    fail(where, "there are two " + what + " of the name " + printable(*twin));
  }
  for (const std::string& name : sorted) {
    if (name.empty() || name.find('\n') != std::string::npos) {
      fail(where, printable(name) + " cannot be the name of one of the " + what);
    }
  }
}

template <class T>
void check_finite(std::span<const T> values, const std::string& what, const std::string& where) {
  if (!std::all_of(values.begin(), values.end(), [](T v) { return std::isfinite(v); })) {
    fail(where, what + " has a value that is not finite");
  }
}

void check_step(std::int64_t step, const std::string& what, const std::string& where) {
  if (step < 0 || step > kMostCounted) fail(where, what + " is " + number(step));
}

template <class Items>
Names names_of(const Items& items) {
  Names out;
  for (const auto& item : items) out.push_back(item.name);
  return out;
}

void check_model(const TrainingSnapshot& s, const std::string& where) {
  check_names(names_of(s.model), "model tensors", where);
  for (const TrainingSnapshot::Tensor& t : s.model) {
    const std::string what = "tensor " + printable(t.name) + " of the model";
    if (t.dtype != DType::float32 && t.dtype != DType::float64) {
      fail(where, what + " is of " + std::string(name_of(t.dtype)) + ", not float32 or float64");
    }
    const auto check = [&]<class T>(T) {
      std::vector<T> values(t.bytes.size() / sizeof(T));
      if (!values.empty()) std::memcpy(values.data(), t.bytes.data(), values.size() * sizeof(T));
      check_finite<T>(values, what, where);
    };
    t.dtype == DType::float32 ? check(float{}) : check(double{});
  }
}

void check_optimizer(const OptimizerSnapshot& o, const std::string& where) {
  check_names(names_of(o.parameters), "parameters of the optimizer", where);
  if (!(o.lr >= 0) || !std::isfinite(o.lr)) fail(where, "the learning rate is not finite or negative");
  for (const OptimizerSnapshot::Parameter& p : o.parameters) {
    check_step(p.step, "the optimizer's step of " + printable(p.name), where);
    const Names vectors = names_of(p.vectors);
    check_names(vectors, "vectors of the optimizer", where);
    if (vectors != names_of(o.parameters[0].vectors)) {
      fail(where, "the optimizer has other vectors for " + printable(p.name) + " than for " +
                      printable(o.parameters[0].name));
    }
    for (const OptimizerSnapshot::Vector& v : p.vectors) {
      if (v.name.find('/') != std::string::npos)
        fail(where, "the optimizer's " + printable(v.name) + " has a '/'");
      const std::string what = v.name + " of " + printable(p.name);
      std::visit([&](const auto& values) { check_finite(std::span(values), what, where); }, v.values);
    }
  }
}

// Regions become offsets into memory: they must fit exactly.
void check_controllers(const StateSnapshot::Controllers& c, std::int64_t length, int size,
                       const std::string& where) {
  const TeamQuota& q = c.team_quota;
  const Thresholds& t = c.thresholds;
  const std::int64_t most = std::max<std::int64_t>(length, 1);
  const bool quota_fits = q.entries >= 0 && q.entries <= most && q.step >= -most && q.step <= most;
  const bool thresholds_fit = std::isfinite(t.local) && t.local >= 0 && std::isfinite(t.global) &&
                              t.global >= 0 && t.k >= 0 && t.k <= length && t.steps >= 0 &&
                              t.steps <= kMostCounted;
  const bool regions_fit = t.regions.empty() || (t.regions.size() == static_cast<std::size_t>(size) + 1 &&
                                                 t.regions.front() == 0 && t.regions.back() == length &&
                                                 std::is_sorted(t.regions.begin(), t.regions.end()));
  if (quota_fits && thresholds_fit && regions_fit) return;
  const std::string what = quota_fits ? thresholds_fit ? "regions" : "thresholds" : "team quota";
  fail(where, "the " + what + " of a bucket of " + number(length) + " elements cannot be");
}

}  // namespace

void check_shared(const TrainingSnapshot& s, const std::string& where) {
  check_step(s.step, "the step", where);
  if (s.state.size < 1 || s.state.size > kMostRanks)
    fail(where, "it is of " + number(s.state.size) + " ranks");
  for (const auto& [key, value] : s.metadata) {
    if (key.starts_with(kReservedKeys)) fail(where, "the metadata " + printable(key) + " is weft's own");
  }
  check_model(s, where);
  check_optimizer(s.optimizer, where);
  Names extra;
  for (const auto& [name, bytes] : s.extra) extra.push_back(name);
  check_names(extra, "extra states", where);
}

void check_state(const StateSnapshot& s, const std::string& where) {
  if (s.size < 1 || s.size > kMostRanks || s.rank < 0 || s.rank >= s.size) {
    fail(where, "there is no rank " + number(s.rank) + " of " + number(s.size));
  }
  check_step(s.step, "the number of committed steps", where);
  check_names(names_of(s.parameters), "parameters", where);
  std::unordered_map<std::string, std::int64_t> counts;
  for (const StateSnapshot::Parameter& p : s.parameters) {
    counts.emplace(p.name, p.count);
    check_step(p.count, "the number of elements of " + printable(p.name), where);
    if (!p.residual.empty() && static_cast<std::int64_t>(p.residual.size()) != p.count) {
      fail(where, "the residual of " + printable(p.name) + " has " +
                      number(static_cast<std::int64_t>(p.residual.size())) + " elements, not " +
                      number(p.count));
    }
    check_finite(std::span(p.residual), "the residual of " + printable(p.name), where);
    if (!p.velocity.empty() && static_cast<std::int64_t>(p.velocity.size()) != p.count) {
      fail(where, "the velocity of " + printable(p.name) + " has " +
                      number(static_cast<std::int64_t>(p.velocity.size())) + " elements, not " +
                      number(p.count));
    }
    check_finite(std::span(p.velocity), "the velocity of " + printable(p.name), where);
    const auto factor = static_cast<std::int64_t>(p.factor.size());
    check_finite(std::span(p.factor), "the factor of " + printable(p.name), where);
    if (p.factor_rank < 0 || (p.factor_rank == 0) != p.factor.empty() || factor > p.count ||
        (p.factor_rank > 0 && factor % p.factor_rank != 0)) {
      fail(where, "the factor of " + printable(p.name) + " has " + number(factor) + " elements in " +
                      number(p.factor_rank) + " columns, the parameter " + number(p.count));
    }
    if (!std::isfinite(p.scale) || (p.scale < 0 && p.scale != kUnmeasured)) {
      fail(where, "the scale of " + printable(p.name) + " is not finite or negative");
    }
  }
  for (const StateSnapshot::Controllers& c : s.controllers) {
    std::int64_t length = 0;
    for (const std::string& name : c.parameters) {
      const auto found = counts.find(name);
      if (found == counts.end()) fail(where, "a bucket has the unknown parameter " + printable(name));
      if (__builtin_add_overflow(length, found->second, &length)) fail(where, "a bucket is too large");
    }
    check_controllers(c, length, s.size, where);
  }
}

void check_rank(const TrainingSnapshot& s, const std::string& where) {
  check_step(s.step, "the step", where);
  check_state(s.state, where);
}

}  // namespace weft
