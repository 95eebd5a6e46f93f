#include "compare/variants.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <set>
#include <utility>

#include "base/names.h"
#include "data_parallel/schemes.h"
#include "experts/policies.h"
#include "settings.h"
#include "stage_flags.h"
#include "weft/error.h"

namespace weft::cli {

namespace {

struct Named {
  std::string scheme;
  std::vector<std::pair<std::string, std::string>> options;
};

// (A "+" between digits belongs to a number: 1e+3.)
Named parsed(const std::string& text) {
  Named out;
  std::vector<std::string> parts;
  for (const std::string& part : split(text, '+')) {
    const bool number = !part.empty() && part.front() >= '0' && part.front() <= '9';
    if (number && !parts.empty())
      parts.back() += "+" + part;
    else
      parts.push_back(part);
  }
  out.scheme = parts.front();
  for (std::size_t i = 1; i < parts.size(); ++i) {
    const std::size_t equals = parts[i].find('=');
    if (equals == 0 || equals == std::string::npos || equals + 1 == parts[i].size())
      throw UsageError("'" + parts[i] + "' is no OPTION=VALUE, for example teams=2");
    out.options.emplace_back(parts[i].substr(0, equals), parts[i].substr(equals + 1));
  }
  return out;
}

void check_options(const Named& named, const Scheme& scheme, const std::vector<std::string>& flags) {
  const std::vector<std::string_view> known(flags.begin(), flags.end());
  std::set<std::string> seen;
  for (const auto& [name, value] : named.options) {
    if (std::ranges::find(known, name) == known.end())
      throw UsageError(unknown_name("option of a variant", name, known));
    if (!seen.insert(name).second) throw UsageError("it has " + name + " twice");
    for (const SchemeKnob& knob : scheme_knobs()) {
      if (knob.name == name && !knob.applies(scheme))
        throw UsageError(std::string(scheme.name) + " takes no " + name);
    }
  }
}

Variant variant_of(const Named& named, TrainFlags flags, const Computation& computation, int ranks) {
  CLI::App app;
  Settings settings(app);
  add_gradient_flags(settings, flags);
  add_table_flags(settings, flags);
  add_optimizer_flags(settings, flags);
  add_expert_flags(settings, flags);
  add_stage_flags(settings, flags);
  check_options(named, find_scheme(named.scheme), settings.names());
  std::vector<std::string> arguments;
  for (const auto& [name, value] : named.options) {
    arguments.push_back("--" + name + "=");
    arguments.back() += value;
  }
  const auto says = [&named](std::string_view name) {
    return std::ranges::any_of(named.options, [&](const auto& o) { return o.first == name; });
  };
  give_way(flags.options.backward, says);
  parse_flags(app, arguments);
  flags.options.scheme.name = named.scheme;
  if (!says("compressed-stages") && flags.compressed_stages == kAuto && find_scheme(named.scheme).dense())
    flags.compressed_stages = TrainFlags{}.compressed_stages;  // there is nothing to choose
  if (!says("factor-rank") && (flags.compressed_stages != kAuto || !has_factors(flags)))
    flags.factor_rank.clear();
  if (!says("expert-slices") && !find_expert_policy(flags.expert_policy).slices) flags.expert_slices.reset();
  resolve_model(flags);
  if (take_auto(flags.options.sizes.experts))
    throw UsageError("expert-slices auto is for train and plan: compare names their numbers");
  resolve_mesh(flags, ranks);
  resolve_data(flags);
  resolve_plan(flags);
  check_effect(flags, says);
  Variant out;
  out.chooses_stages = flags.compressed_stages == kAuto;
  out.chooses_rank = flags.factor_rank == kAuto;
  out.chooses_tables = take_auto(flags.options.tables);
  out.chooses_messages = take_auto(flags.options.backward);
  check_undecided(flags.options, out.chooses_tables, ranks);
  check_computation(computation, flags.options);
  out.options = flags.options;
  return out;
}

}  // namespace

// A short name may have options of its own behind it.
std::string expanded(const std::string& variant, const TrainFlags& flags) {
  const BackwardOptions& given = flags.options.backward;
  const std::string back =
      variant.find("+backward-bits=") != std::string::npos ||
              variant.find("+backward-rank=") != std::string::npos
          ? ""
      : given.bits > 0 ? "+backward-bits=" + std::to_string(given.bits)
                       : "+backward-rank=" + std::to_string(given.columns > 0 ? given.columns : kShortRank);
  const std::string none = given.bits > 0 ? "+backward-bits=0" : "+backward-rank=0";
  const std::string all = flags.compressed_stages == kAuto ? "+compressed-stages=all" : "";
  const std::pair<std::string_view, std::string> table[] = {
      {"dp-powersgd", "powersgd+tied-sum=two-step" + none + "+backward-messages=epilogue" + all},
      {"naive", "powersgd+error-feedback=off+tied-sum=scheme" + back +
                    "+backward-messages=all+backward-forgets=true" + all},
      {"cb+fe+sc", "powersgd+tied-sum=fused" + back + "+compressed-stages=auto"},
      {"cb+fe", "dense+tied-sum=fused" + back + all},
      {"cb", "dense+tied-sum=two-step" + back + all}};
  for (const auto& [name, means] : table) {
    if (variant == name) return means;
    if (variant.starts_with(std::string(name) + "+")) return means + variant.substr(name.size());
  }
  return variant;
}

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  while (begin <= text.size()) {
    const std::size_t end = std::min(text.find(at, begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

std::vector<Variant> variants_of(const std::string& text, const TrainFlags& given,
                                 const Computation& computation, int ranks) {
  const std::vector<std::string> names = split(text, ',');
  const bool some_are_short =
      std::ranges::any_of(names, [&](const std::string& typed) { return expanded(typed, given) != typed; });
  std::vector<Variant> variants;
  std::set<std::pair<std::string, std::set<std::pair<std::string, std::string>>>> seen;
  for (const std::string& typed : names) {
    const std::string name = expanded(typed, given);
    TrainFlags flags = given;
    // What they are compared with is not compressed between stages, unless it says so.
    if (some_are_short && name.find("+backward-") == std::string::npos) {
      flags.options.backward = {.seed = given.options.backward.seed};
      flags.backward_forgets = false;
    }
    try {
      const Named named = parsed(name);
      if (!seen.insert({named.scheme, {named.options.begin(), named.options.end()}}).second)
        throw UsageError("it is there twice");
      variants.push_back(variant_of(named, flags, computation, ranks));
      variants.back().name = name;
    } catch (const CLI::ParseError& error) {
      throw UsageError("variant '" + name + "': " + error.what());
    } catch (const UsageError& error) {
      throw UsageError("variant '" + name + "': " + error.what());
    }
  }
  return variants;
}

}  // namespace weft::cli
