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

using Field = std::pair<std::string_view, double LinkCost::*>;
constexpr std::array<Field, 3> kFields{{{"hop_seconds", &LinkCost::hop_seconds},
                                        {"seconds_per_byte", &LinkCost::seconds_per_byte},
                                        {"fold_seconds_per_byte", &LinkCost::fold_seconds_per_byte}}};

}  // namespace

std::string text_of(const LinkCost& figures) {
  std::string out;
  for (const auto& [name, field] : kFields) {
    std::array<char, 32> digits{};  // the shortest that read back as the same number
    char* const end = std::to_chars(digits.data(), digits.data() + digits.size(), figures.*field).ptr;
    out += (out.empty() ? "" : ",") + std::string(name) + "=" + std::string(digits.data(), end);
  }
  return out;
}

LinkCost parse_figures(std::string_view text) {
  LinkCost out;
  std::string_view rest = text;
  for (const auto& [name, field] : kFields) {
    const std::string_view part = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(part.size() + 1, rest.size()));
    double& value = out.*field;
    bool sound = part.starts_with(name) && part.substr(name.size()).starts_with('=');
    if (sound) {
      const char* const end = part.data() + part.size();
      const auto [last, error] = std::from_chars(part.data() + name.size() + 1, end, value);
      sound = error == std::errc() && last == end && std::isfinite(value) &&
              (value > 0 || (value == 0 && field == &LinkCost::fold_seconds_per_byte));
    }
    const bool is_last = field == kFields.back().second;
    if (!sound || (is_last && (!rest.empty() || text.ends_with(','))))
      throw UsageError("'" + std::string(text) + "' are no figures of a link; say for example '" +
                       text_of(LinkCost{}) + "'");
  }
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
