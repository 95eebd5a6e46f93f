// The folder of a run: where it is, whether it may be used, and what is written there.
//
//   config.toml     the configuration that was in effect (what --config reads)
//   metrics.jsonl   one object a step
//   summary.json    one object, when the run has ended
//   trace.json      (a process of many: trace.rank<r>.json)
//   checkpoints/    src/state/checkpoint.h
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "weft/trace.h"
#include "weft/train/run.h"
#include "workload/train_options.h"

namespace weft::cli {

// What --out and --resume mean together. `resume`: as typed, "-" where it was given without a value.
struct RunPlace {
  std::filesystem::path folder;  // empty: a new one, by default_folder()
  TrainRun::Resume resume = TrainRun::Resume::no;
};
// Throws UsageError: no run to resume, two folders, --resume auto without a folder.
RunPlace find_place(const std::string& out, bool resume_given, const std::string& resume);

// Makes the folder of a run; only one rank of it does. Throws UsageError for one that has another run.
std::filesystem::path claim_folder(const RunPlace& place, const TrainOptions& options);

// A trace for each of `ranks`: of all events, or of a run's first ones; and trace.json of them. `first`: the
// rank of the first.
std::vector<Trace> make_traces(int ranks, bool all);
void write_traces(const std::filesystem::path& file, std::span<const Trace> traces, int first = 0);

// runs/<model>-<scheme>-<UTC time>, one that is not there.
std::filesystem::path default_folder(const std::string& model, const std::string& scheme);
}  // namespace weft::cli
