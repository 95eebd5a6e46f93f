#include "transports/link_spec.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <string>
#include <system_error>

#include "weft/error.h"

namespace weft {

namespace {

struct Unit {
  std::string_view name;
  double factor;
};

constexpr std::array<Unit, 5> kBits{
    {{"bit", 1.0 / 8}, {"kbit", 1e3 / 8}, {"mbit", 1e6 / 8}, {"gbit", 1e9 / 8}, {"tbit", 1e12 / 8}}};
constexpr std::array<Unit, 6> kBytes{
    {{"B", 1}, {"kB", 1e3}, {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12}}};
constexpr std::array<Unit, 4> kTimes{{{"ns", 1e-9}, {"us", 1e-6}, {"ms", 1e-3}, {"s", 1}}};

[[noreturn]] void refuse(std::string_view text, const std::string& why) {
  throw UsageError("link '" + std::string(text) + "': " + why +
                   "; write RATE[,LATENCY], for example 1gbit,50us");
}

std::string lower_case(std::string_view text) {
  std::string out(text);
  std::ranges::transform(out, out.begin(),
                         [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; });
  return out;
}

// Splits `part` into its number and its unit.
double number_of(std::string_view text, std::string_view part, std::string_view& unit) {
  const std::size_t end = std::min(part.find_first_not_of("0123456789."), part.size());
  const std::string digits(part.substr(0, end));
  double value = 0;
  const char* const last = digits.data() + digits.size();
  const auto [rest, error] = std::from_chars(digits.data(), last, value, std::chars_format::fixed);
  if (digits.empty() || error != std::errc() || rest != last || !std::isfinite(value)) {
    refuse(text, "'" + std::string(part) + "' does not start with a number");
  }
  unit = part.substr(end);
  return value;
}

template <std::size_t N>
const Unit* find(const std::array<Unit, N>& units, std::string_view name) {
  const auto at = std::ranges::find(units, name, &Unit::name);
  return at == units.end() ? nullptr : &*at;
}

}  // namespace

LinkSpec parse_link(std::string_view text) {
  const std::size_t comma = text.find(',');
  const std::string_view rate = text.substr(0, comma);
  if (rate.empty()) refuse(text, "the rate is missing");
  std::string_view unit;
  LinkSpec spec;
  const double amount = number_of(text, rate, unit);
  const Unit* found = find(kBytes, unit);
  if (found == nullptr) found = find(kBits, lower_case(unit));
  if (found == nullptr) {
    refuse(text, "unknown unit '" + std::string(unit) +
                     "' of a rate (bit, kbit, mbit, gbit, tbit, B, kB, MB, GB, TB)");
  }
  spec.bytes_per_second = amount * found->factor;
  if (!(spec.bytes_per_second > 0) || !std::isfinite(spec.bytes_per_second))
    refuse(text, "the rate must be positive");
  if (comma == std::string_view::npos) return spec;

  const double length = number_of(text, text.substr(comma + 1), unit);
  const Unit* time = find(kTimes, unit);
  if (time == nullptr) refuse(text, "unknown unit '" + std::string(unit) + "' of a latency (ns, us, ms, s)");
  spec.latency_seconds = length * time->factor;
  if (!(spec.latency_seconds < 3600)) refuse(text, "the latency must be below an hour");
  return spec;
}

double parse_scale_up(std::string_view text, const LinkSpec& link) {
  if (!text.ends_with('x')) return parse_link(text).bytes_per_second;
  std::string_view rest;
  const double times = number_of(text, text, rest);
  const double rate = times * link.bytes_per_second;
  if (rest != "x" || !(rate > 0) || !std::isfinite(rate))
    refuse(text, "so many times the link is a positive number and x, for example 10x");
  return rate;
}

}  // namespace weft
