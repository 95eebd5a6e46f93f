// What a user sees of a training run, and what it leaves: metrics.jsonl, summary.json, a progress bar or a
// plain line every few seconds, and some lines at the end. Of rank 0.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

#include "measure/text.h"
#include "weft/train/run.h"
#include "workload/train_options.h"

namespace weft {

struct ReportOptions {
  std::filesystem::path folder;
  // config.toml: written when the run has begun, so that a resume that fails changes nothing
  std::string config;
  std::string transport;
  int ranks = 1;
  bool oversubscribed = false;   // ranks exceed cores: times say little
  std::string compute = "real";  // else there is no loss, and lines say what the times are
};

class RunReport final : public Observer {
 public:
  RunReport(const TrainOptions& options, ReportOptions report);

  void started(const TrainStart& start) override;
  void step(const StepRecord& record) override;
  void checkpoint(std::int64_t steps_done) override;
  void packing(const PackingChange& change) override;
  // summary.json and the last lines.
  void finish(const TrainSummary& summary);

 private:
  std::string line(const StepRecord& record) const;
  std::string bar(const StepRecord& record) const;

  const TrainOptions& options_;
  ReportOptions report_;
  Progress progress_;
  bool terminal_;
  std::ofstream metrics_;
  TrainStart start_;
  double began_ = 0, said_ = 0;  // seconds of a steady clock
  std::uint64_t sent_ = 0;
  // Of the last steps, so that the line follows what happens now.
  double seconds_ = 0, waited_ = 0, tokens_ = 0;
};

}  // namespace weft
