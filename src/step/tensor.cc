#include "step/tensor.h"

#include <algorithm>
#include <utility>

#include "patterns/blocks.h"
#include "weft/error.h"

namespace weft {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw UsageError("tensor parallel: " + what); }

void cut(ParameterShape& parameter, const TensorOptions& options) {
  std::int64_t& length = parameter.dims[static_cast<std::size_t>(parameter.cut)];
  if (length < options.ranks)
    refuse("'" + parameter.name + "' of " + std::to_string(length) + " along dimension " +
           std::to_string(parameter.cut) + " cannot be cut among " + std::to_string(options.ranks) +
           " ranks");
  const Blocks shares(options.ranks, length);
  parameter.cut_of = length;
  parameter.cut_first = shares.begin(options.rank);
  length = shares.count(options.rank);
}

// A part in pieces, and what is added up between them.
class Cutter {
 public:
  Cutter(const ModelShape& whole, const TensorOptions& options) : whole_(whole), options_(options) {}

  bool is_cut(const PartShape& part) const {
    return part.cut && (part.parameters.empty() ||
                        std::ranges::any_of(part.parameters, [this](int p) { return is_cut(p); }));
  }
  bool is_cut(int parameter) const {
    const ParameterShape& p = whole_.parameters[static_cast<std::size_t>(parameter)];
    return p.cut >= 0 && (options_.tables || !p.table);
  }

  // Appends what becomes of a part. `block`: where it goes.
  void append(const PartShape& part, int origin, int block, std::vector<PartShape>& out) {
    const std::string given = share_of(part.name);
    const bool takes = !part.takes.empty();
    const bool last = part.gives.front() == kLoss;
    PartShape before{.name = part.name + ".before", .takes = part.takes, .gives = {shared_input(part.name)}};
    PartShape product{.name = part.name, .takes = before.gives, .gives = {given}};
    PartShape behind{.name = part.name + ".behind", .takes = part.takes, .gives = part.gives};
    if (!takes) product.takes.clear();
    behind.takes.push_back(given);
    product.flops_per_token = part.flops_per_token / options_.ranks;
    const auto cuts = [this](int p) { return is_cut(p); };
    const auto first = std::ranges::find_if(part.parameters, cuts);
    const auto last_cut = std::find_if(part.parameters.rbegin(), part.parameters.rend(), cuts).base();
    for (auto at = part.parameters.begin(); at != part.parameters.end(); ++at) {
      PartShape& user = at >= last_cut ? behind : at < first && takes ? before : product;
      user.parameters.push_back(*at);
    }
    if (takes) push(before, PartRole::before, origin, out);
    const int at = push(product, PartRole::product, origin, out);
    sums.push_back({.activation = given,
                    .block = block,
                    .part = at,
                    .values = last ? kScores * options_.ranks : whole_.width,
                    .bf16 = options_.bf16 && !last});
    if (takes)
      sums.push_back({.activation = shared_input(part.name),
                      .gradient = true,
                      .block = block,
                      .part = at,
                      .values = whole_.width,
                      .bf16 = options_.bf16});
    push(behind, PartRole::behind, origin, out);
  }

  std::vector<SumShape> sums;

 private:
  static int push(PartShape& part, PartRole role, int origin, std::vector<PartShape>& out) {
    part.role = role;
    part.origin = origin;
    out.push_back(std::move(part));
    return static_cast<int>(out.size()) - 1;
  }

  const ModelShape& whole_;
  const TensorOptions& options_;
};

}  // namespace

std::string shared_input(const std::string& part) { return part + ".input"; }
std::string share_of(const std::string& part) { return part + ".share"; }

ModelShape tensor_shape(const ModelShape& whole, const TensorOptions& options) {
  if (options.ranks < 1 || options.rank < 0 || options.rank >= options.ranks)
    refuse("there is no rank " + std::to_string(options.rank) + " of " + std::to_string(options.ranks));
  if (options.is_whole()) return whole;
  ModelShape out = whole;
  Cutter cutter(whole, options);
  for (int b = 0; b < out.num_blocks(); ++b) {
    BlockShape& block = out.blocks[static_cast<std::size_t>(b)];
    const std::vector<PartShape> parts = std::exchange(block.parts, {});
    std::vector<int> places;  // of each part, or of the first that it becomes
    for (std::size_t p = 0; p < parts.size(); ++p) {
      places.push_back(static_cast<int>(block.parts.size()));
      if (cutter.is_cut(parts[p])) {
        cutter.append(parts[p], static_cast<int>(p), b, block.parts);
      } else {
        block.parts.push_back(parts[p]);
        block.parts.back().origin = static_cast<int>(p);
      }
    }
    for (ExpertShape& layer : out.experts) {
      if (layer.block != b) continue;
      layer.gate = places[static_cast<std::size_t>(layer.gate)];
      layer.first_slice = places[static_cast<std::size_t>(layer.first_slice)];
    }
  }
  if (cutter.sums.empty())
    refuse("model '" + whole.model +
           "' has no layers whose matrices ranks could cut; gpt, gpt-moe and bert have");
  if (whole.width < 1) refuse("nobody has said how many values of a token pass from block to block");
  for (std::size_t p = 0; p < out.parameters.size(); ++p) {
    if (cutter.is_cut(static_cast<int>(p))) cut(out.parameters[p], options);
  }
  out.sums = std::move(cutter.sums);
  out.check();
  return out;
}

}  // namespace weft
