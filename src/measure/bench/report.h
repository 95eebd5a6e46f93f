// What `weft bench` prints: one JSON object a line, or a table that grows line by line.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "measure/bench/case.h"
#include "measure/text.h"

namespace weft {

using Json = nlohmann::ordered_json;

// A case, measured.
struct Measured {
  const Algorithm* algorithm = nullptr;  // that ran
  bool chosen_by_auto = false;           // `auto` takes this one here
  std::vector<double> seconds;           // of each iteration: its slowest rank
  std::uint64_t payload_bytes = 0;       // payload that the busiest rank sent for one operation
  int rounds = 0;                        // hops that the busiest rank took part in
  std::size_t micro_op_bytes = 0;
  int node_size = 1;  // of the world
  bool correct = false;
};

// Open MPI's best for a size.
struct MpiBest {
  std::size_t bytes = 0;
  std::string algorithm;
  double seconds_median = 0, seconds_p99 = 0;
  bool correct = false;
};

// Only the rank that prints has one. What is added appears at once.
class BenchReport {
 public:
  explicit BenchReport(const BenchOptions& options, std::string transport);
  ~BenchReport() { finish(); }
  BenchReport(const BenchReport&) = delete;
  BenchReport& operator=(const BenchReport&) = delete;

  void add(const BenchCase& c, const Measured& m);
  void add_mpi(const std::vector<MpiBest>& best, Family family);  // before the cases
  // Families with fields of their own; where it was measured stands before the first, unless `anywhere`.
  void add_object(const Json& object, const std::vector<std::string>& lines, bool anywhere = false);
  void progress(const std::string& what) { progress_.show(what); }
  void finish();  // the line under the table

  bool all_correct() const { return all_correct_; }

 private:
  void print_head();
  const MpiBest* mpi_for(const BenchCase& c) const;
  void print_row(const std::vector<std::string>& cells);
  Json object(const BenchCase& c, const Measured& m) const;

  BenchOptions options_;
  std::string transport_;
  Progress progress_;
  std::vector<MpiBest> mpi_;
  bool all_correct_ = true;
  bool head_ = false;
  bool object_head_ = false;
  bool marked_ = false;  // a row with a star
};

}  // namespace weft
