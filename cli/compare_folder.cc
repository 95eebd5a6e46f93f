#include "compare_folder.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>
#include <utility>

#include "run_folder.h"
#include "weft/error.h"

namespace weft::cli {

namespace {

namespace fs = std::filesystem;

std::string key_of(const std::string& line) { return line.substr(0, line.find(" = ")); }

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The settings that the folder's points have in common: all but those that select points.
std::vector<std::string> common(const std::string& config) {
  std::vector<std::string> lines;
  for (const std::string& line : lines_of(config)) {
    const std::string key = key_of(line);
    if (key != "schemes" && key != "try-buckets" && key != "link" && key != "sweep") lines.push_back(line);
  }
  return lines;
}

void require_equal(const fs::path& folder, const std::string& there, const std::string& here) {
  const std::vector<std::string> old_lines = common(there), new_lines = lines_of(here);
  if (old_lines == new_lines) return;
  const auto missing = [](const std::vector<std::string>& from, const std::vector<std::string>& in) {
    for (const std::string& line : from) {
      if (std::find(in.begin(), in.end(), line) == in.end()) return line;
    }
    return std::string("nothing");
  };
  throw UsageError("'" + folder.string() + "' has a comparison with other settings (" +
                   missing(old_lines, new_lines) + " there, " + missing(new_lines, old_lines) +
                   " here): --out names another folder");
}

}  // namespace

CompareFolder::CompareFolder(const CompareCommand& command) : folder_(command.folder) {
  std::error_code error;
  const fs::path config = folder_ / "config.toml";
  if (fs::exists(folder_ / "metrics.jsonl", error))
    throw UsageError("'" + folder_.string() + "' has a run of weft train; --out names another folder");
  if (fs::exists(config, error)) require_equal(folder_, read(config), command.settings);
  fs::create_directories(folder_, error);
  if (error) throw UsageError("'" + folder_.string() + "' cannot be made: " + error.message());
  write_file(config, command.selection + command.settings);
  std::string kept;
  for (const std::string& line : lines_of(read(folder_ / "points.jsonl"))) {
    if (std::optional<Point> point = point_from(line)) {
      points_.push_back(std::move(*point));
      kept += line + "\n";
    }
  }
  write_file(folder_ / "points.jsonl", kept);  // without a torn line, behind which nothing could be added
}

bool CompareFolder::has(const std::string& scheme, const std::string& link) const {
  return std::any_of(points_.begin(), points_.end(),
                     [&](const Point& p) { return p.scheme == scheme && p.link == link; });
}

void CompareFolder::add(Point point) {
  errno = 0;
  std::ofstream file(folder_ / "points.jsonl", std::ios::app);
  file << to_json(point).dump() << "\n";
  file.close();
  if (!file) {
    throw Error("'" + (folder_ / "points.jsonl").string() + "' cannot be written: " + std::strerror(errno));
  }
  points_.push_back(std::move(point));
}

}  // namespace weft::cli
