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
#include <string>
#include <vector>

#include "measure/point.h"

namespace weft {

class ComparisonFolder {
 public:
  // Makes it, or reads the points that are there. Throws UsageError for a folder with something else in it.
  // `selection`: which points are wanted; `settings`: what all have in common; as lines of config.toml.
  ComparisonFolder(std::filesystem::path folder, const std::string& selection, const std::string& settings);

  const std::vector<Point>& points() const { return points_; }
  bool has(const std::string& variant, const std::string& link) const;
  void add(Point point);  // on disk when it returns

 private:
  std::filesystem::path folder_;
  std::vector<Point> points_;
};

}  // namespace weft
