#include "world/figures.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "weft/error.h"

namespace weft {

namespace {

namespace fs = std::filesystem;

// With nodes all of them; else the first kOneLevel.
constexpr std::array<std::string_view, 6> kNames{"hop_seconds",           "seconds_per_byte",
                                                 "fold_seconds_per_byte", "node_ranks",
                                                 "scale_up_hop_seconds",  "scale_up_seconds_per_byte"};
constexpr std::size_t kOneLevel = 3, kFold = 2, kNodeRanks = 3;
using Values = std::array<double, kNames.size()>;

bool can_be(const Values& values, std::size_t i) {
  if (i == kNodeRanks) return values[i] >= 2 && values[i] <= 1e6 && values[i] == std::floor(values[i]);
  return values[i] > 0 || (values[i] == 0 && i == kFold);
}

}  // namespace

std::string text_of(const LinkCost& figures) {
  const LinkCost inside = figures.inside();
  const Values values{figures.hop_seconds,
                      figures.seconds_per_byte,
                      figures.fold_seconds_per_byte,
                      static_cast<double>(figures.node_ranks),
                      inside.hop_seconds,
                      inside.seconds_per_byte};
  std::string out;
  for (std::size_t i = 0; i < (figures.node_ranks > 1 ? values.size() : kOneLevel); ++i) {
    std::array<char, 32> digits{};  // the shortest that read back as the same number
    char* const end = std::to_chars(digits.data(), digits.data() + digits.size(), values[i]).ptr;
    out += (out.empty() ? "" : ",") + std::string(kNames[i]) + "=" + std::string(digits.data(), end);
  }
  return out;
}

LinkCost parse_figures(std::string_view text) {
  Values values{};
  std::string_view rest = text;
  std::size_t read = 0;
  bool sound = !text.ends_with(',');
  for (; sound && read < values.size() && (read < kOneLevel || !rest.empty()); ++read) {
    const std::string_view part = rest.substr(0, rest.find(',')), name = kNames[read];
    rest.remove_prefix(std::min(part.size() + 1, rest.size()));
    sound = part.starts_with(name) && part.substr(name.size()).starts_with('=');
    if (!sound) break;
    const char* const end = part.data() + part.size();
    const auto [last, error] = std::from_chars(part.data() + name.size() + 1, end, values[read]);
    sound = error == std::errc() && last == end && std::isfinite(values[read]) && can_be(values, read);
  }
  if (!sound || !rest.empty() || (read != kOneLevel && read != values.size()))
    throw UsageError("'" + std::string(text) + "' are no figures of a link; say for example '" +
                     text_of(LinkCost{}) + "'");
  LinkCost out{.hop_seconds = values[0], .seconds_per_byte = values[1], .fold_seconds_per_byte = values[2]};
  if (read == kOneLevel) return out;
  out.node_ranks = static_cast<int>(values[kNodeRanks]);
  out.scale_up_hop_seconds = values[4];
  out.scale_up_seconds_per_byte = values[5];
  return out;
}

KeptFigures::KeptFigures(const std::string& text) {
  if (text.empty()) return;
  if (text.find('=') != std::string::npos) {
    try {
      known_ = parse_figures(text);
    } catch (const UsageError& error) {
      throw UsageError(std::string("WEFT_FIGURES: ") + error.what());
    }
    return;
  }
  file_ = text;
  std::error_code missing;
  if (!fs::exists(file_, missing)) return;
  std::ifstream in(file_);
  std::string line;
  try {
    if (!std::getline(in, line)) throw UsageError("it cannot be read");
    known_ = parse_figures(line);
  } catch (const UsageError& error) {
    throw UsageError("WEFT_FIGURES: the file '" + file_ + "': " + error.what());
  }
}

void KeptFigures::keep(const LinkCost& figures) const {
  if (file_.empty() || known_) return;
  const std::string part = file_ + ".part";
  std::ofstream out(part);
  out << text_of(figures) << '\n';
  out.close();
  std::error_code error;
  if (out) fs::rename(part, file_, error);
  if (!out || error) throw UsageError("WEFT_FIGURES: the file '" + file_ + "' cannot be written");
}

}  // namespace weft
