#include "measure/text.h"

#include <unistd.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>

namespace weft {

namespace {

// Three digits that say something, no trailing zeros after a point.
std::string digits(double value) {
  std::array<char, 64> text{};
  const int places = std::abs(value) >= 99.95 ? 0 : std::abs(value) >= 9.995 ? 1 : 2;
  std::snprintf(text.data(), text.size(), "%.*f", places, value);
  std::string result = text.data();
  if (places > 0) {
    while (result.back() == '0') result.pop_back();
    if (result.back() == '.') result.pop_back();
  }
  return result;
}

}  // namespace

std::string number_text(const char* form, double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), form, value);
  return text.data();
}

std::string seconds_text(double seconds) {
  if (!std::isfinite(seconds)) return "-";
  if (seconds < 1e-6) return digits(seconds * 1e9) + " ns";
  if (seconds < 1e-3) return digits(seconds * 1e6) + " us";
  if (seconds < 1) return digits(seconds * 1e3) + " ms";
  return digits(seconds) + " s";
}

std::string size_text(double bytes) {
  constexpr std::array<const char*, 5> units{" B", " KiB", " MiB", " GiB", " TiB"};
  std::size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < units.size()) {
    bytes /= 1024;
    ++unit;
  }
  return digits(bytes) + units[unit];
}

std::string rate_text(double bytes_per_second) {
  if (!std::isfinite(bytes_per_second)) return "-";
  if (bytes_per_second < 1e6) return digits(bytes_per_second / 1e3) + " kB/s";
  if (bytes_per_second < 1e9) return digits(bytes_per_second / 1e6) + " MB/s";
  return digits(bytes_per_second / 1e9) + " GB/s";
}

std::string link_text(double bytes_per_second) {
  const double bits = 8 * bytes_per_second;
  if (bits < 1e6) return digits(bits / 1e3) + " kbit/s";
  if (bits < 1e9) return digits(bits / 1e6) + " Mbit/s";
  return digits(bits / 1e9) + " Gbit/s";
}

std::string flops_text(double flops_per_second) {
  constexpr std::array<const char*, 5> units{" MFLOP/s", " GFLOP/s", " TFLOP/s", " PFLOP/s", " EFLOP/s"};
  double rate = flops_per_second / 1e6;
  std::size_t unit = 0;
  for (; rate >= 1000 && unit + 1 < units.size(); ++unit) rate /= 1000;
  return digits(rate) + units[unit];
}

std::string padded(const std::string& text, int width) {
  const auto wanted = static_cast<std::size_t>(std::abs(width));
  if (text.size() >= wanted) return text;
  const std::string space(wanted - text.size(), ' ');
  return width < 0 ? text + space : space + text;
}

Progress::Progress(bool wanted) : terminal_(wanted && isatty(STDERR_FILENO) != 0) {}

void Progress::show(const std::string& line) {
  if (!terminal_) return;
  std::fprintf(stderr, "\r\033[K%s", line.c_str());
  std::fflush(stderr);
  shown_ = true;
}

void Progress::clear() {
  if (!shown_) return;
  std::fputs("\r\033[K", stderr);
  std::fflush(stderr);
  shown_ = false;
}

}  // namespace weft
