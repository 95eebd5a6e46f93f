// Training steps without a model, as train and compare run them: ranks that go by an outline, in wall time or
// in virtual time.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "measure/summary.h"
#include "weft/world.h"
#include "workload/emulate.h"
#include "workload/outline.h"
#include "workload/train_options.h"

namespace weft {

// Who computes, in which time.
struct Computation {
  std::string compute = "real";       // or "emulated"
  std::string transport = "threads";  // or "sim"; under a launcher: its own
  std::string outline;                // file; empty: measured first, where one is needed
  int byte_scale = 1;                 // of "sim": SimulationOptions::byte_scale

  bool emulated() const { return compute == "emulated"; }
  bool simulated() const { return transport == "sim"; }
};

// Measures the outline of a model, one rank alone, with the share of the global batch that each of `ranks`
// has. None where LibTorch is not built in.
using MeasureOutline = std::function<Outline(const TrainOptions& options, int ranks)>;

// A file names the outline, or the folder has one already: no model needs to be measured for it.
bool has_outline(const std::filesystem::path& folder, const std::string& file);
// The file that was named, or the outline.json of the folder, or a measurement; it is then kept there. A note
// on stderr says so. `file`: empty where none was named. Throws UsageError: the file is none, or the folder
// has another.
Outline outline_for(const std::filesystem::path& folder, const std::string& file, const TrainOptions& options,
                    int ranks, const MeasureOutline& measure);

// Throws UsageError where the file cannot be read, or is of another model than `model` (empty: none was
// named).
Outline read_named_outline(const std::string& file, const std::string& model);
// Of an outline whose file was named, before anything is made: the same, and where it is of more than the
// memory holds.
void check_named_outline(const Computation& computation, const std::string& model,
                         const TrainOptions& options, int ranks);

// Where the outline was measured of so many ranks side by side and this machine has a core for each,
// computation occupies it; else ranks stand for machines of their own, and sleep.
bool occupies_cores(const Outline& outline, int ranks);

// As the options of a training say: scheme, buckets, clipping, plan. All steps are recorded, none is warm-up.
EmulationOptions emulation_of(const TrainOptions& options, int ranks, const Outline& outline);

// Ranks as threads over such a link; none: not shaped. As a policy of experts has the network shared.
RunOptions run_options(const std::optional<EmulatedLink>& link, const ExpertOptions& experts);

struct EmulatedRun {
  std::vector<EmulatedSteps> ranks;
  // All that the busiest rank sent, with frames; none in virtual time.
  std::optional<std::uint64_t> wire_bytes;
};
// Wall time. `failed` is called on the thread of a rank that ends with an error.
EmulatedRun emulate_ranks(
    int ranks, const std::optional<EmulatedLink>& link, const Outline& outline,
    const EmulationOptions& options, const std::function<void()>& failed = [] {},
    std::vector<Trace>* traces = nullptr);  // one per rank

// What selection and coding take in virtual time, by the kernels' costs on this machine. Up to
// kMostOnOneMachine ranks share its cores, as an emulated run's do; more stand for machines of their own.
inline constexpr int kMostOnOneMachine = 16;
SimulatedCosts measured_costs(const TrainOptions& options, int ranks, const Outline& outline);
// The link and the costs of a run in virtual time.
SimulationOptions simulation_of(int ranks, const std::optional<EmulatedLink>& link,
                                const SimulatedCosts& costs);
// Packing that a run with these options would come to, in virtual time, and why: for one that is "auto".
struct ChosenPacking {
  int packing = 1;
  std::string why;  // a clause for each change
};
ChosenPacking choose_packing(const TrainOptions& options, const Outline& outline,
                             const SimulationOptions& simulation);
// Steps until the last decision that could double it once more.
std::int64_t steps_to_pack(const ExpertOptions& experts);
// Virtual time.
EmulatedRun simulate(const TrainOptions& options, const Outline& outline,
                     const SimulationOptions& simulation);

std::vector<RankSteps> rank_steps(const EmulatedRun& run);

}  // namespace weft
