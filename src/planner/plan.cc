#include "planner/plan.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "base/statistics.h"
#include "transports/endpoint.h"
#include "transports/link_model.h"
#include "workload/job_steps.h"
#include "workload/step_parts.h"
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

std::vector<EmulatedSteps> walk(const Outline& outline, EmulationOptions emulation,
                                const SimulationOptions& simulation) {
  emulation.warmup = kSettle;
  emulation.steps = kSteps;
  emulation.before_step = nullptr;
  emulation.settles_after = nullptr;
  return simulate_ranks(outline, emulation, simulation);
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
  const RankElements elements = elements_of_rank(shape_of(outline), emulation.tables, ranks);
  const double all = static_cast<double>(elements.dense) * ranks;
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
  const std::vector<EmulatedSteps> ranks = walk(outline, emulation, limited);
  out.step_seconds = step_of(ranks);
  out.exposed_seconds = std::max(0.0, out.step_seconds - step_of(walk(outline, emulation, unlimited)));
  out.compute_seconds = compute_seconds(with_dense_tables(outline, emulation.tables));
  out.busiest_port_bytes = busiest_port_bytes(ranks, simulation);
  out.notes = ranks.front().notes;
  return out;
}

Plan make_plan(const Outline& outline, const EmulationOptions& emulation,
               const SimulationOptions& simulation) {
  Plan out;
  {
    SimRanksOptions options;
    options.sim.link.ranks = simulation.ranks;
    SimRanks ranks(options);
    Engine& engine = ranks.engine(0);
    if (emulation.planned_link) engine.world().endpoint().set_cost(*emulation.planned_link);
    JobOptions walked = job_options(emulation, outline, engine.world().rank());
    walked.table_memory_rows = kWalkedRows;
    JobStrategies job(engine, engine.world(),
                      shape_of(outline, expert_layout(emulation.experts, engine.world().rank())), walked);
    out.rows = job.all().rows();
    out.world = engine.world().group_id();
    out.shape = job.all().shape();
    out.tables = job.all().tables(emulation.micro_batches);
    out.why_updates_wait = job.all().why_updates_wait();
    // The comparison of plans has begun, and nobody answers it.
    engine.shut_down(std::make_exception_ptr(Error("a plan is made, nothing is trained")));
  }
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

std::string text_of(const Plan& plan, Phase phase) {
  std::string out;
  const int micro_batches = plan.tables.of(phase).micro_batches();
  for (const Move& move : plan.tables.of(phase).moves) {
    char line[160];
    const std::string_view verb = verb_of(move.kind);
    if (move.kind == Move::Kind::compute) {
      std::snprintf(line, sizeof line, "  %-9.*s%s\n", static_cast<int>(verb.size()), verb.data(),
                    plan.shape.title(move.piece, micro_batches).c_str());
    } else {
      const Exchange& exchange = plan.tables.exchanges[static_cast<std::size_t>(move.exchange)];
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

}  // namespace weft
