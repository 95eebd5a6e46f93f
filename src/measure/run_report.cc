#include "measure/run_report.h"

#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "data_parallel/schemes.h"
#include "measure/files.h"
#include "weft/error.h"

namespace weft {

namespace {

using Json = nlohmann::ordered_json;

constexpr double kPlainEvery = 5;  // seconds
constexpr double kForget = 0.9;    // weight of the steps before in the rates that are shown

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <class... T>
std::string form(const char* format, T... values) {
  std::array<char, 256> text{};
  std::snprintf(text.data(), text.size(), format, values...);
  return text.data();
}

// JSON has no infinity.
Json number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

template <class T>
Json if_known(const std::optional<T>& value) {
  return value ? Json(*value) : Json(nullptr);
}

std::string count_text(double count) {
  if (count >= 1e6) return form("%.1f M", count / 1e6);
  if (count >= 1e4) return form("%.1f k", count / 1e3);
  return form("%.0f", count);
}

std::string duration_text(double seconds) {
  const auto whole = std::llround(seconds);
  if (whole >= 3600) return form("%lld:%02lld:%02lld", whole / 3600, whole / 60 % 60, whole % 60);
  return form("%lld:%02lld", whole / 60, whole % 60);
}

// Leaves the records of steps below `first_step`: the others will come again.
void cut_metrics(const std::filesystem::path& folder, std::int64_t first_step) {
  std::ifstream file(folder / "metrics.jsonl");
  std::string kept;
  for (std::string line; std::getline(file, line);) {
    const nlohmann::json row = nlohmann::json::parse(line, nullptr, false);
    if (!row.is_object() || !row.contains("step") || !row["step"].is_number_integer()) continue;  // torn
    if (row["step"].get<std::int64_t>() < first_step) kept += line + "\n";
  }
  write_file(folder / "metrics.jsonl", kept);
}

}  // namespace

RunReport::RunReport(const TrainOptions& options, ReportOptions report)
    : options_(options), report_(std::move(report)), progress_(true), terminal_(isatty(STDERR_FILENO) != 0) {}

void RunReport::started(const TrainStart& start) {
  start_ = start;
  write_file(report_.folder / "config.toml", report_.config);
  cut_metrics(report_.folder, start.first_step);
  metrics_.open(report_.folder / "metrics.jsonl", std::ios::app);
  for (const std::string& note : start.notes) std::fprintf(stderr, "weft: note: %s\n", note.c_str());
  const std::string density =
      find_scheme(options_.scheme.name).selects ? form(" at density %g", options_.scheme.density) : "";
  std::printf("%s, %s parameters, %s%s, %d %s over %s%s%s\n", options_.model.c_str(),
              count_text(static_cast<double>(start.parameters)).c_str(), options_.scheme.name.c_str(),
              density.c_str(), report_.ranks, report_.ranks == 1 ? "rank" : "ranks",
              report_.transport.c_str(),
              report_.compute == "real" ? "" : (", " + report_.compute + " computation").c_str(),
              report_.oversubscribed ? " (oversubscribed: more ranks than cores)" : "");
  std::printf("%s\n", start.data.c_str());
  if (const std::string why = why_updates_wait(options_); !why.empty())
    std::printf("updates wait for all results of a step: %s\n", why.c_str());
  if (start.first_step > 0)
    std::printf("resumed behind step %lld\n", static_cast<long long>(start.first_step));
  std::fflush(stdout);
  began_ = said_ = now();
}

void RunReport::step(const StepRecord& r) {
  Json row{{"step", r.step},
           {"epoch", r.epoch},
           {"loss", report_.compute == "real" ? number(r.loss) : Json(nullptr)},
           {"lr", r.lr},
           {"density", r.density},
           {"tokens", r.tokens},
           {"seconds", r.seconds},
           {"waited_seconds", r.waited_seconds},
           {"payload_bytes", r.payload_bytes}};
  if (options_.clip_norm > 0) row["gradient_norm"] = number(r.gradient_norm);
  if (!r.expert_load.empty()) row["expert_load"] = r.expert_load;
  if (!r.skipped.empty()) row["skipped"] = r.skipped;
  if (r.packing > 0) row["packing"] = r.packing;
  errno = 0;
  metrics_ << row.dump() << "\n" << std::flush;
  if (!metrics_) {
    throw Error("'" + (report_.folder / "metrics.jsonl").string() +
                "' cannot be written: " + std::strerror(errno));
  }
  sent_ += r.payload_bytes;
  seconds_ = kForget * seconds_ + r.seconds;
  waited_ = kForget * waited_ + r.waited_seconds;
  tokens_ = kForget * tokens_ + static_cast<double>(r.tokens);
  const bool last = r.step + 1 == options_.steps;
  if (terminal_ && !last) return progress_.show(bar(r));
  if (!last && r.step != start_.first_step && now() - said_ < kPlainEvery) return;
  said_ = now();
  progress_.clear();
  std::printf("%s\n", line(r).c_str());
  std::fflush(stdout);
}

std::string RunReport::line(const StepRecord& r) const {
  const auto done = static_cast<double>(r.step + 1 - start_.first_step);
  const double left = (now() - began_) / done * static_cast<double>(options_.steps - r.step - 1);
  const std::string loss = report_.compute == "real" ? form("loss %.4f", r.loss) : report_.compute;
  return form("step %lld/%lld  %s  %s tokens/s  %2.0f %% waiting  %s sent  %s left",
              static_cast<long long>(r.step) + 1, static_cast<long long>(options_.steps), loss.c_str(),
              count_text(seconds_ > 0 ? tokens_ / seconds_ : 0).c_str(),
              seconds_ > 0 ? 100 * waited_ / seconds_ : 0, size_text(static_cast<double>(sent_)).c_str(),
              duration_text(left).c_str()) +
         (r.skipped.empty() ? "" : "  (skipped)");
}

std::string RunReport::bar(const StepRecord& r) const {
  constexpr int kWidth = 20;
  const auto filled = static_cast<int>(kWidth * (r.step + 1) / options_.steps);
  return "[" + std::string(static_cast<std::size_t>(filled), '=') +
         std::string(static_cast<std::size_t>(kWidth - filled), ' ') + "] " + line(r);
}

void RunReport::checkpoint(std::int64_t steps_done) {
  if (!terminal_) return;
  progress_.show("checkpoint behind step " + std::to_string(steps_done));
}

void RunReport::packing(const PackingChange& c) {
  progress_.clear();
  std::printf(
      "packing %d behind step %lld: %s%s\n", c.packing, static_cast<long long>(c.steps), c.why.c_str(),
      c.bytes == 0 ? "" : ("; " + size_text(static_cast<double>(c.bytes)) + " came to a rank").c_str());
  std::fflush(stdout);
}

void RunReport::finish(const TrainSummary& s) {
  progress_.clear();
  if (s.steps == 0) {
    std::printf("nothing left to do: the run has all its %lld steps (--steps N goes on)\n",
                static_cast<long long>(start_.first_step));
    return;
  }
  const bool real = report_.compute == "real";
  Json packings = Json::array();
  for (const PackingChange& c : s.packings) {
    packings.push_back({{"steps", c.steps},
                        {"packing", c.packing},
                        {"moved_bytes", c.bytes},
                        {"move_seconds", c.seconds},
                        {"why", c.why}});
  }
  const Json summary{{"model", options_.model},
                     {"parameters", start_.parameters},
                     {"scheme", options_.scheme.name},
                     {"density", options_.scheme.density},
                     {"updates_wait_because", why_updates_wait(options_)},
                     {"transport", report_.transport},
                     {"ranks", report_.ranks},
                     {"compute", report_.compute},
                     {"oversubscribed", report_.oversubscribed},
                     {"first_step", s.first_step},
                     {"steps", s.steps},
                     {"skipped_steps", s.skipped},
                     {"first_loss", real ? number(s.first_loss) : Json(nullptr)},
                     {"final_loss", real ? number(s.last_loss) : Json(nullptr)},
                     {"seconds", s.seconds},
                     {"tokens_per_second", s.tokens_per_second},
                     {"step_seconds_median", s.step_seconds_median},
                     {"predicted_step_seconds", if_known(s.predicted_step_seconds)},
                     {"exposed_seconds", if_known(s.exposed_seconds)},
                     {"predicted_exposed_seconds", if_known(s.predicted_exposed_seconds)},
                     {"not_predicted_because", s.not_predicted},
                     {"step_seconds", s.step_seconds},
                     {"waiting_share", s.waiting_share},
                     {"hidden_share", if_known(s.hidden_share)},
                     {"payload_bytes_per_step", s.payload_bytes_per_step},
                     {"formula_bytes_per_step", s.formula_bytes_per_step},
                     {"wire_bytes", if_known(s.wire_bytes)},
                     {"packings", packings},
                     {"notes", s.notes},
                     {"checkpoint_step", s.checkpoint_step >= 0 ? Json(s.checkpoint_step) : Json(nullptr)}};
  write_file(report_.folder / "summary.json", summary.dump(2) + "\n");
  if (real)
    std::printf("loss %.4f -> %.4f in %lld steps, %s of training\n", s.first_loss, s.last_loss,
                static_cast<long long>(s.steps), seconds_text(s.seconds).c_str());
  std::printf("%s tokens/s, %s a step (median%s), %.0f %% of it waiting for communication\n",
              count_text(s.tokens_per_second).c_str(), seconds_text(s.step_seconds_median).c_str(),
              report_.transport == "sim" ? ", simulated"
              : real                     ? ""
                                         : ", emulated",
              100 * s.waiting_share);
  if (s.predicted_step_seconds) {
    std::printf("the plan predicts %s a step, %s of it exposed (measured: %s and %s)\n",
                seconds_text(*s.predicted_step_seconds).c_str(),
                seconds_text(*s.predicted_exposed_seconds).c_str(),
                seconds_text(s.step_seconds_median).c_str(), seconds_text(*s.exposed_seconds).c_str());
  } else if (!s.not_predicted.empty()) {
    std::printf("no prediction: %s\n", s.not_predicted.c_str());
  }
  for (const std::string& note : s.notes) std::printf("note: %s\n", note.c_str());
  std::printf("sent: %s a step from the busiest rank (formula: %s)\n",
              size_text(s.payload_bytes_per_step).c_str(), size_text(s.formula_bytes_per_step).c_str());
  std::printf("%s\n", report_.folder.string().c_str());
}

}  // namespace weft
