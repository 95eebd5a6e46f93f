#include "planner/plan.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "base/statistics.h"
#include "planner/text.h"
#include "transports/endpoint.h"
#include "transports/link_model.h"
#include "workload/elements.h"
#include "workload/job_steps.h"
#include "workload/step_parts.h"
#include "workload/step_waits.h"
#include "world/sim_ranks.h"

namespace weft {

namespace {

constexpr std::int64_t kSettle = 3, kSteps = 4;  // walked before, and looked at

double step_of(const std::vector<EmulatedSteps>& ranks) { return median(job_steps(seconds_of(ranks))); }

// Ranks of one node share its port.
double busiest_port_bytes(const std::vector<EmulatedSteps>& ranks, const SimulationOptions& simulation) {
  const LinkOptions link{.ranks = simulation.ranks, .nodes = simulation.link.nodes};
  std::vector<std::vector<double>> of_node(ranks.size());  // by step
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const std::vector<double>& bytes = ranks[r].scale_out_bytes;
    std::vector<double>& sum = of_node[static_cast<std::size_t>(node_of(link, static_cast<int>(r)))];
    sum.resize(bytes.size());
    for (std::size_t i = 0; i < bytes.size(); ++i) sum[i] += bytes[i];
  }
  double most = 0;
  for (std::vector<double>& bytes : of_node) most = std::max(most, median(std::move(bytes)));
  return most;
}

struct Walk {
  std::vector<EmulatedSteps> ranks;
  std::vector<StepWaits> waits;  // of each rank, the mean of its steps but the last, behind which it settles
  double step_seconds = 0;
};

Walk walk(const Outline& outline, EmulationOptions emulation, SimulationOptions simulation) {
  emulation.warmup = kSettle;
  emulation.steps = kSteps;
  emulation.before_step = nullptr;
  emulation.settles_after = nullptr;
  std::vector<std::vector<StepWaits>> waits;
  simulation.waits = &waits;
  Walk out;
  out.ranks = simulate_ranks(outline, emulation, simulation);
  out.step_seconds = step_of(out.ranks);
  for (std::vector<StepWaits>& steps : waits) {
    steps.pop_back();
    out.waits.push_back(mean_of(steps));
  }
  return out;
}

// Whether all ranks compute the same at the same time, whatever is exchanged.
bool alike(const Mesh& mesh, const EmulationOptions& emulation, const SimulationOptions& simulation) {
  return mesh.pp == 1 && mesh.ep == 1 && emulation.experts.ranks <= 1 && !simulation.late;
}

constexpr double kRounding = 1e-6;  // of a step

struct Steps {
  double seconds = 0;
  double unlimited = 0;  // of them, on a link without limits
  bool alike = false;
};

// Of a rank, by its waits on the link and on one without limits. They add up to the step's seconds.
StagePrediction parts_of(const Steps& step, const StepWaits& limited, const StepWaits& unlimited) {
  StagePrediction out;
  // (A step is a median of pieces rounded to a nanosecond, what a rank computes and waits for are means: of experts' rows,
  // say.)
  out.compute_seconds = std::min(unlimited.computed, (1 + kRounding) * step.unlimited);
  const double rest = std::max(0.0, step.unlimited - out.compute_seconds);
  out.bubble_seconds = step.alike ? 0 : std::min(unlimited.for_others, rest);
  out.work_seconds = rest - out.bubble_seconds;
  const double longer = step.seconds - step.unlimited;
  out.exposed_seconds =
      step.alike ? longer : std::clamp(limited.under_way - unlimited.under_way, 0.0, longer);
  out.behind_seconds = longer - out.exposed_seconds;
  return out;
}

StagePrediction stage_of_ranks(const Steps& step, const std::vector<int>& ranks, const Walk& limited,
                               const Walk& unlimited) {
  StagePrediction out;
  const auto count = static_cast<double>(ranks.size());
  std::vector<StepWaits> waits;
  for (const int rank : ranks) {
    const auto r = static_cast<std::size_t>(rank);
    waits.push_back(limited.waits[r]);
    const StagePrediction parts = parts_of(step, limited.waits[r], unlimited.waits[r]);
    out.compute_seconds += parts.compute_seconds / count;
    out.work_seconds += parts.work_seconds / count;
    out.bubble_seconds += parts.bubble_seconds / count;
    out.exposed_seconds += parts.exposed_seconds / count;
    out.behind_seconds += parts.behind_seconds / count;
  }
  for (const auto& [strategy, waited] : mean_of(waits).waited)
    out.waited.push_back({strategy, waited.seconds, waited.for_others});
  return out;
}

void add_stages(Prediction& out, const Mesh& mesh, const Steps& step, const Walk& limited,
                const Walk& unlimited) {
  std::vector<std::vector<int>> ranks(static_cast<std::size_t>(mesh.pp));
  for (int rank = 0; rank < mesh.ranks(); ++rank)
    ranks[static_cast<std::size_t>(mesh.coordinates(rank).pp)].push_back(rank);
  for (const std::vector<int>& of_stage : ranks) {
    const StagePrediction& stage =
        out.stages.emplace_back(stage_of_ranks(step, of_stage, limited, unlimited));
    out.compute_seconds += stage.compute_seconds / mesh.pp;
    out.work_seconds += stage.work_seconds / mesh.pp;
    out.bubble_seconds += stage.bubble_seconds / mesh.pp;
  }
}

std::string_view verb_of(Move::Kind kind) {
  switch (kind) {
    case Move::Kind::compute:
      return "compute";
    case Move::Kind::announce:
      return "announce";
    case Move::Kind::start:
      return "start";
    case Move::Kind::wait:
      return "wait";
  }
  return "";
}

std::string step_text(int offset) {
  if (offset == 0) return "step n";
  return offset > 0 ? "step n-" + std::to_string(offset) : "step n+" + std::to_string(-offset);
}

// What the walk has found out about tables, in their rows.
void add_notes(std::vector<PlanRow>& rows, const std::vector<std::string>& notes) {
  for (PlanRow& row : rows) {
    const std::string head = "table '" + row.tensor + "': ";
    for (const std::string& note : notes) {
      if (note.starts_with(head)) row.why += "; " + note.substr(head.size());
    }
  }
}

}  // namespace

