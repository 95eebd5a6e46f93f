#include "train/run_folder.h"

#include <array>
#include <ctime>

#include "measure/files.h"
#include "weft/error.h"

namespace weft::cli {

namespace fs = std::filesystem;

namespace {

bool has_run(const fs::path& folder) {
  std::error_code error;
  for (const char* name : {"config.toml", "metrics.jsonl", "checkpoints"}) {
    if (fs::exists(folder / name, error)) return true;
  }
  return false;
}

// The run whose checkpoint was committed last.
fs::path newest_run() {
  fs::path newest;
  fs::file_time_type when{};
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator("runs", error)) {
    std::error_code missing;
    const auto time = fs::last_write_time(entry.path() / "checkpoints" / "latest", missing);
    if (missing || (!newest.empty() && time <= when)) continue;
    newest = entry.path();
    when = time;
  }
  if (newest.empty()) {
    throw UsageError("--resume: no run in runs/ has a checkpoint; name its folder: --resume DIR");
  }
  return newest;
}

}  // namespace

RunPlace find_place(const std::string& out, bool resume_given, const std::string& resume) {
  if (!resume_given) return {.folder = out};
  if (resume == "auto") {
    if (out.empty()) throw UsageError("--resume auto needs the run's folder: --out DIR");
    return {.folder = out, .resume = TrainRun::Resume::if_there};
  }
  const bool named = resume != "-";
  if (named && !out.empty() && fs::path(out) != fs::path(resume)) {
    throw UsageError("--resume " + resume + " and --out " + out +
                     " are two folders: a run goes on where it is");
  }
  const fs::path folder = named ? fs::path(resume) : out.empty() ? newest_run() : fs::path(out);
  std::error_code error;
  if (!fs::is_directory(folder, error)) {
    throw UsageError("--resume: there is no run in '" + folder.string() + "'");
  }
  return {.folder = folder, .resume = TrainRun::Resume::last};
}

fs::path default_folder(const std::string& model, const std::string& scheme) {
  const std::time_t seconds = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&seconds, &utc);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y%m%d-%H%M%S", &utc);
  const std::string name = "runs/" + model + "-" + scheme + "-" + text.data();
  fs::path folder = name;
  std::error_code error;
  for (int other = 2; fs::exists(folder, error); ++other) folder = name + "-" + std::to_string(other);
  return folder;
}

fs::path claim_folder(const RunPlace& place, const TrainOptions& options) {
  fs::path folder = place.folder.empty() ? default_folder(options.model, options.scheme.name) : place.folder;
  if (place.resume == TrainRun::Resume::no && has_run(folder)) {
    throw UsageError("'" + folder.string() + "' has a run already; --resume " + folder.string() +
                     " goes on with it, --out names another folder");
  }
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw UsageError("'" + folder.string() + "' cannot be made: " + error.message());
  return folder;
}

std::vector<Trace> make_traces(int ranks, bool all) {
  constexpr std::size_t kFirstEvents = 4000;
  std::vector<Trace> out;
  for (int r = 0; r < ranks; ++r) out.push_back(all ? Trace() : Trace(kFirstEvents));
  return out;
}

void write_traces(const std::filesystem::path& file, std::span<const Trace> traces, int first) {
  std::vector<const Trace*> of_rank;
  for (const Trace& trace : traces) of_rank.push_back(&trace);
  write_file(file, chrome_trace(of_rank, first));
}

}  // namespace weft::cli
