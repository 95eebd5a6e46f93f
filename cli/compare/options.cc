#include "compare/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "base/names.h"
#include "compare/variants.h"
#include "data_parallel/schemes.h"
#include "experts/policies.h"
#include "measure/point.h"
#include "settings.h"
#include "stage_flags.h"
#include "train/run_folder.h"
#include "train_flags.h"
#include "weft/error.h"

namespace weft::cli {

namespace {

constexpr const char* kDefaultLatency = "50us";  // of a swept rate, where --link has none

struct Typed : TrainFlags, Computation, NetworkFlags {
  std::string schemes = "dense,dense-bf16,powersgd,topka,oktopk,spardl";
  std::string tables, policies, variants, baseline, try_buckets, sweep, out;
  std::int64_t steps = 15;
  std::optional<double> free_bytes;
  bool json = false;
};

// `settings`: what all points of a folder have in common; `selection`: which points there are.
struct Parser {
  CLI::App app{"The same training under several schemes, from one seed, taking turns; then one table.\n",
               "weft compare"};
  Settings settings{app}, selection{app};
  Typed typed;

  Parser() {
    app.set_config("--config", "", "file with these settings (TOML); flags override it")->group("Run");
    app.allow_config_extras(CLI::config_extras_mode::error);
    add_comparison();
    add_model_flags(settings, typed);
    add_data_flags(settings, typed);
    add_gradient_flags(settings, typed);
    settings.group("Tables");
    add_table_scheduling(settings, typed);
    add_optimizer_flags(settings, typed);
    app.footer(
        "Examples:\n"
        "  weft compare --ranks 4 --link 100mbit,50us --schemes dense,spardl\n"
        "  weft compare --ranks 8 --compute emulated --link 1gbit,50us --sweep link=1gbit,500mbit,250mbit\n"
        "  weft compare --ranks 8 --link 200mbit --variants 'dense,spardl,spardl+teams=2+bucket-mib=1'\n"
        "  weft compare --preset tiny --ranks 2 --link 10mbit --out runs/a --json\n"
        "The folder has every point; the same command again measures only what is missing there.");
  }
  void add_comparison() {
    selection.group("Comparison");
    settings.group("Comparison");
    selection.add("schemes", typed.schemes, "some of " + list_of(scheme_names()));
    selection.add("variants", typed.variants,
                  "in place of --schemes: NAME[+OPTION=VALUE]...,..., any flag of gradients, tables, "
                  "experts, optimizer");
    selection.add("tables", typed.tables,
                  "WAY,WAY,...: every scheme (default then dense alone) with each; some of " +
                      list_of(table_way_names()) + "; auto: by the link and what batches read");
    selection.add(
        "policies", typed.policies,
        "gpt-moe: POLICY,POLICY,...: each scheme (dense unless named) with each policy of experts: " +
            list_of(expert_policy_names()));
    selection.add("baseline", typed.baseline, "what speed-ups are over (default dense, or the first)");
    selection.add("try-buckets", typed.try_buckets,
                  "MIB,MIB,...: every variant with buckets of each of these sizes; its row is the fastest");
    selection.add("link", typed.link, "RATE[,LATENCY], e.g. 1gbit,50us: a slow network between the ranks");
    selection.add("sweep", typed.sweep,
                  "link=RATE,RATE,...: these rates one after another, with --link's latency (or 50us)");
    add_node_flags(settings, typed);
    settings.add("ranks", typed.ranks, "as threads of this process");
    add_mesh_flag(settings, typed);
    add_stage_flags(settings, typed);
    settings.group("Comparison");
    settings.add("steps", typed.steps, "measured, of each variant and link, after 3 of warm-up");
    add_computation_flags(settings, typed);
    settings.add("threads", typed.options.threads, "of torch, a rank");
    settings.add(
        "plan-link", typed.plan_link,
        "RATE[,LATENCY] by which algorithms are chosen (default: the link of each row); bits depend on it");
    app.add_flag("--json", typed.json, "one object a variant and link instead of the table")
        ->group("Comparison");
    app.add_option("--out", typed.out, "folder of points and page (default runs/<model>-compare-<UTC time>)")
        ->group("Comparison");
    app.add_option("--free-bytes", typed.free_bytes)->group("");  // tests: of memory
  }
};

std::vector<double> bucket_mibs_of(const std::string& text) {
  std::vector<double> sizes;
  if (text.empty()) return sizes;
  for (const std::string& item : split(text, ',')) {
    char* end = nullptr;
    const double size = std::strtod(item.c_str(), &end);
    if (item.empty() || *end != '\0' || !(size > 0) || size > 1e6)
      throw UsageError("--try-buckets '" + text + "' is no MIB,MIB,..., for example 1,4,25");
    if (std::find(sizes.begin(), sizes.end(), size) != sizes.end())
      throw UsageError("--try-buckets has " + item + " twice");
    sizes.push_back(size);
  }
  return sizes;
}

// "link=1gbit,500mbit": a latency ("50us") belongs to the rate before it.
std::vector<std::string> swept(const std::string& sweep, const std::string& link) {
  constexpr std::string_view kAxis = "link=";
  if (!sweep.starts_with(kAxis) || sweep.size() == kAxis.size())
    throw UsageError("--sweep '" + sweep + "' is no link=RATE,RATE,..., for example link=1gbit,500mbit");
  const std::size_t comma = link.find(',');
  const std::string latency = comma == std::string::npos ? kDefaultLatency : link.substr(comma + 1);
  std::vector<std::string> names;
  bool open = false;  // the last one has no latency yet
  for (const std::string& item : split(sweep.substr(kAxis.size()), ',')) {
    if (open && item.ends_with('s')) {
      names.back() += "," + item;
      open = false;
      continue;
    }
    if (open) names.back() += "," + latency;
    names.push_back(item);
    open = true;
  }
  if (open) names.back() += "," + latency;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (std::find(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(i), names[i]) !=
        names.begin() + static_cast<std::ptrdiff_t>(i))
      throw UsageError("--sweep has " + names[i] + " twice");
  }
  return names;
}

std::vector<NamedLink> links_of(const Typed& t, int ranks) {
  const std::string link = t.link == kNoLink ? "" : t.link;
  std::vector<NamedLink> links;
  for (const std::string& name : t.sweep.empty() ? std::vector{link} : swept(t.sweep, link)) {
    NamedLink& named = links.emplace_back();
    named.name = name.empty() ? kNoLink : name;
    named.link = resolve_network(name, t, ranks);
    if (named.link) named.planned = planned_by(t.plan_link.empty() ? name : t.plan_link, t, ranks);
  }
  return links;
}

// Every one of `before` with every one of these values of an option, as --variants would have it.
std::string with_each(const std::string& before, const std::string& option, const std::string& values) {
  if (values.empty()) return before;
  std::string out;
  for (const std::string& variant : split(before, ',')) {
    for (const std::string& value : split(values, ','))
      out += (out.empty() ? "" : ",") + variant + "+" + option + "=" + value;
  }
  return out;
}

std::string variants_text(const Typed& t) {
  return with_each(with_each(t.schemes, "tables", t.tables), "expert-policy", t.policies);
}

std::string baseline_of(const std::string& wanted, const std::vector<Variant>& variants) {
  std::vector<std::string_view> names;
  for (const Variant& variant : variants) names.push_back(variant.name);
  const std::string_view name = wanted.empty() ? lossless_scheme().name : std::string_view(wanted);
  if (std::ranges::find(names, name) != names.end()) return std::string(name);
  if (wanted.empty()) return variants.front().name;
  throw UsageError("--baseline: " + unknown_name("variant", wanted, names));
}

}  // namespace