int walk_scale(const Outline& outline, const EmulationOptions& emulation, int ranks, WalkSize size) {
  if (find_scheme(emulation.parallel.scheme.name).low_rank || emulation.experts.ranks > 1) return 1;
  const auto all = static_cast<double>(elements_of_ranks(outline, emulation, ranks).dense);
  return all <= size.exact ? 1 : static_cast<int>(std::ceil(all / size.walked));
}

Prediction predict(const Outline& outline, const EmulationOptions& given,
                   const SimulationOptions& simulation) {
  EmulationOptions emulation = given;
  if (simulation.byte_scale == 1) emulation.windows = windows_of(outline, given);  // of both walks
  Prediction out;
  SimulationOptions limited = simulation, unlimited = simulation;
  limited.distinct_tables = &out.distinct_tables;
  unlimited.link = {};
  const Walk on_link = walk(outline, emulation, limited), without = walk(outline, emulation, unlimited);
  const Mesh mesh = emulation.mesh.ranks() == 1 ? Mesh{.dp = simulation.ranks} : emulation.mesh;
  const Steps step{.seconds = on_link.step_seconds,
                   .unlimited = std::min(on_link.step_seconds, without.step_seconds),
                   .alike = alike(mesh, emulation, simulation)};
  out.step_seconds = step.seconds;
  out.exposed_seconds = step.seconds - step.unlimited;
  add_stages(out, mesh, step, on_link, without);
  out.busiest_port_bytes = busiest_port_bytes(on_link.ranks, simulation);
  out.notes = on_link.ranks.front().notes;
  return out;
}

double predict_step(const Outline& outline, const EmulationOptions& emulation,
                    const SimulationOptions& simulation) {
  return walk(outline, emulation, simulation).step_seconds;
}

void for_each_stage(const Outline& outline, const EmulationOptions& emulation, int num_ranks,
                    FunctionRef<void(int stage, JobStrategies& job)> f) {
  SimRanksOptions options;
  options.sim.link.ranks = num_ranks;
  SimRanks ranks(options);
  for (int stage = 0; stage < emulation.mesh.pp; ++stage) {
    const int rank = emulation.mesh.rank_of({.pp = stage});
    Engine& engine = ranks.engine(rank);
    if (emulation.planned_link) engine.world().endpoint().set_cost(*emulation.planned_link);
    JobOptions walked = job_options(emulation, outline, rank);
    walked.table_memory_rows = kWalkedRows;
    JobStrategies job(engine, engine.world(),
                      rank_model(outline, emulation, expert_layout(emulation, rank), rank).shape, walked);
    f(stage, job);
    // The comparison of plans has begun, and nobody answers it.
    engine.shut_down(std::make_exception_ptr(Error("a plan is made, nothing is trained")));
  }
}

Plan make_tables(const Outline& outline, const EmulationOptions& emulation, int num_ranks) {
  Plan out;
  const auto lay_out = [&](int stage, JobStrategies& job) {
    std::vector<PlanRow> rows = job.all().rows();
    for (PlanRow& row : rows) {
      if (emulation.mesh.pp > 1) row.why = "stage " + std::to_string(stage) + ": " + row.why;
      out.rows.push_back(std::move(row));
    }
    out.world = job.all().world().group_id();
    out.stages.push_back({job.all().shape(), job.all().tables(emulation.micro_batches), rows.size()});
    out.why_updates_wait = job.all().why_updates_wait();
  };
  for_each_stage(outline, emulation, num_ranks, lay_out);
  return out;
}

Plan make_plan(const Outline& outline, const EmulationOptions& emulation,
               const SimulationOptions& simulation) {
  Plan out = make_tables(outline, emulation, simulation.ranks);
  out.prediction = predict(outline, emulation, simulation);
  add_notes(out.rows, out.prediction.notes);
  return out;
}

