#include "plan/meshes.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "measure/emulated.h"
#include "measure/memory.h"
#include "measure/text.h"
#include "weft/error.h"
#include "workload/train_options.h"

namespace weft::cli {

namespace {

constexpr int kBest = 5;

int micro_batches_of(const TrainOptions& options, const Mesh& mesh) {
  if (mesh.pp == 1) return 1;
  const std::int64_t sequences = sequences_of_rank(options, mesh.dp), most = kMicroBatches * mesh.pp;
  const std::int64_t count = std::clamp<std::int64_t>(sequences, 1, most);
  if (options.sizes.stage.schedule != "interleaved" || count < mesh.pp) return static_cast<int>(count);
  return static_cast<int>(count / mesh.pp * mesh.pp);
}

// What a training on this mesh would be. Throws UsageError where there can be none.
TrainOptions options_on(TrainFlags flags, const Mesh& mesh, bool accumulates) {
  flags.mesh = mesh.text();
  without_axes(flags, mesh);
  if (take_auto(flags.options.scheme)) flags.options.scheme.name = lossless_scheme().name;
  take_auto(flags.options.tables);
  take_auto(flags.options.sizes.experts);
  take_auto(flags.options.backward);
  resolve_mesh(flags, mesh.ranks());
  if (!accumulates) flags.options.accumulate = micro_batches_of(flags.options, mesh);
  check_train(flags.options, mesh.ranks());
  return flags.options;
}

void show_progress(int done, int cases) {
  if (::isatty(STDERR_FILENO) == 0) return;
  std::fprintf(stderr, "\rweft: meshes: %d of %d%s", done, cases, done < cases ? "" : "\n");
}

double memory_of(const PlannedMesh& mesh) {
  return MemoryNeed{.parameters = mesh.elements.dense, .held = mesh.elements.held}.bytes();
}

}  // namespace

bool can_be_cut(std::string_view model) { return model == "gpt" || model == "gpt-moe" || model == "bert"; }

MeshesChoice try_meshes(const TrainFlags& flags, bool accumulates, const OutlineOfMesh& outline,
                        const SimulationOptions& simulation) {
  std::vector<MeshCase> cases;
  std::string refusal;
  for (const Mesh& mesh : all_meshes(simulation.ranks)) {
    try {
      const TrainOptions options = options_on(flags, mesh, accumulates);
      MeshCase& added = cases.emplace_back();
      added.outline = outline(options);
      added.emulation = emulation_of(options, mesh.ranks(), added.outline);
    } catch (const UsageError& error) {
      if (refusal.empty()) refusal = error.what();
    }
  }
  if (cases.empty()) throw UsageError("--mesh auto: there is none: " + refusal);
  return compare_meshes(cases, simulation, kBest, show_progress);
}

void print_meshes(const MeshesChoice& meshes, int ranks, bool nodes) {
  const std::string left_out = meshes.left_out == 0 ? ""
                                                    : ", " + std::to_string(meshes.left_out) +
                                                          " of them only bounded: they compute longer";
  std::printf("\nmeshes of %d ranks, the fastest of %d%s\n", ranks, meshes.cases, left_out.c_str());
  std::printf("%-20s %13s %10s %10s %10s %10s %10s %14s %10s  %s\n", "mesh", "micro-batches", "step",
              "computes", "work", "bubble", "exposed", nodes ? "busiest node" : "busiest rank", "memory",
              "why");
  for (const PlannedMesh& mesh : meshes.best) {
    const Prediction& predicted = mesh.prediction;
    std::printf(
        "%-20s %13d %10s %10s %10s %10s %10s %14s %10s  %s\n", mesh.mesh.text().c_str(), mesh.micro_batches,
        seconds_text(predicted.step_seconds).c_str(), seconds_text(predicted.compute_seconds).c_str(),
        seconds_text(predicted.work_seconds).c_str(), seconds_text(predicted.bubble_seconds).c_str(),
        seconds_text(predicted.exposed_seconds).c_str(), size_text(predicted.busiest_port_bytes).c_str(),
        size_text(memory_of(mesh)).c_str(), mesh.why.c_str());
  }
}

nlohmann::ordered_json json_of(const MeshesChoice& meshes) {
  nlohmann::ordered_json out{{"cases", meshes.cases}, {"left_out", meshes.left_out}};
  for (const PlannedMesh& mesh : meshes.best)
    out["best"].push_back({{"mesh", mesh.mesh.text()},
                           {"micro_batches", mesh.micro_batches},
                           {"step_seconds", mesh.prediction.step_seconds},
                           {"compute_seconds", mesh.prediction.compute_seconds},
                           {"work_seconds", mesh.prediction.work_seconds},
                           {"bubble_seconds", mesh.prediction.bubble_seconds},
                           {"exposed_seconds", mesh.prediction.exposed_seconds},
                           {"busiest_port_bytes", mesh.prediction.busiest_port_bytes},
                           {"memory_bytes", memory_of(mesh)},
                           {"why", mesh.why}});
  return out;
}

}  // namespace weft::cli
