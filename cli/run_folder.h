// The folder of a run: where it is, whether it may be used, and what is written there.
//
//   config.toml     the configuration that was in effect (what --config reads)
//   metrics.jsonl   one object a step
//   summary.json    one object, when the run has ended
//   trace.json      with --trace (a process of many: trace.rank<r>.json)
//   checkpoints/    src/state/checkpoint.h
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "weft_torch/train/trainer.h"

namespace weft::cli {

// What --out and --resume mean together. `resume`: as typed, "-" where it was given without a value.
struct RunPlace {
  std::filesystem::path folder;  // empty: a new one, by default_folder()
  TrainRun::Resume resume = TrainRun::Resume::no;
};
// Throws UsageError: no run to resume, two folders, --resume auto without a folder.
RunPlace find_place(const std::string& out, bool resume_given, const std::string& resume);

// runs/<model>-<scheme>-<UTC time>, one that is not there.
std::filesystem::path default_folder(const std::string& model, const std::string& scheme);
// Makes it. Throws UsageError for one that has a run, unless that is to go on.
void prepare_folder(const std::filesystem::path& folder, bool resume);
// Leaves the records of steps below `first_step`: the others will come again.
void cut_metrics(const std::filesystem::path& folder, std::int64_t first_step);
// Throws Error that names the file and why.
void write_file(const std::filesystem::path& path, const std::string& content);

}  // namespace weft::cli
