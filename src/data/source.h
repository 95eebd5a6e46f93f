// Where token ids come from: a long row of them that can be read anywhere.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace weft {

class DataSource {
 public:
  DataSource() = default;
  virtual ~DataSource() = default;
  DataSource(const DataSource&) = delete;
  DataSource& operator=(const DataSource&) = delete;

  virtual std::int64_t vocabulary() const = 0;  // ids are in [0, vocabulary)
  virtual std::int64_t tokens() const = 0;
  // Tokens [first, first + out.size()). Any thread. REQUIRES: they exist. Throws UsageError for a file that
  // holds an id outside the vocabulary.
  virtual void read(std::int64_t first, std::span<std::int64_t> out) const = 0;
  virtual std::string description() const = 0;  // for people: "2.4 MB of text in 43 files, ..."
};

}  // namespace weft
