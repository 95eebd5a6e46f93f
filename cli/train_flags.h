// Flags that say what is trained: model, data, gradients, optimizer. Every verb that computes a model takes
// them, under the same names and with the same defaults.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "measure/emulated.h"
#include "settings.h"
#include "weft/world.h"
#include "workload/train_options.h"
#include "world/placement.h"

namespace weft::cli {

// As typed; what is empty has a default that depends on something else.
struct TrainFlags {
  std::string preset = "default", plan_link;
  std::string text, megatron;
  std::optional<std::int64_t> vocabulary, context, width, hidden, projection, samples;
  std::optional<int> layers, heads;
  std::optional<double> dropout;
  bool untied = false;
  std::string schedule = "1f1b", stage_layers, pipeline_warmup = "single";
  std::string stage_wire = "float32", stage_sums = "float32", tensor_wire = "float32";
  int stage_chunks = 1;
  std::string compressed_stages = "all", factor_rank, tied_sum = StageOptions{}.tied_sum;
  bool backward_forgets = false;
  std::optional<int> experts, expert_choices, experts_every, shared_experts, expert_slices;
  std::optional<double> expert_capacity, balance_loss, z_loss, gate_jitter;
  std::string optimizer = "adamw";
  std::optional<double> lr, momentum, beta1, beta2, weight_decay;
  bool nesterov = false;
  std::string mesh, expert_policy = ExpertOptions{}.policy, expert_all_to_all = ExpertOptions{}.all_to_all;
  std::string expert_packing = ExpertOptions{}.packing, packing_memory;
  std::int64_t ranks = 4;
  TrainOptions options;
};

// The slow network between ranks that are threads.
struct NetworkFlags {
  std::string link, scale_up;
  std::int64_t nodes = 0;
};

// "gpt, lm"
std::string list_of(const std::vector<std::string_view>& names);

// One group of flags each. REQUIRES: `flags` outlives the settings.
void add_model_flags(Settings& settings, TrainFlags& flags);
void add_data_flags(Settings& settings, TrainFlags& flags);
void add_expert_flags(Settings& settings, TrainFlags& flags);    // of add_model_flags(), too
void add_mesh_flag(Settings& settings, TrainFlags& flags);       // into the group that is open
void add_gradient_flags(Settings& settings, TrainFlags& flags);  // without --scheme
void add_table_flags(Settings& settings, TrainFlags& flags);
void add_table_scheduling(Settings& settings, TrainFlags& flags);  // without --tables, into the open group
void add_optimizer_flags(Settings& settings, TrainFlags& flags);   // without --steps

void add_computation_flags(Settings& settings, Computation& computation);  // into the group that is open
void add_node_flags(Settings& settings, NetworkFlags& network);            // without --link

// Throws UsageError: an unknown name, or what does not go together.
void check_computation(const Computation& computation, const TrainOptions& options);

// What they mean together, as `flags.options`; values that were left out are filled in, for config.toml.
// Throws UsageError. Whether they can be meant is for check_train() to say.
void resolve_model(TrainFlags& flags);
void resolve_data(TrainFlags& flags);
// The plan goes by --plan-link, or by `link` (the run's, empty: none), or by 1 Gbit/s and 50 us.
// `network`: the nodes of so many ranks.
void resolve_plan(TrainFlags& flags, const std::string& link = {}, const NetworkFlags& network = {},
                  int ranks = 1);
LinkCost planned_by(const std::string& link, const NetworkFlags& network, int ranks);  // throws UsageError
// The number of ranks: as typed, or the launcher's. `named`: --ranks stands on the command line.
inline constexpr int kMostRanks = 256, kMostSimulatedRanks = 4096;
int resolve_ranks(const TrainFlags& flags, const Placement& place, bool named, int most = kMostRanks);
// `link` with the network's nodes; none where `link` is empty. Throws UsageError.
std::optional<EmulatedLink> resolve_network(const std::string& link, const NetworkFlags& network, int ranks);

// Whether it is "auto"; then it becomes the default one, until one was chosen.
inline constexpr std::string_view kAuto = "auto";
bool take_auto(SchemeOptions& scheme);
// Throws UsageError for what no way of tables could have.
bool take_auto(TablesOptions& tables);
bool take_auto(ExpertOptions& experts);  // the number of slices
// The messages between stages, by this word. Throws UsageError where none is compressed.
inline constexpr std::string_view kCritical = "critical";
bool take_auto(BackwardOptions& backward);
// check_train() of what is known while the way of tables is not.
void check_undecided(const TrainOptions& options, bool auto_tables, int ranks);

// "5e12", "10tflops", "312T": FLOPs a second. Throws UsageError.
double parse_flops(const std::string& text);
// "dp=8,ep=4": sets how many ranks share a layer's experts, packed as they are. Throws UsageError for what
// is no mesh of so many ranks, or has an axis that the model is not trained along.
void resolve_mesh(TrainFlags& flags, int ranks);

// Whether a command line has `flag`, or `flag=...`.
bool names_flag(const std::vector<std::string>& arguments, const std::string& flag);

}  // namespace weft::cli