CompareCommand read_compare(const std::vector<std::string>& arguments, const Placement& place) {
  Parser parser;
  parse_flags(parser.app, arguments);
  Typed& t = parser.typed;
  if (place.launcher != Placement::Launcher::none) {
    throw UsageError(
        "weft compare runs its ranks as threads of one process, where schemes can take turns; "
        "under a launcher (" +
        std::string(name_of(place.launcher)) + ") run `weft train` with each scheme");
  }
  for (const char* flag : {"--schemes", "--tables", "--policies"}) {
    if (!t.variants.empty() && names_flag(arguments, flag))
      throw UsageError(std::string(flag) + " is a short form of --variants: one of them");
  }
  const bool ways = !t.tables.empty() || !t.policies.empty();
  if (ways && !names_flag(arguments, "--schemes")) t.schemes = lossless_scheme().name;
  CompareCommand command;
  ComparisonOptions& options = command.options;
  options.ranks = resolve_ranks(t, place, false, t.simulated() ? kMostSimulatedRanks : kMostRanks);
  if (t.steps < 1 || t.steps > 1'000'000)
    throw UsageError("steps must be 1 to 1000000, not " + std::to_string(t.steps));
  check_computation(t, t.options);
  options.variants = variants_of(t.variants.empty() ? variants_text(t) : t.variants, t, t, options.ranks);
  options.baseline = baseline_of(expanded(t.baseline, t), options.variants);
  options.bucket_mibs = bucket_mibs_of(t.try_buckets);
  for (const Variant& variant : options.variants) {
    if (!options.bucket_mibs.empty() && variant.name.find("+bucket-mib=") != std::string::npos)
      throw UsageError("--try-buckets: variant '" + variant.name + "' has a size of its own");
  }
  options.links = links_of(t, options.ranks);
  options.computation = t;
  options.measured_steps = t.steps;
  options.json = t.json;
  options.free_bytes = t.free_bytes;
  if (names_flag(arguments, "--model")) command.named_model = t.options.model;
  resolve_model(t);  // what config.toml says
  resolve_data(t);
  options.folder = t.out.empty() ? default_folder(t.options.model, "compare") : std::filesystem::path(t.out);
  options.settings = parser.settings.toml();
  options.selection = parser.selection.toml();
  return command;
}

}  // namespace weft::cli
