#include "weft/train/shape.h"

#include <set>

#include "patterns/schedule.h"
#include "weft/error.h"

namespace weft {

namespace {

[[noreturn]] void refuse(const ModelShape& shape, const std::string& why) {
  throw UsageError("shape of model '" + shape.model + "': " + why);
}

}  // namespace

void ModelShape::check() const {
  std::set<std::string> names;
  for (const ParameterShape& p : parameters) {
    if (p.name.empty() || !names.insert(p.name).second)
      refuse(*this, "parameter '" + p.name + "' is there twice or has no name");
    if (p.count() < 0) refuse(*this, "parameter '" + p.name + "' has a negative number of elements");
  }
  std::set<std::string> given;
  for (const ChunkShape& chunk : chunks) {
    if (!chunk.arrives.empty()) given.insert(chunk.arrives);
  }
  int used = 0;  // parameters so far, in the order of their first use
  for (const BlockShape& block : blocks) {
    if (block.parts.empty()) refuse(*this, "block '" + block.name + "' has no part");
    for (const PartShape& part : block.parts) {
      for (const std::string& name : part.takes) {
        if (!given.contains(name))
          refuse(*this, "part '" + part.name + "' takes '" + name + "', which no part before it gives");
      }
      for (const std::string& name : part.gives) {
        if (!given.insert(name).second) refuse(*this, "'" + name + "' is given twice");
      }
      for (const int p : part.parameters) {
        if (p < 0 || p > used || p >= static_cast<int>(parameters.size()))
          refuse(*this, "part '" + part.name + "' uses parameters that are not listed in order of use");
        if (p == used) ++used;
      }
    }
  }
  if (blocks.empty() || given.contains(kLoss) != has_loss()) refuse(*this, "no part gives the loss");
  for (const ChunkShape& chunk : chunks) {
    if (!chunk.leaves.empty() && !given.contains(chunk.leaves))
      refuse(*this, "no part gives '" + chunk.leaves + "', which leaves");
  }
  for (const ExpertShape& layer : experts) {
    const bool there =
        layer.block >= 0 && layer.block < num_blocks() && layer.slices >= 1 && layer.gate >= 0 &&
        layer.first_slice > layer.gate &&
        layer.merge() < static_cast<int>(blocks[static_cast<std::size_t>(layer.block)].parts.size());
    if (!there || layer.width < 1) refuse(*this, "experts '" + layer.name + "' are no parts of a block");
  }
  if (used != static_cast<int>(parameters.size()))
    refuse(*this, "nobody uses '" + parameters[static_cast<std::size_t>(used)].name + "'");
}

std::int64_t ModelShape::num_elements() const {
  std::int64_t sum = 0;
  for (const ParameterShape& p : parameters) sum += p.count();
  return sum;
}

double ModelShape::flops_per_token() const {
  double sum = 0;
  for (const BlockShape& block : blocks) {
    for (const PartShape& part : block.parts) sum += part.flops_per_token;
  }
  return sum;
}

std::vector<int> ModelShape::parts() const {
  std::vector<int> out;
  out.reserve(blocks.size());
  for (const BlockShape& block : blocks) out.push_back(static_cast<int>(block.parts.size()));
  return out;
}

Piece ModelShape::ready_after(int parameter, int micro_batches) const {
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    for (std::size_t p = 0; p < blocks[b].parts.size(); ++p) {
      for (const int used : blocks[b].parts[p].parameters) {
        if (used == parameter)
          return {Work::backward, static_cast<int>(b), static_cast<int>(p), micro_batches - 1};
      }
    }
  }
  refuse(*this, "there is no user of parameter " + std::to_string(parameter));
}

int ModelShape::block_of(int parameter) const { return ready_after(parameter, 1).block; }

int ModelShape::origin_of(int block) const {
  for (const ChunkShape& chunk : chunks) {
    if (block >= chunk.first && block < chunk.first + chunk.count) return chunk.origin + block - chunk.first;
  }
  return block;
}

bool ModelShape::is_last(const Piece& piece) const {
  return piece.block + 1 == num_blocks() &&
         static_cast<std::size_t>(piece.part) + 1 == blocks.back().parts.size();
}

ModelShape ModelShape::trained(const std::vector<bool>& is_trained) const {
  ModelShape out = *this;
  out.parameters.clear();
  std::vector<int> places(parameters.size(), -1);
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    if (!is_trained[p]) continue;
    places[p] = static_cast<int>(out.parameters.size());
    out.parameters.push_back(parameters[p]);
  }
  for (BlockShape& block : out.blocks) {
    for (PartShape& part : block.parts) {
      for (int& used : part.parameters) used = places[static_cast<std::size_t>(used)];
      std::erase(part.parameters, -1);
    }
  }
  return out;
}

std::vector<PartShape> expert_parts(const ExpertShape& layer, const std::string& taken,
                                    const std::string& shared, const std::string& given) {
  std::vector<PartShape> out;
  PartShape gate{.name = layer.name + ".gate", .takes = {taken}};
  gate.gives = {layer.weights(), layer.rows(), layer.router()};
  for (int s = 0; s < layer.slices; ++s) gate.gives.push_back(layer.dispatch(s));
  for (int s = 0; s < layer.slices; ++s) gate.gives.push_back(layer.counts(s));
  PartShape merge{.name = layer.name, .takes = {taken, layer.weights(), layer.rows()}, .gives = {given}};
  out.push_back(std::move(gate));
  if (!shared.empty()) {
    out.push_back({.name = shared, .takes = {taken}, .gives = {shared}});
    merge.takes.push_back(shared);
  }
  for (int s = 0; s < layer.slices; ++s) {
    out.push_back({.name = layer.name + ".slice." + std::to_string(s),
                   .takes = {layer.dispatch(s), layer.counts(s)},
                   .gives = {layer.combine(s)},
                   .of_others = true});
    merge.takes.push_back(layer.combine(s));
  }
  out.push_back(std::move(merge));
  return out;
}

ModelShape chain_shape(std::string model, const std::vector<ChainBlock>& blocks) {
  ModelShape out{.model = std::move(model), .parameters = {}, .blocks = {}};
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    const ChainBlock& block = blocks[b];
    PartShape part{.name = block.name, .flops_per_token = block.flops_per_token};
    if (b > 0) part.takes = {blocks[b - 1].name};
    part.gives = {b + 1 == blocks.size() ? kLoss : block.name};
    for (const ParameterShape& parameter : block.parameters) {
      part.parameters.push_back(static_cast<int>(out.parameters.size()));
      out.parameters.push_back(parameter);
    }
    out.blocks.push_back({.name = block.name, .parts = {std::move(part)}});
  }
  return out;
}

std::string ModelShape::title(const Piece& piece, int micro_batches) const {
  const BlockShape& block = blocks[static_cast<std::size_t>(piece.block)];
  if (piece.work == Work::update) return "update " + block.name;
  constexpr const char* kWorks[] = {"forward ", "backward ", "input gradient of ", "weight gradient of "};
  std::string out =
      kWorks[static_cast<std::size_t>(piece.work)] + block.parts[static_cast<std::size_t>(piece.part)].name;
  if (micro_batches > 1) out += ", micro-batch " + std::to_string(piece.micro_batch);
  return out;
}

}  // namespace weft
