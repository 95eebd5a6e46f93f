#include "compare_options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "base/names.h"
#include "compare_point.h"
#include "run_folder.h"
#include "settings.h"
#include "train_flags.h"
#include "weft/error.h"

namespace weft::cli {

namespace {

constexpr const char* kDefaultLatency = "50us";  // of a swept rate, where --link has none

struct Typed : TrainFlags, Computation {
  std::string schemes = "dense,dense-bf16,powersgd,topka,oktopk,spardl";
  std::string try_buckets, link, sweep, out;
  std::int64_t steps = 15;
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
    add_optimizer_flags(settings, typed);
    app.footer(
        "Examples:\n"
        "  weft compare --ranks 4 --link 100mbit,50us --schemes dense,spardl\n"
        "  weft compare --ranks 8 --compute emulated --link 1gbit,50us --sweep link=1gbit,500mbit,250mbit\n"
        "  weft compare --preset tiny --ranks 2 --link 10mbit --out runs/a --json\n"
        "The folder has every point; the same command again measures only what is missing there.");
  }
  void add_comparison() {
    selection.group("Comparison");
    settings.group("Comparison");
    selection.add("schemes", typed.schemes, "some of " + list_of(scheme_names()) + "; dense among them");
    selection.add("try-buckets", typed.try_buckets,
                  "MIB,MIB,...: every scheme with buckets of each of these sizes; its row is the fastest");
    selection.add("link", typed.link, "RATE[,LATENCY], e.g. 1gbit,50us: a slow network between the ranks");
    selection.add("sweep", typed.sweep,
                  "link=RATE,RATE,...: these rates one after another, with --link's latency (or 50us)");
    settings.add("ranks", typed.ranks, "as threads of this process");
    settings.add("steps", typed.steps, "measured, of each scheme and link, after 3 of warm-up");
    add_computation_flags(settings, typed);
    settings.add("threads", typed.options.threads, "of torch, a rank");
    settings.add("plan-link", typed.plan_link,
                 "RATE[,LATENCY] by which algorithms are chosen; bits depend on it");
    app.add_flag("--json", typed.json, "one object a scheme and link instead of the table")
        ->group("Comparison");
    app.add_option("--out", typed.out, "folder of points and page (default runs/<model>-compare-<UTC time>)")
        ->group("Comparison");
  }
};

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  while (begin <= text.size()) {
    const std::size_t comma = std::min(text.find(',', begin), text.size());
    parts.push_back(text.substr(begin, comma - begin));
    begin = comma + 1;
  }
  return parts;
}

std::vector<std::string> schemes_of(const std::string& text) {
  std::vector<std::string> schemes;
  const std::vector<std::string_view> known = scheme_names();
  for (const std::string& name : split(text)) {
    if (std::find(known.begin(), known.end(), name) == known.end())
      throw UsageError(unknown_name("scheme", name, known));
    if (std::find(schemes.begin(), schemes.end(), name) != schemes.end())
      throw UsageError("--schemes has " + name + " twice");
    schemes.push_back(name);
  }
  if (std::find(schemes.begin(), schemes.end(), "dense") == schemes.end())
    throw UsageError("--schemes " + text + " has no dense, over which speed-ups are taken");
  return schemes;
}

std::vector<double> bucket_mibs_of(const std::string& text) {
  std::vector<double> sizes;
  if (text.empty()) return sizes;
  for (const std::string& item : split(text)) {
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

NamedLink link_of(const std::string& text) {
  if (text.empty() || text == kNoLink) return {.name = kNoLink, .spec = std::nullopt};
  return {.name = text, .spec = parse_link(text)};
}

// "link=1gbit,500mbit": a latency ("50us") belongs to the rate before it.
std::vector<NamedLink> swept(const std::string& sweep, const std::string& link) {
  constexpr std::string_view kAxis = "link=";
  if (!sweep.starts_with(kAxis) || sweep.size() == kAxis.size())
    throw UsageError("--sweep '" + sweep + "' is no link=RATE,RATE,..., for example link=1gbit,500mbit");
  const std::size_t comma = link.find(',');
  const std::string latency = comma == std::string::npos ? kDefaultLatency : link.substr(comma + 1);
  std::vector<std::string> names;
  bool open = false;  // the last one has no latency yet
  for (const std::string& item : split(sweep.substr(kAxis.size()))) {
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
  std::vector<NamedLink> links;
  for (const std::string& name : names) {
    if (std::any_of(links.begin(), links.end(), [&](const NamedLink& l) { return l.name == name; }))
      throw UsageError("--sweep has " + name + " twice");
    links.push_back({.name = name, .spec = parse_link(name)});
  }
  return links;
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
  CompareCommand command;
  command.ranks = resolve_ranks(t, place, false);
  if (t.steps < 1 || t.steps > 1'000'000)
    throw UsageError("steps must be 1 to 1000000, not " + std::to_string(t.steps));
  check_computation(t, t.options);
  resolve_model(t);
  resolve_data(t);
  resolve_plan(t);
  command.schemes = schemes_of(t.schemes);
  command.bucket_mibs = bucket_mibs_of(t.try_buckets);
  const NamedLink link = link_of(t.link);
  command.links = t.sweep.empty() ? std::vector{link} : swept(t.sweep, t.link);
  for (const std::string& scheme : command.schemes) {
    t.options.scheme.name = scheme;
    check_train(t.options, command.ranks);
  }
  command.options = t.options;
  command.computation = static_cast<const Computation&>(t);
  command.measured_steps = t.steps;
  command.json = t.json;
  command.folder = t.out.empty() ? default_folder(t.options.model, "compare") : std::filesystem::path(t.out);
  command.settings = parser.settings.toml();
  command.selection = parser.selection.toml();
  return command;
}

}  // namespace weft::cli
