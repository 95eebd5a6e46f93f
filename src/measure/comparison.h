// The same training under several variants. Every link, and none at all (T_inf), is one group of worlds that
// take turns (turns.h); what the folder has already is not measured again.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "measure/comparison_folder.h"
#include "measure/emulated.h"
#include "measure/interleave.h"
#include "measure/memory.h"
#include "measure/point.h"
#include "measure/text.h"
#include "measure/turns.h"
#include "planner/stages.h"
#include "weft/world.h"
#include "workload/table_choice.h"
#include "workload/train_options.h"

namespace weft {

// A scheme and what it is given beside the other variants.
struct Variant {
  std::string name;      // as it was asked for: "spardl+teams=2"
  TrainOptions options;  // all of them
  // The ways of tables are chosen for each link, before it is measured (workload/table_choice.h).
  bool chooses_tables = false;
  // So are the messages between stages that are factors (planner/messages.h).
  bool chooses_messages = false;
  // So is the number of stages whose gradients are compressed (planner/stages.h).
  bool chooses_stages = false;
  bool chooses_rank = false;  // with it, the columns of factors
};

struct NamedLink {
  std::string name;                  // "1gbit,50us", kNoLink
  std::optional<EmulatedLink> link;  // none: not shaped
  std::optional<LinkCost> planned;   // by which algorithms are chosen on it; none: as the variants say
};

struct ComparisonOptions {
  std::vector<Variant> variants;
  std::string baseline;  // the name of one of them
  // That every variant is tried with, its row being the fastest; none: its own.
  std::vector<double> bucket_mibs;
  std::vector<NamedLink> links;  // as asked for; the unshaped one comes on top
  Computation computation;
  std::int64_t measured_steps = 15;
  int ranks = 4;
  bool json = false;  // nothing but rows on stdout
  std::filesystem::path folder;
  std::string settings;              // what every point of a folder has in common, as lines of config.toml
  std::string selection;             // the other lines: which points are wanted
  std::optional<double> free_bytes;  // tests: of memory, in place of what the system says
};

inline constexpr std::int64_t kWarmUpSteps = 3;

// A variant's model, trained on the ranks of a process. `known`: called with the number of parameters, when
// the ranks are there and before their first step.
struct Training {
  TrainOptions options;
  int ranks = 1;
  RunOptions run;
  const Turns* turns = nullptr;
  std::function<void(std::int64_t parameters)> known;
};
// What only LibTorch does; empty where it is not built in, and nothing needs it.
struct Models {
  MeasureOutline measure_outline;
  std::function<Recorded(const Training& training, Lane& lane)> train;
};

class Comparison {
 public:
  // Makes the folder, or goes on with it. Throws UsageError.
  Comparison(ComparisonOptions options, Models models);
  void measure();
  // Rows, or the table; the page in the folder.
  void show();

 private:
  std::vector<std::string> wanted() const;
  // The variant that a name of wanted() is of.
  const Variant& variant_of(const std::string& name) const;
  TrainOptions options_of(const std::string& variant, const NamedLink& link) const;
  void choose_tables_at(const NamedLink& link);
  void choose_messages_at(const NamedLink& link);
  void choose_stages_at(const NamedLink& link);
  void save(const std::string& variant, const NamedLink& link, const Recorded& recorded, bool side_by_side);
  void measure(const std::vector<std::string>& variants, const NamedLink& link);
  void simulate_all(const std::vector<std::string>& variants, const NamedLink& link);
  MemoryNeed need_of(const std::string& variant, const NamedLink& link) const;
  void take_turns(const std::vector<std::string>& variants, const NamedLink& link);
  RunVariant work_at(const NamedLink& link);

  ComparisonOptions options_;
  Models models_;
  const bool emulated_;
  const Turns turns_;
  Progress progress_;
  const std::string session_;
  bool oversubscribed_ = false;
  std::string model_;
  Outline outline_;
  std::int64_t parameters_ = 0;
  std::map<std::string, SimulatedCosts> costs_;  // of a variant, in virtual time
  // By variant and link, where the variant chooses.
  std::map<std::pair<std::string, std::string>, TablesChoice> choices_;
  std::map<std::pair<std::string, std::string>, std::string> messages_;
  std::map<std::pair<std::string, std::string>, StagesChoice> stages_;  // the same
  std::unique_ptr<ComparisonFolder> folder_;
};

}  // namespace weft
