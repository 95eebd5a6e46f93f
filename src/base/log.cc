#include "base/log.h"

#include <cstdio>
#include <ctime>

#include "weft/error.h"

#ifndef WEFT_HAVE_SPDLOG
#define WEFT_HAVE_SPDLOG 0
#endif

#if WEFT_HAVE_SPDLOG
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>
#endif

namespace weft {

namespace {

LogLevel parse_level(std::string_view text) {
  if (text == "debug") return LogLevel::debug;
  if (text == "info") return LogLevel::info;
  if (text == "warning") return LogLevel::warning;
  if (text == "error") return LogLevel::error;
  if (text == "off") return LogLevel::off;
  throw UsageError("'" + std::string(text) + "' is no log level; use debug, info, warning, error or off");
}

}  // namespace

#if WEFT_HAVE_SPDLOG

struct Log::Sink {
  Sink(LogLevel l, int rank)
      : level(l),
        logger("rank " + std::to_string(rank), std::make_shared<spdlog::sinks::stderr_color_sink_mt>()) {
    logger.set_pattern("%H:%M:%S.%e %^%l%$ [%n] %v");
    logger.set_level(spdlog::level::trace);
    logger.flush_on(spdlog::level::trace);
  }
  void write(LogLevel l, const std::string& line) {
    static constexpr spdlog::level::level_enum levels[] = {spdlog::level::debug, spdlog::level::info,
                                                           spdlog::level::warn, spdlog::level::err};
    logger.log(levels[static_cast<int>(l)], "{}", line);
  }
  LogLevel level;
  spdlog::logger logger;
};

#else

struct Log::Sink {
  Sink(LogLevel l, int r) : level(l), rank(r) {}
  void write(LogLevel l, const std::string& line) {
    static constexpr const char* names[] = {"debug", "info", "warning", "error"};
    const std::time_t now = std::time(nullptr);
    std::tm parts{};
    localtime_r(&now, &parts);
    char at[16];
    std::strftime(at, sizeof at, "%H:%M:%S", &parts);
    std::fprintf(stderr, "%s %s [rank %d] %s\n", at, names[static_cast<int>(l)], rank, line.c_str());
  }
  LogLevel level;
  int rank;
};

#endif

Log::Log(std::string_view level, int rank) : sink_(std::make_unique<Sink>(parse_level(level), rank)) {}
Log::~Log() = default;

bool Log::enabled(LogLevel level) const { return level >= sink_->level && level != LogLevel::off; }

void Log::write(LogLevel level, const std::string& line) {
  if (enabled(level)) sink_->write(level, line);
}

}  // namespace weft
