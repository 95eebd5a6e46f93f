// The folder of a comparison: every point as soon as it is measured, so that the same command goes on where
// it was stopped.
//
//   config.toml    the settings (what --config reads): first which points are wanted, then what all have in
//                  common, which a second call must not change
//   points.jsonl   one object a point
//   outline.json   of emulated computation
//   compare.html, *.svg
#pragma once

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "compare_options.h"
#include "compare_point.h"

namespace weft::cli {

class CompareFolder {
 public:
  // Makes it, or reads the points that are there. Throws UsageError for a folder with something else in it.
  explicit CompareFolder(const CompareCommand& command);

  const std::vector<Point>& points() const { return points_; }
  bool has(const std::string& scheme, const std::string& link) const;
  void add(Point point);  // on disk when it returns

 private:
  std::filesystem::path folder_;
  std::vector<Point> points_;
};

}  // namespace weft::cli
