// weft verify: trains some steps beside a dense shadow, and says how far apart they are, layer by layer.
#include "weft_torch/train/verify.h"

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "data/open.h"
#include "measure/memory.h"
#include "torch_verbs.h"
#include "train_flags.h"
#include "verbs.h"
#include "weft/error.h"
#include "weft/world.h"
#include "weft_torch/train/trainer.h"

namespace weft::cli {

namespace {

using Json = nlohmann::ordered_json;

struct VerifyCommand {
  TrainFlags flags;
  int ranks = 4;
  bool json = false;
  std::string spoil;
};

VerifyCommand read(const std::vector<std::string>& arguments, const Placement& place) {
  VerifyCommand command;
  TrainFlags& t = command.flags;
  t.options.steps = 20;
  CLI::App app{"Train some steps beside a dense shadow and say how far apart they are.\n", "weft verify"};
  Settings settings(app);
  app.set_config("--config", "", "file with these settings (TOML); flags override it")->group("Run");
  add_model_flags(settings, t);
  add_data_flags(settings, t);
  settings.group("Gradients");
  settings.add("scheme", t.options.scheme.name, list_of(scheme_names()) + " (default spardl)");
  add_gradient_flags(settings, t);
  add_table_flags(settings, t);
  add_optimizer_flags(settings, t);
  settings.group("Run");
  settings.add("steps", t.options.steps, "of both");
  settings.add("ranks", t.ranks, "as threads of this process; under a launcher: its number");
  settings.add("plan-link", t.plan_link,
               "RATE[,LATENCY] by which algorithms are chosen (default 1gbit,50us); bits depend on it");
  settings.add("threads", t.options.threads, "of torch, a rank");
  app.add_flag("--json", command.json, "one object instead of the table")->group("Run");
  app.add_option("--spoil", command.spoil)->group("");  // tests: a parameter with a planted fault
  app.footer(
      "Examples:\n"
      "  weft verify --preset tiny --scheme spardl --density 0.05\n"
      "  weft verify --scheme powersgd --steps 10 --json");
  parse_flags(app, arguments);
  command.ranks = resolve_ranks(t, place, names_flag(arguments, "--ranks"));
  resolve_model(t);
  resolve_data(t);
  resolve_plan(t);
  check_train(t.options, command.ranks);
  return command;
}

Json json_of(const Distance& d) {
  Json out{{"block", d.block}};
  if (!d.name.empty()) out["parameter"] = d.name;
  out["elements"] = d.elements;
  out["gradient_distance"] = d.gradient;
  out["parameter_distance"] = d.parameter;
  out["drift"] = d.drift;
  return out;
}

Json json_of(const VerifyCommand& command, const VerifyReport& report) {
  const TrainOptions& o = command.flags.options;
  const Distance* const block = most_hurt(report.blocks);
  const Distance* const parameter = most_hurt(report.parameters);
  Json out{{"model", o.model},
           {"scheme", o.scheme.name},
           {"density", density_at(o, o.steps)},
           {"ranks", command.ranks},
           {"steps", report.steps},
           {"loss", report.loss},
           {"shadow_loss", report.shadow_loss},
           {"most_hurt_block", block != nullptr ? Json(block->block) : Json(nullptr)},
           {"most_hurt_parameter", parameter != nullptr ? Json(parameter->name) : Json(nullptr)}};
  for (const Distance& d : report.blocks) out["blocks"].push_back(json_of(d));
  for (const Distance& d : report.parameters) out["parameters"].push_back(json_of(d));
  return out;
}

void print_row(const char* name, const Distance& d) {
  std::printf("%-38s %10lld %12.4g %12.4g %12.4g\n", name, static_cast<long long>(d.elements), d.gradient,
              d.parameter, d.drift);
}

void print_table(const VerifyCommand& command, const VerifyReport& report) {
  const TrainOptions& o = command.flags.options;
  std::printf("%s under %s beside dense, %d %s, %lld steps\n", o.model.c_str(), o.scheme.name.c_str(),
              command.ranks, command.ranks == 1 ? "rank" : "ranks", static_cast<long long>(report.steps));
  std::printf("%-38s %10s %12s %12s %12s\n", "", "elements", "gradient", "parameter", "drift");
  for (const Distance& block : report.blocks) {
    print_row(block.block.c_str(), block);
    for (const Distance& d : report.parameters) {
      if (d.block == block.block) print_row(("  " + d.name).c_str(), d);
    }
  }
  std::printf("loss %.6f, of the shadow %.6f\n", report.loss, report.shadow_loss);
  const Distance* const worst = most_hurt(report.blocks);
  const Distance* const parameter = most_hurt(report.parameters);
  if (worst == nullptr || parameter == nullptr) {
    std::printf("no difference: the same bits\n");
    return;
  }
  std::printf("%s is hurt most: it drifts by %.3g of the shadow's way (of parameters: %s, by %.3g)\n",
              worst->block.c_str(), worst->drift, parameter->name.c_str(), parameter->drift);
}

// False: something is not finite.
bool sound(const VerifyReport& report) {
  bool finite = std::isfinite(report.loss) && std::isfinite(report.shadow_loss);
  for (const Distance& d : report.parameters)
    finite = finite && std::isfinite(d.gradient) && std::isfinite(d.parameter) && std::isfinite(d.drift);
  return finite;
}

VerifyReport on_threads(const VerifyCommand& command) {
  const TrainOptions& options = command.flags.options;
  const OpenedData opened = open_data(data_options(options));
  if (!opened.note.empty()) std::fprintf(stderr, "weft: note: %s\n", opened.note.c_str());
  const VerifyRun run{.source = opened.source, .spoil = command.spoil};
  RunOptions ranks;
  ranks.config = Config::from_environment();
  VerifyReport report;
  run_ranks(command.ranks, ranks, [&](World& world) {
    VerifyReport mine = verify_rank(world, options, run);
    if (world.rank() == 0) report = std::move(mine);
  });
  return report;
}

}  // namespace

int verify(const std::vector<std::string>& arguments) {
  keep_freed_memory();
  const Placement place = detect_placement();
  const VerifyCommand command = read(arguments, place);
  set_torch_threads(command.flags.options.threads);
  VerifyReport report;
  bool prints = true;
  if (place.launcher == Placement::Launcher::none) {
    report = on_threads(command);
  } else {
    const std::unique_ptr<World> world = join_world(Config::from_environment());
    try {
      report = verify_rank(*world, command.flags.options, {.source = nullptr, .spoil = command.spoil});
      world->barrier();  // nobody leaves while others still work
    } catch (...) {
      world->engine().abandon(std::current_exception());
      throw;
    }
    prints = world->rank() == 0;
  }
  if (!sound(report))
    throw Error("the training under " + command.flags.options.scheme.name + " is not finite");
  if (prints && command.json)
    std::printf("%s\n", json_of(command, report).dump(2).c_str());
  else if (prints)
    print_table(command, report);
  return kOk;
}

}  // namespace weft::cli
