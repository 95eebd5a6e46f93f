// One line per event, with time, level and rank, on stderr. No globals: whoever logs holds the Log that its
// owner made. fmt and spdlog stay behind this file.
#pragma once

#include <memory>
#include <string>
#include <string_view>

namespace weft {

enum class LogLevel { debug, info, warning, error, off };

class Log {
 public:
  // `level` as in WEFT_LOG. Throws UsageError.
  Log(std::string_view level, int rank);
  ~Log();
  Log(const Log&) = delete;
  Log& operator=(const Log&) = delete;

  bool enabled(LogLevel level) const;
  void write(LogLevel level, const std::string& line);  // any thread
  void debug(const std::string& line) { write(LogLevel::debug, line); }
  void info(const std::string& line) { write(LogLevel::info, line); }
  void warning(const std::string& line) { write(LogLevel::warning, line); }
  void error(const std::string& line) { write(LogLevel::error, line); }

 private:
  struct Sink;
  std::unique_ptr<Sink> sink_;
};

}  // namespace weft
