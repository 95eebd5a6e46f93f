#include "base/units.h"

#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>

#include "weft/error.h"

namespace weft {

namespace {

struct Unit {
  std::string_view name;
  double factor;
};

constexpr std::array<Unit, 7> kBytes{{{"B", 1},
                                      {"KiB", 1024.0},
                                      {"MiB", 1048576.0},
                                      {"GiB", 1073741824.0},
                                      {"KB", 1e3},
                                      {"MB", 1e6},
                                      {"GB", 1e9}}};
constexpr std::array<Unit, 5> kSeconds{{{"ns", 1e-9}, {"us", 1e-6}, {"ms", 1e-3}, {"s", 1}, {"min", 60}}};

[[noreturn]] void refuse(std::string_view text, std::string_view wanted) {
  throw UsageError("'" + std::string(text) + "' is not " + std::string(wanted));
}

// The number in front and the unit behind it.
double split(std::string_view text, std::string_view& unit, std::string_view wanted) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || !std::isfinite(number) || number < 0) refuse(text, wanted);
  unit = text.substr(static_cast<std::size_t>(end - text.data()));
  while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  return number;
}

}  // namespace

std::size_t parse_bytes(std::string_view text) {
  constexpr std::string_view wanted = "a size (write for example 8192, 64KiB, 4MiB or 10MB)";
  std::string_view unit;
  const double number = split(text, unit, wanted);
  if (unit.empty()) unit = "B";
  for (const Unit& u : kBytes) {
    if (u.name != unit) continue;
    const double bytes = number * u.factor;
    if (bytes > 9.0e18 || bytes != std::floor(bytes)) refuse(text, wanted);
    return static_cast<std::size_t>(bytes);
  }
  refuse(text, wanted);
}

Time parse_duration(std::string_view text) {
  constexpr std::string_view wanted = "a duration (write for example 200us, 50ms, 1.5s, 2min or never)";
  if (text == "never") return kNever;
  std::string_view unit;
  const double number = split(text, unit, wanted);
  for (const Unit& u : kSeconds) {
    if (u.name == unit) return from_seconds(number * u.factor);
  }
  refuse(text, wanted);
}

long long parse_integer(std::string_view text, long long low, long long high) {
  long long value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < low || value > high) {
    refuse(text, "a whole number from " + std::to_string(low) + " to " + std::to_string(high));
  }
  return value;
}

std::string bytes_text(std::size_t bytes) {
  static constexpr std::array<std::string_view, 4> names{"B", "KiB", "MiB", "GiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < names.size()) {
    value /= 1024;
    ++unit;
  }
  char text[48];
  std::snprintf(text, sizeof text, "%.4g %s", value, std::string(names[unit]).c_str());
  return text;
}

std::string duration_text(Time duration) {
  if (duration == kNever) return "never";
  const double s = seconds(duration);
  const Unit* best = &kSeconds[0];
  for (const Unit& u : kSeconds) {
    if (u.factor <= 1 && s >= u.factor) best = &u;
  }
  char text[48];
  std::snprintf(text, sizeof text, "%.4g %s", s / best->factor, std::string(best->name).c_str());
  return text;
}

}  // namespace weft