std::string group_text(const Plan& plan, const PlanRow& row) {
  if (row.group == plan.world) return "world";
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(row.group));
  return text;
}

std::string text_of(const Plan::Stage& stage, Phase phase) {
  std::string out;
  const int micro_batches = stage.tables.of(phase).micro_batches();
  for (const Move& move : stage.tables.of(phase).moves) {
    char line[160];
    const std::string_view verb = verb_of(move.kind);
    if (move.kind == Move::Kind::compute) {
      std::snprintf(line, sizeof line, "  %-9.*s%s\n", static_cast<int>(verb.size()), verb.data(),
                    stage.shape.title(move.piece, micro_batches).c_str());
    } else {
      const Exchange& exchange = stage.tables.exchanges[static_cast<std::size_t>(move.exchange)];
      std::string name = exchange.name;
      if (exchange.each_micro_batch && micro_batches > 1)
        name += ", micro-batch " + std::to_string(move.micro_batch);
      std::snprintf(line, sizeof line, "  %-9.*s%-70.70s %-9s %s%s\n", static_cast<int>(verb.size()),
                    verb.data(), name.c_str(), step_text(move.offset).c_str(),
                    std::string(name_of(exchange.traffic)).c_str(),
                    move.inside ? ", as soon as it is ready" : "");
    }
    out += line;
  }
  return out;
}

std::string schedule_text(const StageOptions& options, int micro_batches) {
  std::string out;
  for (int stage = 0; stage < options.stages; ++stage) {
    out += "stage " + std::to_string(stage) + " ";
    for (const StageItem& item : pipeline_order(pipeline_shape(options, micro_batches), stage)) {
      const char work = item.work == Work::forward ? 'F' : item.work == Work::weight_gradient ? 'W' : 'B';
      out += std::string(" ") + work + std::to_string(item.micro_batch);
      if (options.chunks > 1) out += "." + std::to_string(item.chunk / options.stages);
    }
    out += "\n";
  }
  return out;
}

std::string schedule_svg(const Outline& outline, const EmulationOptions& emulation,
                         const SimulationOptions& simulation) {
  EmulationOptions some = emulation;
  some.warmup = 1;
  some.steps = 2;
  some.before_step = nullptr;
  some.settles_after = nullptr;
  std::vector<Trace> traces;
  SimulationOptions traced = simulation;
  traced.traces = &traces;
  static_cast<void>(simulate_ranks(outline, some, traced));
  const auto is_shown = [](const TraceEvent& e) {
    return e.kind == TraceEvent::Kind::computing && e.step == 1 && e.finished > e.started;
  };
  Time first = kNever, last{};
  for (const Trace& trace : traces) {
    for (const TraceEvent& e : trace.events()) {
      if (!is_shown(e)) continue;
      first = std::min(first, e.started);
      last = std::max(last, e.finished);
    }
  }
  constexpr int kWidth = 1200, kRow = 28, kLeft = 70, kTop = 34;
  const double scale = last > first ? (kWidth - kLeft - 10) / seconds(last - first) : 0;
  const int height = kTop + kRow * static_cast<int>(traces.size()) + 30;
  std::string out;
  char line[512];
  std::snprintf(
      line, sizeof line,
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" "
      "font-family=\"sans-serif\" font-size=\"12\"><rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>"
      "<text x=\"10\" y=\"20\">what a step computes, within %s: forward blue, backward orange, weights "
      "green, updates "
      "grey</text>\n",
      kWidth, height, milliseconds(seconds(last - first)).c_str());
  out += line;
  for (std::size_t r = 0; r < traces.size(); ++r) {
    const int y = kTop + kRow * static_cast<int>(r);
    std::snprintf(line, sizeof line, "<text x=\"10\" y=\"%d\">rank %zu</text>\n", y + 18, r);
    out += line;
    for (const TraceEvent& e : traces[r].events()) {
      if (!is_shown(e)) continue;
      const char* const colour = e.name.starts_with("forward")           ? "#4477aa"
                                 : e.name.starts_with("weight gradient") ? "#228833"
                                 : e.name.starts_with("update")          ? "#bbbbbb"
                                                                         : "#ee7733";
      std::snprintf(line, sizeof line,
                    "<rect x=\"%.2f\" y=\"%d\" width=\"%.2f\" height=\"%d\" fill=\"%s\" stroke=\"white\" "
                    "stroke-width=\"0.4\"><title>%.160s</title></rect>\n",
                    kLeft + scale * seconds(e.started - first), y + 2,
                    scale * seconds(e.finished - e.started), kRow - 4, colour, e.name.c_str());
      out += line;
    }
  }
  std::snprintf(line, sizeof line,
                "<text x=\"%d\" y=\"%d\">time, from the first piece to the last</text></svg>\n", kLeft,
                height - 10);
  return out + line;
}

}  // namespace weft
