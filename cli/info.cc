// weft info: what this weft is and everything that can be set or chosen.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "collectives/registry.h"
#include "data_parallel/schemes.h"
#include "embedding/ways.h"
#include "experts/policies.h"
#include "measure/text.h"
#include "verbs.h"
#include "weft/config.h"
#include "wire/crc32c.h"

namespace weft::cli {

namespace {

using Json = nlohmann::ordered_json;

Json build() {
  Json transports = Json::array({"threads", "sim"});
  if (WEFT_HAVE_TCP != 0) transports.push_back("tcp");
  if (WEFT_HAVE_MPI != 0) transports.push_back("mpi");
  return {{"version", WEFT_VERSION},
          {"compiler", WEFT_COMPILER},
          {"build_type", WEFT_BUILD_TYPE},
          {"transports", transports},
          {"simd", WEFT_HAVE_HIGHWAY != 0 ? "Highway" : "plain kernels"},
          {"crc32c", wire::crc32c_is_hardware() ? "hardware" : "table"},
          {"cores", std::thread::hardware_concurrency()}};
}

Json knobs() {
  Json rows = Json::array();
  for (const KnobRow& knob : describe(Config::from_environment())) {
    rows.push_back({{"variable", knob.variable},
                    {"value", knob.value},
                    {"default", knob.fallback},
                    {"unit", knob.unit},
                    {"meaning", knob.meaning}});
  }
  return rows;
}

Json table() {
  Json rows = Json::array();
  for (const Family family : kFamilies) {
    for (const Algorithm& row : algorithms(family)) {
      rows.push_back({{"family", name_of(family)}, {"algorithm", row.name}, {"summary", row.summary}});
    }
  }
  return rows;
}

std::string knobs_of(const Scheme& scheme) {
  std::string text;
  for (const SchemeKnob& knob : scheme_knobs()) {
    if (knob.applies(scheme)) text += (text.empty() ? "" : ", ") + std::string(knob.name);
  }
  return text;
}

Json way_table() {
  Json rows = Json::array();
  for (const TableWay& way : table_ways()) rows.push_back({{"way", way.name}, {"summary", way.summary}});
  return rows;
}

Json policy_table() {
  Json rows = Json::array();
  for (const ExpertPolicy& policy : kExpertPolicies)
    rows.push_back({{"policy", policy.name}, {"summary", policy.summary}});
  return rows;
}

Json scheme_table() {
  Json rows = Json::array();
  for (const Scheme& scheme : schemes()) {
    rows.push_back({{"scheme", scheme.name}, {"summary", scheme.summary}, {"options", knobs_of(scheme)}});
  }
  return rows;
}

std::string text_of(const Json& value) { return value.is_string() ? value.get<std::string>() : value.dump(); }

std::string joined(const Json& list) {
  std::string text;
  for (const Json& item : list) text += (text.empty() ? "" : ", ") + text_of(item);
  return text;
}

// Columns as wide as their longest cell; the last one as it comes.
void print_rows(const Json& rows, const std::vector<std::string>& columns) {
  std::vector<int> widths;
  for (const std::string& column : columns) {
    std::size_t width = column.size();
    for (const Json& row : rows) width = std::max(width, text_of(row[column]).size());
    widths.push_back(-static_cast<int>(width) - 2);
  }
  const auto line = [&](const auto& cell) {
    std::string text = "  ";
    for (std::size_t i = 0; i < columns.size(); ++i) {
      text += i + 1 < columns.size() ? padded(cell(columns[i]), widths[i]) : cell(columns[i]);
    }
    std::puts(text.c_str());
  };
  line([](const std::string& column) { return column; });
  for (const Json& row : rows) {
    line([&row](const std::string& column) { return text_of(row[column]); });
  }
}

int info(bool json) {
  const Json all = {{"build", build()},          {"settings", knobs()},   {"algorithms", table()},
                    {"schemes", scheme_table()}, {"tables", way_table()}, {"policies", policy_table()}};
  if (json) {
    std::puts(all.dump(2).c_str());
    return kOk;
  }
  for (const auto& [name, value] : all["build"].items()) {
    std::printf("%s%s\n", padded(name, -12).c_str(),
                (value.is_array() ? joined(value) : text_of(value)).c_str());
  }
  std::puts("\nSettings: environment variables; none changes a result");
  print_rows(all["settings"], {"variable", "value", "default", "unit", "meaning"});
  std::puts("\nAlgorithms: docs/algorithms.md");
  print_rows(all["algorithms"], {"family", "algorithm", "summary"});
  std::puts("\nSchemes of weft train, with the options that each takes (weft train --help)");
  print_rows(all["schemes"], {"scheme", "summary", "options"});
  std::puts("\nWays of embedding tables (weft bench embedding)");
  print_rows(all["tables"], {"way", "summary"});
  std::puts("\nPolicies of experts (weft compare --model gpt-moe --policies)");
  print_rows(all["policies"], {"policy", "summary"});
  return kOk;
}

}  // namespace

Run add_info(CLI::App& app) {
  CLI::App* verb = app.add_subcommand("info", "build, transports, every setting, algorithm and scheme");
  const auto json = std::make_shared<bool>(false);
  verb->add_flag("--json", *json, "one JSON object");
  verb->footer("Example: weft info --json | jq .settings");
  return [json](const Invocation&) { return info(*json); };
}

}  // namespace weft::cli
