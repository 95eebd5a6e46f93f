// Training steps without a model, for the verbs that take --compute emulated and --transport sim: where the
// outline comes from, and ranks that run by it.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "transports/link_spec.h"
#include "weft/world.h"
#include "workload/emulate.h"
#include "workload/outline.h"
#include "workload/train_options.h"

namespace weft::cli {

// The file that was named, or the outline.json of the folder, or a measurement, which is then kept there.
// `file`: empty where none was named. Measured: one rank alone, with the share of the global batch that each
// of `ranks` has; a note on stderr says so. Throws UsageError: the file is none, or the folder has another.
Outline outline_for(const std::filesystem::path& folder, const std::string& file, const TrainOptions& options,
                    int ranks);

// Of an outline whose file was named, before anything is made: throws UsageError where it cannot be read, is
// of another model than --model names, or of more than the memory holds.
void check_named_outline(const std::string& file, const std::vector<std::string>& arguments,
                         const std::string& model, int ranks);

// Where the outline was measured of so many ranks side by side and this machine has a core for each,
// computation occupies it; else ranks stand for machines of their own, and sleep.
bool occupies_cores(const Outline& outline, int ranks);

// As the options of a training say: scheme, density, codec, buckets, clipping, plan. All steps are recorded,
// none is warm-up.
EmulationOptions emulation_of(const TrainOptions& options, int ranks, const Outline& outline);

// Ranks as threads over such a link; none: not shaped.
RunOptions run_options(const std::optional<LinkSpec>& link);
// Wall time. `failed` is called on the thread of a rank that ends with an error.
std::vector<EmulatedSteps> emulate_ranks(
    int ranks, const std::optional<LinkSpec>& link, const Outline& outline, const EmulationOptions& options,
    const std::function<void()>& failed = [] {});

// What selection and coding take in virtual time, by the kernels' costs on this machine.
SimulatedCosts measured_costs(const TrainOptions& options, int ranks, const Outline& outline);
// Virtual time.
std::vector<EmulatedSteps> simulate(const TrainOptions& options, int ranks,
                                    const std::optional<LinkSpec>& link, const Outline& outline,
                                    const SimulatedCosts& costs);

}  // namespace weft::cli
