#include "outline/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <optional>

#include "data/open.h"
#include "measure/outline_file.h"
#include "measure/text.h"
#include "settings.h"
#include "torch_verbs.h"
#include "train_flags.h"
#include "verbs.h"
#include "weft/error.h"
#include "workload/model_shapes.h"
#include "workload/train_options.h"

namespace weft::cli {

OutlineCommand read_outline_flags(const std::vector<std::string>& arguments) {
  CLI::App app{"Measure the blocks of a model for emulated and simulated runs.\n", "weft outline"};
  Settings settings(app);
  TrainFlags flags;
  flags.ranks = 1;
  OutlineCommand command;
  std::string flops;
  add_model_flags(settings, flags);
  add_data_flags(settings, flags);
  add_optimizer_flags(settings, flags);
  settings.group("Outline");
  settings.add("ranks", flags.ranks, "that compute side by side and share --global-batch");
  settings.add("threads", flags.options.threads, "of torch, a rank");
  settings.add("flops", flops, "RATE of a rank, e.g. 10tflops: seconds from FLOPs instead of a clock");
  settings.add("steps", command.options.steps, "that are measured");
  settings.add("warmup", command.options.warmup, "steps before them");
  app.add_option("--show", command.shown, "FILE: print that outline, and make none")->group("Outline");
  app.add_option("-o,--out", command.file, "file to write (default outline.json)")->group("Outline");
  app.footer(
      "Examples:\n"
      "  weft outline --model gpt --global-batch 4 -o gpt.json\n"
      "  weft outline --model gpt --ranks 2 --global-batch 16 -o gpt-2.json   (as weft train --ranks 2)\n"
      "  weft outline --model lm --flops 10tflops\n"
      "  weft outline --show gpt.json");
  parse_flags(app, arguments);
  if (!command.shown.empty()) return command;
  resolve_model(flags);
  take_auto(flags.options.sizes.experts);  // it is measured with several numbers of slices
  resolve_data(flags);
  OutlineOptions& options = command.options;
  if (flags.ranks < 1 || flags.ranks > kMostRanks)
    throw UsageError("ranks must be 1 to " + std::to_string(kMostRanks) + ", not " +
                     std::to_string(flags.ranks));
  options.side_by_side = static_cast<int>(flags.ranks);
  options.train = flags.options;
  check_train(options.train, options.side_by_side);
  options.sequences = options.train.global_batch / flags.ranks;
  if (options.sequences < 1) {
    throw UsageError("a global batch of " + std::to_string(options.train.global_batch) +
                     " sequences is none for each of " + std::to_string(flags.ranks) + " ranks");
  }
  if (!flops.empty()) command.flops_per_second = parse_flops(flops);
  if (command.file.empty()) command.file = "outline.json";
  const std::filesystem::path folder = std::filesystem::absolute(command.file).parent_path();
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error))  // before anything is measured for it
    throw UsageError("-o " + command.file + ": there is no folder '" + folder.string() + "'");
  return command;
}

namespace {

void print(const Outline& outline) {
  std::vector<std::int64_t> parameters(outline.blocks.size());
  std::size_t widest = 5;
  for (const OutlineTensor& t : outline.tensors) parameters[static_cast<std::size_t>(t.block)] += t.length;
  for (const OutlineBlock& b : outline.blocks) widest = std::max(widest, b.name.size());
  const auto line = [&](const std::string& name, std::int64_t count, const OutlineBlock& b) {
    std::printf("%-*s %12lld %12s %12s %12s\n", static_cast<int>(widest), name.c_str(),
                static_cast<long long>(count), seconds_text(b.forward_seconds).c_str(),
                seconds_text(b.backward_seconds).c_str(), seconds_text(b.update_seconds).c_str());
  };
  std::printf("%-*s %12s %12s %12s %12s\n", static_cast<int>(widest), "block", "parameters", "forward",
              "backward", "update");
  OutlineBlock sum;
  for (std::size_t b = 0; b < outline.blocks.size(); ++b) {
    line(outline.blocks[b].name, parameters[b], outline.blocks[b]);
    sum.forward_seconds += outline.blocks[b].forward_seconds;
    sum.backward_seconds += outline.blocks[b].backward_seconds;
    sum.update_seconds += outline.blocks[b].update_seconds;
  }
  line("all", outline.parameters, sum);
  for (const OutlineTable& table : outline.tables) {
    std::printf("table %s: %lld rows of %lld, %.0f of them touched by a step\n", table.name.c_str(),
                static_cast<long long>(table.rows), static_cast<long long>(table.width), table.rows_per_step);
  }
  const std::string how = outline.source == Outline::kFlops ? "from FLOPs"
                          : outline.side_by_side > 1
                              ? "measured on " + std::to_string(outline.side_by_side) + " ranks side by side"
                              : "measured on one rank alone";
  std::printf("%s: a step of %lld tokens a rank computes for %s (%s)\n", outline.model.c_str(),
              static_cast<long long>(outline.tokens_per_rank), seconds_text(compute_seconds(outline)).c_str(),
              how.c_str());
}

}  // namespace

void keep(const OutlineCommand& command, const Outline& outline) {
  write_outline(command.file, outline);
  print(outline);
  std::printf("%s written\n", command.file.c_str());
}

std::optional<int> outline_without_torch(const std::vector<std::string>& arguments) {
  const OutlineCommand command = read_outline_flags(arguments);
  if (!command.shown.empty()) {
    print(read_outline(command.shown));
    return kOk;
  }
  if (command.flops_per_second == 0) return std::nullopt;
  const TrainOptions& train = command.options.train;
  const ModelOptions sizes = model_sizes(train, *open_data(data_options(train)).source);
  const std::int64_t tokens = command.options.sequences * sequence_length(train);
  keep(command, outline_from_flops(model_shape(train.model, sizes), tokens, command.flops_per_second));
  return kOk;
}

}  // namespace weft::cli
