#include "train/auto_scheme.h"

#include <algorithm>
#include <cstdio>
#include <sstream>
#include <utility>

#include "config_text.h"
#include "measure/emulated.h"

namespace weft::cli {

namespace {

constexpr std::string_view kScheme = "scheme", kStayDense = "stay-dense", kTables = "tables",
                           kScheduling = "tables-scheduling", kExpertSlices = "expert-slices",
                           kCompressedStages = "compressed-stages", kBackwardMessages = "backward-messages",
                           kRank = "powersgd-rank", kBackwardRank = "backward-rank",
                           kFactorRank = "factor-rank";

SimulationOptions predicted_on(const TrainOptions& options, int ranks, std::optional<EmulatedLink> link,
                               const Outline& outline, bool launched) {
  if (!link && launched) {
    link = EmulatedLink{.bytes_per_second = 1 / options.planned_link.seconds_per_byte,
                        .latency_seconds = options.planned_link.hop_seconds};
  }
  return simulation_of(ranks, link, measured_costs(options, ranks, outline));
}

}  // namespace

Choice choose_for(const TrainOptions& options, int ranks, const std::optional<EmulatedLink>& link,
                  const Outline& outline, bool launched) {
  return choose_scheme(outline, emulation_of(options, ranks, outline),
                       predicted_on(options, ranks, link, outline, launched));
}

SlicesChoice choose_slices_for(const TrainOptions& options, int ranks,
                               const std::optional<EmulatedLink>& link, const Outline& outline,
                               bool launched) {
  return choose_slices(outline, emulation_of(options, ranks, outline),
                       predicted_on(options, ranks, link, outline, launched));
}

StagesChoice choose_stages_for(const TrainOptions& options, int ranks,
                               const std::optional<EmulatedLink>& link, const Outline& outline, bool launched,
                               bool and_rank) {
  return choose_compressed_stages(outline, emulation_of(options, ranks, outline),
                                  predicted_on(options, ranks, link, outline, launched), and_rank);
}

TablesChoice choose_tables_for(const TrainOptions& options, int ranks, const Outline& outline) {
  return choose_tables(outline, options.tables, optimizer_options(options), ranks, options.seed,
                       options.planned_link);
}

MessagesChoice choose_messages_for(const TrainOptions& options, int ranks, const Outline& outline) {
  return choose_messages(outline, emulation_of(options, ranks, outline),
                         simulation_of(ranks, std::nullopt, measured_costs(options, ranks, outline)));
}

void choose(const Asked& asked, TrainOptions& options, int ranks, const std::optional<EmulatedLink>& link,
            const Outline& outline, bool launched) {
  if (asked.tables) {
    const TablesChoice choice = choose_tables_for(options, ranks, outline);
    std::fprintf(stderr, "weft: note: tables auto: %s\n", choice.why().c_str());
    options.tables = choice.tables;
  }
  if (asked.scheme) {
    const Choice choice = choose_for(options, ranks, link, outline, launched);
    std::fprintf(stderr, "weft: note: scheme auto: %s\n", choice.why.c_str());
    options.scheme = choice.scheme;
  }
  if (asked.slices) {
    const SlicesChoice choice = choose_slices_for(options, ranks, link, outline, launched);
    std::fprintf(stderr, "weft: note: expert-slices auto: %s\n", choice.why.c_str());
    options.sizes.experts.slices = choice.slices;
  }
  if (asked.stages) {
    const StagesChoice choice = choose_stages_for(options, ranks, link, outline, launched, asked.rank);
    std::fprintf(stderr, "weft: note: compressed-stages auto: %s\n", choice.why.c_str());
    choice.apply(options.scheme, options.sizes.stage, options.backward);
  }
  if (asked.messages) {
    const MessagesChoice choice = choose_messages_for(options, ranks, outline);
    std::fprintf(stderr, "weft: note: backward-messages critical: %s\n", choice.why.c_str());
    options.backward.messages = choice.messages;
  }
}

std::string lines_of(const Asked& asked, const TrainOptions& options) {
  std::string out;
  const auto add = [&out](std::string_view name, const std::string& value) {
    out += std::string(name) + "=" + value + "\n";
  };
  if (asked.scheme) {
    add(kScheme, options.scheme.name);
    add(kStayDense, find_scheme_knob(kStayDense).text(options.scheme));
  }
  if (asked.tables) {
    add(kTables, options.tables.way);
    add(kScheduling, options.tables.scheduling);
  }
  if (asked.slices) add(kExpertSlices, std::to_string(options.sizes.experts.slices));
  if (asked.stages) add(kCompressedStages, std::to_string(options.sizes.stage.compressed));
  if (asked.rank) {
    add(kRank, find_scheme_knob(kRank).text(options.scheme));
    add(kBackwardRank, std::to_string(options.backward.columns));
  }
  if (asked.messages) add(kBackwardMessages, options.backward.messages);
  return out;
}

void take_lines(const std::string& text, TrainOptions& options) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t equals = line.find('=');
    const std::string name = line.substr(0, equals), value = line.substr(equals + 1);
    if (name == kScheme) options.scheme.name = value;
    if (name == kStayDense || name == kRank) find_scheme_knob(name).set(options.scheme, value);
    if (name == kTables) options.tables.way = value;
    if (name == kScheduling) options.tables.scheduling = value;
    if (name == kExpertSlices) options.sizes.experts.slices = std::stoi(value);
    if (name == kCompressedStages) options.sizes.stage.compressed = std::stoi(value);
    if (name == kBackwardRank) options.backward.columns = std::stoi(value);
    if (name == kBackwardMessages) options.backward.messages = value;
  }
}

std::string with_choice(const std::string& config, const TrainOptions& options) {
  const int compressed = options.sizes.stage.compressed;
  const std::pair<std::string_view, std::string> chosen[] = {
      {kScheme, options.scheme.name},
      {kStayDense, find_scheme_knob(kStayDense).text(options.scheme)},
      {kTables, options.tables.way},
      {kScheduling, options.tables.scheduling},
      {kExpertSlices, std::to_string(options.sizes.experts.slices)},
      {kCompressedStages, compressed == kAllStages ? "all" : std::to_string(compressed)},
      {kRank, find_scheme_knob(kRank).text(options.scheme)},
      {kBackwardRank, std::to_string(options.backward.columns)},
      {kFactorRank, ""},
      {kBackwardMessages, options.backward.messages}};
  std::istringstream lines(config);
  std::string out;
  for (std::string line; std::getline(lines, line);) {
    const bool replaced = std::ranges::any_of(
        chosen, [&](const auto& c) { return line.starts_with(std::string(c.first) + " = "); });
    if (!replaced) out += line + "\n";
  }
  for (const auto& [name, value] : chosen) out += std::string(name) + " = " + toml_string(value) + "\n";
  return out;
}

}  // namespace weft::cli
