#include "train/auto_scheme.h"

#include <sstream>

#include "config_text.h"
#include "measure/emulated.h"

namespace weft::cli {

namespace {

constexpr std::string_view kStayDense = "stay-dense";

}  // namespace

Choice choose_for(const TrainOptions& options, int ranks, const std::optional<EmulatedLink>& link,
                  const Outline& outline, bool launched) {
  std::optional<EmulatedLink> over = link;
  if (!over && launched) {
    over = EmulatedLink{.bytes_per_second = 1 / options.planned_link.seconds_per_byte,
                        .latency_seconds = options.planned_link.hop_seconds};
  }
  const SimulationOptions simulation = simulation_of(ranks, over, measured_costs(options, ranks, outline));
  return choose_scheme(outline, emulation_of(options, ranks, outline), simulation);
}

std::string line_of(const Choice& choice) {
  return choice.scheme.name + "\n" + find_scheme_knob(kStayDense).text(choice.scheme) + "\n" + choice.why;
}

void take_line(const std::string& line, TrainOptions& options, std::string& why) {
  std::istringstream lines(line);
  std::string dense;
  std::getline(lines, options.scheme.name);
  std::getline(lines, dense);
  std::getline(lines, why);
  find_scheme_knob(kStayDense).set(options.scheme, dense);
}

std::string with_scheme(const std::string& config, const SchemeOptions& scheme) {
  std::istringstream lines(config);
  std::string out;
  const std::string dense(kStayDense);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("scheme = ") && !line.starts_with(dense + " = ")) out += line + "\n";
  }
  return out + "scheme = " + toml_string(scheme.name) + "\n" + dense + " = " +
         toml_string(find_scheme_knob(kStayDense).text(scheme)) + "\n";
}

}  // namespace weft::cli
