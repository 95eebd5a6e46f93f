#include "measure/comparison_folder.h"

#include <algorithm>
#include <array>
#include <sstream>
#include <string_view>
#include <utility>

#include "measure/files.h"
#include "weft/error.h"

namespace weft {

namespace {

namespace fs = std::filesystem;

// Keys of config.toml that say which points are wanted.
constexpr std::array<std::string_view, 8> kSelecting{"schemes",  "variants",    "tables", "policies",
                                                     "baseline", "try-buckets", "link",   "sweep"};

std::string key_of(const std::string& line) { return line.substr(0, line.find(" = ")); }

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

// The settings that the folder's points have in common: all but those that select points.
std::vector<std::string> common(const std::string& config) {
  std::vector<std::string> lines;
  for (const std::string& line : lines_of(config)) {
    if (std::ranges::find(kSelecting, key_of(line)) == kSelecting.end()) lines.push_back(line);
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

ComparisonFolder::ComparisonFolder(fs::path folder, const std::string& selection, const std::string& settings)
    : folder_(std::move(folder)) {
  std::error_code error;
  const fs::path config = folder_ / "config.toml";
  if (fs::exists(folder_ / "metrics.jsonl", error))
    throw UsageError("'" + folder_.string() + "' has a run of weft train; --out names another folder");
  if (fs::exists(config, error)) require_equal(folder_, read_file(config), settings);
  fs::create_directories(folder_, error);
  if (error) throw UsageError("'" + folder_.string() + "' cannot be made: " + error.message());
  write_file(config, selection + settings);
  std::string kept;
  for (const std::string& line : lines_of(read_file(folder_ / "points.jsonl"))) {
    if (std::optional<Point> point = point_from(line)) {
      points_.push_back(std::move(*point));
      kept += line + "\n";
    }
  }
  write_file(folder_ / "points.jsonl", kept);  // without a torn line, behind which nothing could be added
}

bool ComparisonFolder::has(const std::string& variant, const std::string& link) const {
  return std::any_of(points_.begin(), points_.end(),
                     [&](const Point& p) { return p.variant == variant && p.link == link; });
}

void ComparisonFolder::add(Point point) {
  append_line(folder_ / "points.jsonl", to_json(point).dump());
  points_.push_back(std::move(point));
}

}  // namespace weft
