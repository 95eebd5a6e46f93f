#include "train/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>

#include "embedding/ways.h"
#include "stage_flags.h"
#include "train_flags.h"
#include "weft/error.h"

namespace weft::cli {

namespace {

// As typed; what is empty has a default that depends on something else.
struct Typed : TrainFlags, Computation, NetworkFlags {
  std::string out, resume;
  bool resume_given = false, trace = false;
  std::int64_t checkpoint_every = 200, keep_last = 2;
};

void add_scheme(Settings& s, Typed& t) {
  s.group("Gradients");
  s.add("scheme", t.options.scheme.name,
        list_of(scheme_names()) + " (default spardl); auto: by what the plan predicts");
  add_gradient_flags(s, t);
  add_table_flags(s, t);
}

void add_optimizer(Settings& s, Typed& t) {
  s.group("Optimizer");
  s.add("steps", t.options.steps, "of the whole run");
  add_optimizer_flags(s, t);
}

void add_run(CLI::App& app, Settings& s, Typed& t) {
  s.group("Run");
  s.add("ranks", t.ranks, "as threads of this process; under a launcher: its number");
  add_mesh_flag(s, t);
  s.add("link", t.link, "RATE[,LATENCY], e.g. 1gbit,50us: a slow network between threads");
  add_node_flags(s, t);
  s.add(
      "plan-link", t.plan_link,
      "RATE[,LATENCY] by which algorithms are chosen (default: --link, else 1gbit,50us); bits depend on it");
  s.add("threads", t.options.threads, "of torch, a rank");
  s.add("recompute", t.options.recompute, "compute a part's forward again in its backward: less memory");
  add_computation_flags(s, t);
  s.add("checkpoint-every", t.checkpoint_every, "steps, and after the last one; 0: none");
  s.add("keep-last", t.keep_last, "checkpoints");
  s.add("trace", t.trace, "all steps in trace.json (ui.perfetto.dev), not only the first");
  app.add_option("--out", t.out, "folder of the run (default runs/<model>-<scheme>-<UTC time>)")
      ->group("Run");
  app.add_option("--resume", t.resume,
                 "go on from the last checkpoint of that folder (default: of --out, or of the newest run); "
                 "auto: if there is one")
      ->expected(0, 1)
      ->group("Run");
}

// One command line; `settings` and `typed` belong to it.
struct Parser {
  CLI::App app{"Train a language model on several ranks.\n", "weft train"};
  Settings settings{app};
  Typed typed;

