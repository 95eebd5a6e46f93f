#include "experts/packing.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <utility>

#include "weft/error.h"

namespace weft {

namespace {

std::string milliseconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g ms", seconds * 1e3);
  return text;
}

std::string mebibytes(std::int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g MiB", static_cast<double>(bytes) / (1 << 20));
  return text;
}

}  // namespace

int wished_packing(int packing, const PackingTimes& times, double hysteresis) {
  if (times.experts < (1 - hysteresis) * times.all_to_all) return 2 * packing;
  if (times.experts > (1 + hysteresis) * 2 * times.all_to_all && packing > 1) return packing / 2;
  return packing;
}

PackingController::PackingController(PackingOptions options, std::vector<PackingChoice> choices,
                                     double all_to_alls, int now)
    : options_(options),
      choices_(std::move(choices)),
      all_to_alls_(all_to_alls),
      measured_(choices_.size(), -1) {
  const auto found = std::ranges::find(choices_, now, &PackingChoice::packing);
  if (found == choices_.end())
    throw UsageError("experts: there is no packing " + std::to_string(now) + " of these ranks");
  at_ = static_cast<std::size_t>(found - choices_.begin());
  if (options_.memory > 0 && choices_[at_].bytes > options_.memory)
    throw UsageError("experts: with packing " + std::to_string(now) + " they take " +
                     mebibytes(choices_[at_].bytes) + " of a rank's memory, more than the " +
                     mebibytes(options_.memory) + " of packing-memory");
}

bool PackingController::due(std::int64_t steps) const {
  return choices_.size() > 1 && steps >= options_.first_step &&
         (steps - options_.first_step) % options_.every == 0;
}

double PackingController::all_to_all_at(std::size_t choice) const {
  if (measured_[choice] >= 0) return measured_[choice];
  const double here = choices_[at_].all_to_all, scale = here > 0 ? measured_[at_] / here : 1;
  return scale * choices_[choice].all_to_all;
}

double PackingController::cost_of(std::size_t choice) const {
  return all_to_alls_ * all_to_all_at(choice) + choices_[choice].sums;
}

PackingController::Decision PackingController::decide(const PackingTimes& times) {
  // What is above the figures is other traffic on the way, and peers that are late: fewer rows do not save it.
  measured_[at_] = std::min(times.all_to_all, choices_[at_].all_to_all);
  const std::string seen = "experts of a slice take " + milliseconds(times.experts) + ", its all-to-all " +
                           milliseconds(times.all_to_all);
  Decision out{.packing = packing(), .why = seen};
  // Step 1
  const int wished = wished_packing(packing(), times, options_.hysteresis);
  const bool more = wished > packing();
  if (wished == packing() || (more && at_ + 1 == choices_.size())) return out;
  const std::size_t next = more ? at_ + 1 : at_ - 1;
  // Step 2
  const double saved = cost_of(at_) - cost_of(next);
  const double move = choices_[std::max(at_, next)].move;
  if (options_.costs && !(saved * options_.horizon > move)) {
    out.why += "; packing " + std::to_string(wished) + " would save " + milliseconds(saved) +
               " a step, and the move takes " + milliseconds(move);
    return out;
  }
  // Step 3
  if (options_.memory > 0 && choices_[next].bytes > options_.memory) {
    out.why += "; packing " + std::to_string(wished) + " would take " + mebibytes(choices_[next].bytes) +
               " of a rank's memory, more than the " + mebibytes(options_.memory) + " of packing-memory";
    out.tells = !std::exchange(refused_, true);
    return out;
  }
  at_ = next;
  out.packing = packing();
  out.why += "; it saves " + milliseconds(saved) + " a step, the move takes " + milliseconds(move);
  out.tells = true;
  return out;
}

LinkCost cost_of_group(const PackingNetwork& network, int size, int stride) {
  const int node = network.ranks_per_node;
  if (size < 2) return network.scale_up;
  // Of a rank's bytes, those to itself among them, as many go to each member.
  const int inside = stride >= node ? 1 : std::min(size, node / stride);
  if (inside == size && node > 1) return network.scale_up;
  LinkCost out = network.link;
  const double leaves = static_cast<double>(size - inside) / (size - 1);
  const double stays = static_cast<double>(inside - 1) / (size - 1);
  const double port = network.link.seconds_per_byte * node * leaves;  // which its ranks share
  out.seconds_per_byte = std::max(port, network.scale_up.seconds_per_byte * stays);
  return out;
}

double all_to_all_seconds(const PackingNetwork& network, int size, double bytes) {
  if (size < 2) return 0;
  const LinkCost cost = cost_of_group(network, size, 1);
  return cost.hop_seconds * (size - 1) + cost.seconds_per_byte * bytes * (size - 1) / size;
}

bool is_auto_packing(const std::string& text) { return text == "auto"; }

int packing_number(const std::string& text) {
  int packing = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), packing);
  if (error != std::errc() || end != text.data() + text.size() || packing < 1)
    throw UsageError("expert-packing: '" + text + "' is neither auto nor a number above 0");
  return packing;
}

int fixed_packing(const std::string& text, int ranks) {
  const int packing = packing_number(text);
  if (packing > ranks)
    throw UsageError("expert-packing: " + text + " is more than the " + std::to_string(ranks) +
                     (ranks == 1 ? " rank" : " ranks") + " that share the experts (--mesh ep=N)");
  if (ranks % packing != 0)
    throw UsageError("expert-packing: " + text + " does not divide the " + std::to_string(ranks) +
                     " ranks that share the experts (--mesh ep=N)");
  return packing;
}

}  // namespace weft
