// weft plan: what would happen to each tensor of a training run, in which order, and how long a step would
// take. Trains nothing.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "experts/packing.h"
#include "measure/emulated.h"
#include "measure/files.h"
#include "measure/memory.h"
#include "measure/text.h"
#include "plan/meshes.h"
#include "planner/choose.h"
#include "planner/messages.h"
#include "planner/stages.h"
#include "planner/traffic.h"
#include "torch_verbs.h"
#include "train/auto_scheme.h"
#include "train_flags.h"
#include "verbs.h"
#include "weft/error.h"
#include "workload/elements.h"
#include "workload/job_strategies.h"
#include "workload/model_shapes.h"
#include "world/mesh.h"

namespace weft::cli {

namespace {

using Json = nlohmann::ordered_json;

struct PlanCommand : TrainFlags, NetworkFlags {
  std::string outline, flops, svg;
  bool show_schedule = false, json = false;
};

void add_flags(CLI::App& app, Settings& s, PlanCommand& c) {
  add_model_flags(s, c);
  s.group("Data");
  s.add("global-batch", c.options.global_batch, "sequences of a step, of all ranks together");
  s.add("length", c.options.length, "tokens of a sequence; 0: the context");
  s.add("accumulate", c.options.accumulate,
        "micro-batches of a step (of meshes that are tried: as many as sequences, at most 4 a stage)");
  s.group("Gradients");
  s.add("scheme", c.options.scheme.name,
        list_of(scheme_names()) + " (default spardl); auto: by what the plan predicts");
  add_gradient_flags(s, c);
  add_table_flags(s, c);
  add_optimizer_flags(s, c);
  add_stage_flags(s, c);
  s.group("Run");
  s.add("ranks", c.ranks, "of the job");
  add_mesh_flag(s, c);
  s.add("link", c.link, "RATE[,LATENCY] between ranks, e.g. 1gbit,50us; none: no limit");
  add_node_flags(s, c);
  s.add("plan-link", c.plan_link,
        "RATE[,LATENCY] by which algorithms are chosen and rows priced (default: --link, else 1gbit,50us)");
  s.group("Plan");
  s.add("outline", c.outline, "FILE of `weft outline`: seconds that were measured");
  s.add("flops", c.flops, "RATE of a rank where there is no outline: seconds from FLOPs (default 50gflops)");
  app.add_flag("--show-schedule", c.show_schedule, "print the moves of a step")->group("Plan");
  app.add_option("--schedule-svg", c.svg, "FILE: what the ranks compute in a step, a row each")
      ->group("Plan");
  app.add_flag("--json", c.json, "one object: step_seconds and its parts, stages (parts, waited), rows ...")
      ->group("Plan");
  app.footer(
      "Examples:\n"
      "  weft plan --model gpt --ranks 8 --link 1gbit,50us --scheme spardl --show-schedule\n"
      "  weft plan --ranks 4 --link 200mbit --scheme auto --outline gpt.json\n"
      "  weft plan --ranks 8 --mesh dp=2,pp=4 --accumulate 8 --layers 16 --schedule zb-h1 --link 1gbit\n"
      "  weft plan --ranks 16 --nodes 4 --scale-up 40gbit --link 1gbit --mesh auto");
}

constexpr double kDefaultFlops = 50e9;

// By FLOPs.
Outline outline_of(const PlanCommand& c, const TrainOptions& options, int ranks) {
  const int data_ranks = mesh_of(options.sizes, ranks).dp;
  return outline_from_flops(model_shape(options.model, options.sizes),
                            sequences_of_rank(options, data_ranks) * sequence_length(options),
                            c.flops.empty() ? kDefaultFlops : parse_flops(c.flops));
}

// The file's, or by FLOPs. `named_model`: as --model has it; empty: it was not given.
Outline outline_of(const PlanCommand& c, const std::string& named_model, int ranks) {
  if (!c.outline.empty() && !c.flops.empty())
    throw UsageError("--flops is a rate for a model without an outline: leave it or --outline out");
  if (!c.outline.empty()) return read_named_outline(c.outline, named_model);
  return outline_of(c, c.options, ranks);
}

// Of data-parallel ranks, each with what the outline has; of other meshes, the same tokens in all.
MeshesChoice tried_meshes(const PlanCommand& c, bool accumulates, const std::string& named_model, int ranks,
                          const std::optional<EmulatedLink>& link) {
  const Outline whole = outline_of(c, named_model, ranks);
  const OutlineOfMesh outline = [&](const TrainOptions& options) {
    if (c.outline.empty()) return outline_of(c, options, ranks);
    return with_more_tokens(whole, static_cast<double>(ranks) / mesh_of(options.sizes, ranks).dp);
  };
  return try_meshes(c, accumulates, outline,
                    simulation_of(ranks, link, measured_costs(c.options, ranks, whole)));
}

Json to_json(const Plan& plan, const PlanRow& row) {
  return {{"tensor", row.tensor},
          {"elements", row.count},
          {"strategy", row.strategy},
          {"group", group_text(plan, row)},
          {"ranks", row.ranks},
          {"divisor", row.divisor},
          {"scheme", row.scheme},
          {"codec", row.codec},
          {"class", std::string(name_of(row.traffic))},
          {"slot", row.slot},
          {"bytes", row.bytes},
          {"seconds", row.seconds},
          {"why", row.why}};
}

Json to_json(const StagePrediction& stage) {
  Json out{{"compute_seconds", stage.compute_seconds}, {"work_seconds", stage.work_seconds},
           {"bubble_seconds", stage.bubble_seconds},   {"exposed_seconds", stage.exposed_seconds},
           {"behind_seconds", stage.behind_seconds},   {"waited", Json::array()}};
  for (const StagePrediction::Waited& waited : stage.waited)
    out["waited"].push_back({{"strategy", waited.strategy},
                             {"seconds", waited.seconds},
                             {"for_others_seconds", waited.for_others}});
  return out;
}

struct Planned {
  const PlanCommand& command;
  const Outline& outline;
  const SchemeOptions& scheme;
  const std::optional<Choice>& choice;
  const std::optional<TablesChoice>& tables;
  const std::optional<SlicesChoice>& slices;
  const Plan& plan;
  const std::optional<ChosenPacking>& packing;
  const std::optional<StagesChoice>& stages;
  const std::optional<MeshesChoice>& meshes;
  const std::optional<MessagesChoice>& messages;
  int byte_scale;  // of its walk
};

Json moves_of(const Plan::Stage& stage, const Table& table) {
  Json out = Json::array();
  constexpr const char* kKinds[] = {"compute", "announce", "start", "wait"};
  for (const Move& move : table.moves) {
    Json row{{"move", kKinds[static_cast<std::size_t>(move.kind)]}};
    if (move.kind == Move::Kind::compute) {
      row["piece"] = stage.shape.title(move.piece, table.micro_batches());
    } else {
      const Exchange& exchange = stage.tables.exchanges[static_cast<std::size_t>(move.exchange)];
      row["exchange"] = exchange.name;
      if (exchange.each_micro_batch) row["micro_batch"] = move.micro_batch;
      row["offset"] = move.offset;
      row["inside"] = move.inside;
    }
    out.push_back(std::move(row));
  }
  return out;
}

// Micro-batches (of a chunk each) whose activations a stage holds at most; `single`: if the warm-up were.
int held_on(const TrainOptions& options, int at, bool single) {
  StageOptions stage = options.sizes.stage;
  if (stage.is_whole()) return 1;
  stage.double_warmup = stage.double_warmup && !single;
  return most_held(pipeline_shape(stage, options.accumulate), at);
}

void print_json(const Planned& p, int ranks) {
  const Prediction& predicted = p.plan.prediction;
  Json out{{"model", p.outline.model},
           {"parameters", p.outline.parameters},
           {"ranks", ranks},
           {"mesh", parse_mesh(p.command.mesh, ranks).text()},
           {"link", p.command.link},
           {"scheme", p.scheme.name},
           {"tables", p.command.options.tables.way},
           {"computation", p.outline.source},
           {"step_seconds", predicted.step_seconds},
           {"compute_seconds", predicted.compute_seconds},
           {"work_seconds", predicted.work_seconds},
           {"bubble_seconds", predicted.bubble_seconds},
           {"exposed_seconds", predicted.exposed_seconds},
           {"busiest_port_bytes", predicted.busiest_port_bytes},
           {"byte_scale", p.byte_scale},
           {"updates_wait_because", p.plan.why_updates_wait}};
  if (p.choice) {
    out["why"] = p.choice->why;
    for (const Candidate& c : p.choice->candidates)
      out["candidates"].push_back({{"name", c.name}, {"step_seconds", c.prediction.step_seconds}});
  }
  if (p.slices) {
    out["expert_slices"] = p.slices->slices;
    for (const SlicesChoice::Candidate& c : p.slices->candidates)
      out["slices_candidates"].push_back({{"slices", c.slices}, {"step_seconds", c.step_seconds}});
  }
  if (p.packing) out["packing"] = {{"packing", p.packing->packing}, {"why", p.packing->why}};
  out["rows"] = Json::array();
  for (const PlanRow& row : p.plan.rows) out["rows"].push_back(to_json(p.plan, row));
  if (p.stages) {
    out["compressed_stages"] = p.stages->compressed;
    for (const StagesChoice::Candidate& c : p.stages->candidates)
      out["stages_candidates"].push_back(
          {{"compressed", c.compressed}, {"columns", c.columns}, {"step_seconds", c.step_seconds}});
    if (p.stages->columns > 0) out["factor_rank"] = p.stages->columns;
  }
  if (p.messages) {
    out["backward_messages"] = {{"messages", p.messages->messages},
                                {"chosen", p.messages->chosen},
                                {"all", p.messages->all},
                                {"epilogue", p.messages->epilogue},
                                {"step_seconds", p.messages->step_seconds},
                                {"none_seconds", p.messages->none_seconds},
                                {"epilogue_seconds", p.messages->epilogue_seconds},
                                {"all_seconds", p.messages->all_seconds}};
  }
  for (std::size_t s = 0; s < predicted.stages.size(); ++s) {
    out["stages"].push_back(to_json(predicted.stages[s]));
    out["stages"].back()["held_micro_batches"] = held_on(p.command.options, static_cast<int>(s), false);
  }
  if (p.meshes) out["meshes"] = json_of(*p.meshes);
  for (const Plan::Stage& stage : p.plan.stages) {
    if (!p.command.show_schedule) break;
    Json tables;
    for (const Table* table : {&stage.tables.first, &stage.tables.steady, &stage.tables.settle})
      tables[std::string(name_of(table->phase))] = moves_of(stage, *table);
    if (p.plan.stages.size() == 1)
      out["schedule"] = std::move(tables);
    else
      out["schedules"].push_back(std::move(tables));
  }
  std::printf("%s\n", out.dump(2).c_str());
}

// How long a rank computes was measured, or follows from a rate.
std::string source_of(const Planned& p) {
  if (p.outline.source != Outline::kFlops) return "measured";
  return "from FLOPs at " + flops_text(p.outline.flops_per_second) +
         (p.command.outline.empty() ? "; --outline has measured ones" : "");
}

void print_rows(const Plan& plan) {
  std::printf("\n%-4s %-44s %12s %-13s %-16s %7s %-11s %-12s %-9s %10s %10s  %s\n", "slot", "tensor",
              "elements", "strategy", "group", "divisor", "scheme", "codec", "class", "bytes", "alone",
              "why");
  for (const PlanRow& row : plan.rows) {
    const std::string codec = row.codec.empty() ? "-" : row.codec;
    std::printf("%-4u %-44.44s %12lld %-13s %-16s %7g %-11s %-12s %-9s %10s %10s  %s\n", row.slot,
                row.tensor.c_str(), static_cast<long long>(row.count), row.strategy.c_str(),
                group_text(plan, row).c_str(), row.divisor, row.scheme.c_str(), codec.c_str(),
                std::string(name_of(row.traffic)).c_str(), size_text(row.bytes).c_str(),
                seconds_text(row.seconds).c_str(), row.why.c_str());
  }
}

// "sums of gradients 480 ms, activations and gradients between stages 260 ms (230 ms until others have started)"
std::string waits_text(const StagePrediction& stage, double step_seconds) {
  constexpr double kLittle = 1e-3;  // of a step
  std::array<StagePrediction::Waited, kTraffic.size()> of_traffic;
  for (const StagePrediction::Waited& waited : stage.waited) {
    StagePrediction::Waited& sum = of_traffic[traffic_of(waited.strategy)];
    sum.seconds += waited.seconds;
    sum.for_others += waited.for_others;
  }
  std::string out;
  for (std::size_t i = 0; i < kTraffic.size(); ++i) {
    const StagePrediction::Waited& waited = of_traffic[i];
    if (waited.seconds < kLittle * step_seconds) continue;
    out += (out.empty() ? "" : ", ") + std::string(kTraffic[i].name) + " " + seconds_text(waited.seconds);
    if (waited.for_others >= kLittle * step_seconds)
      out += " (" + seconds_text(waited.for_others) + " until others have started)";
  }
  return out.empty() ? "-" : out;
}

// "7, 5, 3, 1 (single warm-up: 4, 3, 2, 1)"
std::string held_text(const TrainOptions& options) {
  const StageOptions& stage = options.sizes.stage;
  const auto of_all = [&](bool single) {
    std::string out;
    for (int s = 0; s < stage.stages; ++s)
      out += (s == 0 ? "" : ", ") + std::to_string(held_on(options, s, single));
    return out;
  };
  return of_all(false) + (stage.double_warmup ? " (single warm-up: " + of_all(true) + ")" : "");
}

void print_parts(const Prediction& predicted) {
  std::printf("\n%-5s %10s %10s %10s %10s %10s %10s  %s\n", "stage", "step", "computes", "work", "bubble",
              "exposed", "behind", "waits for");
  for (std::size_t s = 0; s < predicted.stages.size(); ++s) {
    const StagePrediction& stage = predicted.stages[s];
    std::printf("%-5zu %10s %10s %10s %10s %10s %10s  %s\n", s, seconds_text(predicted.step_seconds).c_str(),
                seconds_text(stage.compute_seconds).c_str(), seconds_text(stage.work_seconds).c_str(),
                seconds_text(stage.bubble_seconds).c_str(), seconds_text(stage.exposed_seconds).c_str(),
                seconds_text(stage.behind_seconds).c_str(),
                waits_text(stage, predicted.step_seconds).c_str());
  }
}

void print_text(const Planned& p, int ranks) {
  const std::string link = p.command.link.empty() ? "a link without limits" : p.command.link;
  std::printf("%s, %lld parameters, %d ranks (%s) over %s; a rank computes %s a step (%s)\n",
              p.outline.model.c_str(), static_cast<long long>(p.outline.parameters), ranks,
              parse_mesh(p.command.mesh, ranks).text().c_str(), link.c_str(),
              seconds_text(p.plan.prediction.compute_seconds).c_str(), source_of(p).c_str());
  if (p.choice) std::printf("scheme auto: %s\n", p.choice->why.c_str());
  if (p.tables) std::printf("tables auto: %s\n", p.tables->why().c_str());
  if (p.slices) std::printf("expert-slices auto: %s\n", p.slices->why.c_str());
  if (p.stages) std::printf("compressed-stages auto: %s\n", p.stages->why.c_str());
  if (p.messages) std::printf("backward-messages critical: %s\n", p.messages->why.c_str());
  if (p.packing) std::printf("packing auto: %d, %s\n", p.packing->packing, p.packing->why.c_str());
  print_rows(p.plan);
  const StageOptions& stage = p.command.options.sizes.stage;
  if (!stage.is_whole())
    std::printf("\n%s over %d micro-batches\n%s", stage.schedule.c_str(), p.command.options.accumulate,
                schedule_text(stage, p.command.options.accumulate).c_str());
  for (std::size_t s = 0; p.command.show_schedule && s < p.plan.stages.size(); ++s) {
    const std::string whose = stage.is_whole() ? "every rank" : "stage " + std::to_string(s);
    for (const Phase phase : {Phase::first, Phase::steady, Phase::settle})
      std::printf("\ntable of %s, %s\n%s", whose.c_str(), std::string(name_of(phase)).c_str(),
                  text_of(p.plan.stages[s], phase).c_str());
  }
  const Prediction& predicted = p.plan.prediction;
  if (!p.plan.why_updates_wait.empty())
    std::printf("\nno update before the verdict of its step: %s\n", p.plan.why_updates_wait.c_str());
  if (p.byte_scale > 1)
    std::printf("\nwalked with one element for %d: its times are near those of all of them\n", p.byte_scale);
  print_parts(predicted);
  if (!stage.is_whole())
    std::printf("\nactivations of so many micro-batches%s are held at most, stage by stage: %s\n",
                stage.chunks > 1 ? " (of a chunk each)" : "", held_text(p.command.options).c_str());
  std::printf(
      "\npredicted: %s a step, %s of it exposed; %s from the busiest %s (rows: by formula, in the bytes of "
      "their codec)\n",
      seconds_text(predicted.step_seconds).c_str(), seconds_text(predicted.exposed_seconds).c_str(),
      size_text(predicted.busiest_port_bytes).c_str(), p.command.nodes > 0 ? "node" : "rank");
  if (p.meshes) print_meshes(*p.meshes, ranks, p.command.nodes > 0);
}

// A mesh that was chosen, as if it had been typed.
void take_mesh(PlanCommand& c, const PlannedMesh& best) {
  c.mesh = best.mesh.text();
  c.options.accumulate = best.micro_batches;
  without_axes(c, best.mesh);
}

int plan(const std::vector<std::string>& arguments) {
  CLI::App app{"What would be done with each tensor of a training run, and how long a step would take.\n",
               "weft plan"};
  Settings settings(app);
  PlanCommand command;
  add_flags(app, settings, command);
  parse_flags(app, arguments);
  resolve_model(command);
  const int ranks = resolve_ranks(command, {}, true, kMostSimulatedRanks);
  resolve_plan(command, command.link, command, ranks);
  const std::optional<EmulatedLink> link = resolve_network(command.link, command, ranks);
  const std::string named_model = names_flag(arguments, "--model") ? command.options.model : "";
  const bool accumulates = names_flag(arguments, "--accumulate");
  std::optional<MeshesChoice> meshes;
  const bool chooses_mesh = command.mesh == kAuto;
  if (chooses_mesh) {
    meshes = tried_meshes(command, accumulates, named_model, ranks, link);
    take_mesh(command, meshes->best.front());
  }
  const bool tries = command.mesh.empty() && names_flag(arguments, "--ranks") && ranks <= kMostTriedUnasked &&
                     can_be_cut(command.options.model);
  resolve_mesh(command, ranks);
  const IsTyped typed = [&](std::string_view flag) {
    return names_flag(arguments, "--" + std::string(flag));
  };
  if (!chooses_mesh) check_effect(command, typed);  // (else flags are for meshes that have a use for them)
  const bool is_auto = take_auto(command.options.scheme), auto_tables = take_auto(command.options.tables),
             auto_slices = take_auto(command.options.sizes.experts),
             auto_messages = take_auto(command.options.backward);
  check_undecided(command.options, auto_tables, ranks);
  Outline outline = outline_of(command, named_model, ranks);
  if (meshes && !command.outline.empty())  // the step that the meshes were tried with
    outline =
        with_more_tokens(outline, static_cast<double>(ranks) / mesh_of(command.options.sizes, ranks).dp);
  std::optional<TablesChoice> tables;
  if (auto_tables) {
    tables = choose_tables_for(command.options, ranks, outline);
    command.options.tables = tables->tables;
  }
  std::optional<Choice> choice;
  if (is_auto) {
    choice = choose_for(command.options, ranks, link, outline);
    command.options.scheme = choice->scheme;
  }
  std::optional<SlicesChoice> slices;
  if (auto_slices) {
    slices = choose_slices_for(command.options, ranks, link, outline);
    command.options.sizes.experts.slices = slices->slices;
  }
  SimulationOptions simulation = simulation_of(ranks, link, measured_costs(command.options, ranks, outline));
  std::optional<StagesChoice> stages;
  if (command.compressed_stages == "auto") {
    stages = choose_compressed_stages(outline, emulation_of(command.options, ranks, outline), simulation,
                                      command.factor_rank == kAuto);
    stages->apply(command.options.scheme, command.options.sizes.stage, command.options.backward);
  }
  std::optional<MessagesChoice> messages;
  if (auto_messages) {
    messages = choose_messages(outline, emulation_of(command.options, ranks, outline), simulation);
    command.options.backward.messages = messages->messages;
  }
  std::optional<ChosenPacking> packing;
  ExpertOptions& experts = command.options.sizes.experts;
  if (is_auto_packing(experts.packing)) {
    packing = choose_packing(command.options, outline, simulation);
    experts.ranks /= packing->packing;
    experts.packing = std::to_string(packing->packing);
  }
  const EmulationOptions emulation = emulation_of(command.options, ranks, outline);
  simulation.byte_scale = walk_scale(outline, emulation, ranks);
  check_memory({.ranks = ranks,
                .parameters = elements_of_ranks(outline, emulation, ranks).dense / simulation.byte_scale,
                .copies = kCopiesOfEmulation},
               available_memory());
  Plan made = make_plan(outline, emulation, simulation);
  if (choice) explain(made, *choice);
  if (tables) explain(made, *tables);
  if (slices) explain(made, *slices);
  if (tries) meshes = tried_meshes(command, accumulates, named_model, ranks, link);
  const Planned planned{
      command, outline,  command.options.scheme, choice, tables, slices, made, packing, stages,
      meshes,  messages, simulation.byte_scale};
  if (!command.svg.empty()) write_file(command.svg, schedule_svg(outline, emulation, simulation));
  command.json ? print_json(planned, ranks) : print_text(planned, ranks);
  return kOk;
}

}  // namespace

Run add_plan(CLI::App& app) {
  CLI::App* verb =
      app.add_subcommand("plan", "what is done with each tensor, and how long a step would take");
  verb->set_help_flag();  // the verb's own flags have it
  verb->prefix_command();
  return [](const Invocation& call) -> int {
    const std::vector<std::string> arguments(call.arguments.begin() + 1, call.arguments.end());
    return guarded("plan", [&] { return plan(arguments); });
  };
}

}  // namespace weft::cli