  Parser() {
    app.set_config("--config", "", "file with these settings (TOML); flags override it")->group("Run");
    app.allow_config_extras(CLI::config_extras_mode::error);
    add_model_flags(settings, typed);
    add_data_flags(settings, typed);
    add_scheme(settings, typed);
    add_optimizer(settings, typed);
    add_stage_flags(settings, typed);
    add_run(app, settings, typed);
    app.footer(
        "Examples:\n"
        "  weft train --ranks 4 --link 100mbit,50us --steps 100\n"
        "  weft train --preset tiny --scheme dense --ranks 2 --text book.txt --out runs/first\n"
        "  weft train --resume runs/first --steps 400\n"
        "  weft train --ranks 8 --compute emulated --outline outline.json --link 1gbit,50us --steps 20\n"
        "  weft launch -n 4 --restarts 3 -- weft train --out runs/second --resume auto\n"
        "  mpirun -n 4 weft train --model lm");
  }
  void parse(const std::vector<std::string>& arguments) {
    parse_flags(app, arguments);
    typed.resume_given = app.count("--resume") > 0;
    // (CLI11 writes something of its own for a flag without its optional value.)
    const bool bare = typed.resume.empty() || typed.resume == "true" || typed.resume == "{}";
    if (bare) typed.resume = "-";
  }
};

TrainCommand checked(Parser& parser, const std::vector<std::string>& arguments, const Placement& place) {
  Typed& t = parser.typed;
  TrainCommand command;
  command.ranks = resolve_ranks(t, place, names_flag(arguments, "--ranks"),
                                t.simulated() ? kMostSimulatedRanks : kMostRanks);
  resolve_model(t);
  resolve_data(t);
  if (place.launcher == Placement::Launcher::none)
    resolve_plan(t, t.link, t, command.ranks);
  else
    resolve_plan(t);
  const IsTyped typed = [&](std::string_view flag) {
    return names_flag(arguments, "--" + std::string(flag));
  };
  if (t.resume_given) {  // that of before had them
    without_axes(t, parse_mesh(t.mesh, command.ranks), typed);
    give_way(t.options.backward, typed);
  }
  resolve_mesh(t, command.ranks);
  check_effect(t, typed);
  command.asked.scheme = take_auto(t.options.scheme);
  command.asked.tables = take_auto(t.options.tables);
  command.asked.slices = take_auto(t.options.sizes.experts);
  command.asked.messages = take_auto(t.options.backward);
  command.asked.stages = t.compressed_stages == kAuto;
  command.asked.rank = t.factor_rank == kAuto;
  check_undecided(t.options, command.asked.tables, command.ranks);
  check_computation(t, t.options);
  if (t.emulated() && t.resume_given)
    throw UsageError("--resume: emulated computation trains nothing that could go on");
  if (t.simulated() && place.launcher != Placement::Launcher::none)
    throw UsageError("--transport sim has all ranks in one process: run it without a launcher");
  if (t.emulated() && place.launcher != Placement::Launcher::none)
    throw UsageError("--compute emulated runs its ranks as threads of one process: without a launcher");
  command.computation = static_cast<const Computation&>(t);
  if (t.checkpoint_every < 0)
    throw UsageError("checkpoint-every must be 0 or more, not " + std::to_string(t.checkpoint_every));
  if (t.checkpoint_every > 0 && !t.emulated()) TableWays(t.options.tables.way).check_saved();
  if (t.keep_last < 1 || t.keep_last > 1'000'000)
    throw UsageError("keep-last must be 1 or more, not " + std::to_string(t.keep_last));
  command.link = resolve_network(t.link, t, command.ranks);
  if (place.launcher != Placement::Launcher::none) {
    if (names_flag(arguments, "--link"))
      throw UsageError(
          "--link shapes ranks that are threads of one process; under a launcher see tools/netlab");
    command.link.reset();
  }
  command.options = t.options;
  command.run.checkpoint_every = t.checkpoint_every;
  command.run.keep_last = static_cast<int>(t.keep_last);
  command.place = find_place(t.out, t.resume_given, t.resume);
  command.run.resume = command.place.resume;
  command.trace = t.trace;
  if (names_flag(arguments, "--model")) command.named_model = t.options.model;
  t.ranks = command.ranks;
  command.config = parser.settings.toml();
  command.run.config = command.config;
  return command;
}

// A run that goes on does so with what was chosen for it: chosen again, by what is measured now, it could be
// another.
std::vector<std::string> without_auto(const std::vector<std::string>& arguments) {
  const auto chosen = [](std::string_view flag, std::string_view value) {
    if (flag == "--backward-messages") return value == kCritical;
    return value == kAuto && (flag == "--scheme" || flag == "--tables" || flag == "--expert-slices" ||
                              flag == "--compressed-stages" || flag == "--factor-rank");
  };
  std::vector<std::string> out;
  for (const std::string& argument : arguments) {
    const std::size_t equals = argument.find('=');
    if (equals != std::string::npos && chosen(argument.substr(0, equals), argument.substr(equals + 1)))
      continue;
    if (!out.empty() && chosen(out.back(), argument))
      out.pop_back();
    else
      out.push_back(argument);
  }
  return out;
}

}  // namespace

TrainCommand read_train(const std::vector<std::string>& arguments, const Placement& place) {
  Parser parser;
  parser.parse(arguments);
  const Typed& t = parser.typed;
  if (t.resume_given && !names_flag(arguments, "--config")) {
    const std::filesystem::path folder = find_place(t.out, true, t.resume).folder;
    std::error_code error;
    if (std::filesystem::exists(folder / "config.toml", error)) {
      std::vector<std::string> more = without_auto(arguments);
      more.push_back("--config=" + (folder / "config.toml").string());
      Parser again;
      again.parse(more);
      return checked(again, arguments, place);
    }
  }
  return checked(parser, arguments, place);
}

}  // namespace weft::cli
