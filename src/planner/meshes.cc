#include "planner/meshes.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <numeric>
#include <utility>

#include "planner/text.h"
#include "planner/traffic.h"
#include "workload/step_parts.h"

namespace weft {

namespace {

constexpr double kHardly = 0.05;  // a share of a step that limits nothing
constexpr double kUneven = 1.25;  // times the mean of all stages that the slowest computes

std::string percent(double share) {
  char text[16];
  std::snprintf(text, sizeof text, "%.0f %%", share * 100);
  return text;
}

std::string mebibytes(double bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g MiB", bytes / (1 << 20));
  return text;
}

struct Sent {
  double bytes = 0, seconds = 0;
};

// Of the stage in which it takes longest by its rows.
std::array<Sent, kTraffic.size()> sent_of(const Plan& plan) {
  std::array<Sent, kTraffic.size()> most;
  std::size_t row = 0;
  for (const Plan::Stage& stage : plan.stages) {
    std::array<Sent, kTraffic.size()> sent;
    for (const std::size_t end = row + stage.rows; row < end; ++row) {
      Sent& sum = sent[traffic_of(plan.rows[row].strategy)];
      sum.bytes += plan.rows[row].bytes;
      sum.seconds += plan.rows[row].seconds;
    }
    for (std::size_t k = 0; k < most.size(); ++k) {
      if (sent[k].seconds > most[k].seconds) most[k] = sent[k];
    }
  }
  return most;
}

std::string why_exposed(const Plan& plan, const Mesh& mesh, const PlannedMesh& planned, int nodes) {
  const std::array<Sent, kTraffic.size()> sent = sent_of(plan);
  const auto most = std::ranges::max_element(sent, {}, &Sent::seconds);
  const Traffic& traffic = kTraffic[static_cast<std::size_t>(most - sent.begin())];
  std::string out(traffic.name);
  if (nodes > 1 && mesh.ranks() % nodes == 0)
    out += within_nodes(mesh, traffic.axis, mesh.ranks() / nodes) ? " stay in the node" : " leave the node";
  return out + ": " + mebibytes(most->bytes) + " of a rank take " + milliseconds(most->seconds) + " alone, " +
         percent(planned.prediction.exposed_seconds / planned.prediction.step_seconds) +
         " of a step are exposed";
}

std::string why_idle(const PlannedMesh& planned) {
  const std::vector<StagePrediction>& stages = planned.prediction.stages;
  if (stages.size() == 1)
    return "ranks wait for those whose experts have more rows for " +
           percent(planned.prediction.bubble_seconds / planned.prediction.step_seconds) + " of a step";
  std::string out = std::to_string(stages.size()) + " stages over " + std::to_string(planned.micro_batches) +
                    (planned.micro_batches == 1 ? " micro-batch" : " micro-batches") + " are idle for " +
                    percent(planned.prediction.bubble_seconds / planned.prediction.step_seconds) +
                    " of a step";
  const auto slowest = std::ranges::max_element(stages, {}, &StagePrediction::compute_seconds);
  if (slowest->compute_seconds > kUneven * planned.prediction.compute_seconds)
    out += ", and stage " + std::to_string(slowest - stages.begin()) + " computes for " +
           milliseconds(slowest->compute_seconds) + ", the mean of all is " +
           milliseconds(planned.prediction.compute_seconds);
  return out;
}

void explain(PlannedMesh& planned, const MeshCase& mesh, const SimulationOptions& simulation) {
  const Plan plan = make_tables(mesh.outline, mesh.emulation, simulation.ranks);
  for (const Plan::Stage& stage : plan.stages) {
    const RankElements elements = elements_of_rank(stage.shape, mesh.emulation.tables, planned.mesh.dp);
    if (elements.all() > planned.elements.all()) planned.elements = elements;
  }
  const Prediction& predicted = planned.prediction;
  const double limit = kHardly * predicted.step_seconds;
  if (std::max(predicted.exposed_seconds, predicted.bubble_seconds) < limit)
    planned.why =
        "a rank computes for " + percent(predicted.compute_seconds / predicted.step_seconds) + " of a step";
  else if (predicted.exposed_seconds >= predicted.bubble_seconds)
    planned.why = why_exposed(plan, planned.mesh, planned, simulation.link.nodes);
  else
    planned.why = why_idle(planned);
}

}  // namespace

double least_step_seconds(const MeshCase& mesh) {
  const EmulationOptions& emulation = mesh.emulation;
  const Outline outline = of_one_micro_batch(with_dense_tables(mesh.outline, emulation.tables), emulation);
  double most = 0;
  for (int stage = 0; stage < emulation.mesh.pp; ++stage) {
    const int rank = emulation.mesh.rank_of({.pp = stage});
    const RankModel model = rank_model(outline, emulation, expert_layout(emulation, rank), rank);
    double computed = 0;
    for (const std::vector<PartTimes>& block : model.times) {
      for (const PartTimes& part : block) computed += part.forward_seconds + part.backward_seconds;
    }
    double seconds = outline.other_seconds + emulation.micro_batches * computed;
    for (int b = 0; b < model.shape.num_blocks(); ++b)
      seconds += outline.blocks[static_cast<std::size_t>(model.shape.origin_of(b))].update_seconds;
    most = std::max(most, seconds);
  }
  return most;
}

MeshesChoice compare_meshes(const std::vector<MeshCase>& cases, const SimulationOptions& simulation, int most,
                            const std::function<void(int done, int cases)>& progress) {
  MeshesChoice out;
  out.cases = static_cast<int>(cases.size());
  struct Walked {
    std::size_t at = 0;  // among the cases
    double step_seconds = 0;
    Prediction prediction;
  };
  std::vector<Walked> best;
  // Step 1
  std::vector<double> least;
  least.reserve(cases.size());
  for (const MeshCase& mesh : cases) least.push_back(least_step_seconds(mesh));
  std::vector<std::size_t> order(cases.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::sort(order, {}, [&](std::size_t i) { return std::pair(least[i], i); });
  // Step 2
  int done = 0;
  for (const std::size_t i : order) {
    const bool full = best.size() == static_cast<std::size_t>(most);
    if (full && least[i] >= best.back().step_seconds) {
      ++out.left_out;
    } else {
      SimulationOptions walked = simulation;
      walked.byte_scale = walk_scale(cases[i].outline, cases[i].emulation, simulation.ranks);
      Prediction predicted = predict(cases[i].outline, cases[i].emulation, walked);
      best.push_back({i, predicted.step_seconds, std::move(predicted)});
      std::ranges::sort(best, [](const Walked& a, const Walked& b) {
        return a.step_seconds != b.step_seconds ? a.step_seconds < b.step_seconds : a.at < b.at;
      });
      if (full) best.pop_back();
    }
    if (progress) progress(++done, out.cases);
  }
  // Step 3
  for (Walked& walked : best) {
    const EmulationOptions& emulation = cases[walked.at].emulation;
    PlannedMesh planned;
    planned.mesh = emulation.mesh;
    planned.micro_batches = emulation.micro_batches;
    planned.prediction = std::move(walked.prediction);
    explain(planned, cases[walked.at], simulation);
    out.best.push_back(std::move(planned));
  }
  return out;
}

}  // namespace weft
