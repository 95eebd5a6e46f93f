#include "workload/outline.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <utility>

#include "patterns/schedule.h"
#include "step/tensor.h"
#include "weft/error.h"
#include "workload/table_draws.h"

namespace weft {

namespace {

class Checker {
 public:
  explicit Checker(std::string_view where) : where_(where) {}

  void require(bool holds, const std::string& what) const {
    if (!holds) throw UsageError(where_ + ": " + what);
  }
  void seconds(double value, const std::string& of) const {
    require(std::isfinite(value) && value >= 0, of + " must be a number of seconds that is not negative");
  }
  void names(std::set<std::string>& seen, const std::string& name, const std::string& kind) const {
    require(!name.empty(), "a " + kind + " has no name");
    require(seen.insert(name).second, "two " + kind + "s are named '" + name + "'");
  }

 private:
  std::string where_;
};

void check_tensor(const Checker& c, const OutlineTensor& tensor, std::size_t blocks) {
  const std::string name = "tensor '" + tensor.name + "'";
  c.require(tensor.length >= 1, name + " must have elements, not " + std::to_string(tensor.length));
  const bool vector = tensor.rows == 0 && tensor.columns == 0;
  const bool matrix = tensor.rows >= 1 && tensor.columns >= 1 && tensor.length % tensor.rows == 0 &&
                      tensor.length / tensor.rows == tensor.columns;
  c.require(vector || matrix, name + " of " + std::to_string(tensor.length) + " elements cannot have " +
                                  std::to_string(tensor.rows) + " rows of " + std::to_string(tensor.columns));
  c.require(tensor.block >= 0 && static_cast<std::size_t>(tensor.block) < blocks,
            name + " belongs to block " + std::to_string(tensor.block) + " of " + std::to_string(blocks));
  c.require(tensor.ready >= 0 && tensor.ready <= 1, name + ": ready must be 0 to 1");
  c.require(tensor.cut >= -1 && tensor.cut < (matrix ? 2 : 1), name + " has no dimension to be cut along");
}

void check_tables(const Checker& c, const Outline& outline) {
  std::set<std::string> seen;
  for (const OutlineTable& table : outline.tables) {
    c.names(seen, table.name, "table");
    const std::string name = "table '" + table.name + "'";
    const OutlineTensor* tensor = nullptr;
    for (const OutlineTensor& t : outline.tensors) {
      if (t.name == table.name) tensor = &t;
    }
    c.require(tensor != nullptr, name + " is none of the tensors");
    c.require(tensor->rows == table.rows && tensor->columns == table.width,
              name + " has other rows and width than its tensor");
    c.require(table.rows_per_step >= 0 && table.rows_per_step <= static_cast<double>(table.rows),
              name + ": rows_per_step must be 0 to its rows");
    c.require(table.lookups_per_step >= 0 && table.shared_per_step >= 0,
              name + ": lookups_per_step and shared_per_step must not be negative");
    c.require(table.zipf >= 0 && table.zipf <= 8, name + ": zipf must be 0 to 8");
    c.seconds(table.dense_forward_seconds, name + ": dense_forward_seconds");
    c.seconds(table.dense_backward_seconds, name + ": dense_backward_seconds");
    c.seconds(table.dense_update_seconds, name + ": dense_update_seconds");
  }
}

void check_experts(const Checker& c, const Outline& outline) {
  std::set<int> blocks;
  for (const OutlineExperts& e : outline.experts) {
    const std::string name = "experts '" + e.name + "'";
    c.require(e.block >= 0 && e.block + 1 < static_cast<int>(outline.blocks.size()) &&
                  blocks.insert(e.block).second,
              name + " must be of a block of their own that is not the last");
    c.require(e.width >= 1 && e.experts >= 1 && e.choices >= 1 && e.choices <= e.experts &&
                  e.capacity_factor >= 0 && e.capacity_factor <= 1e6,
              name + ": width, experts, choices or capacity_factor cannot be");
    for (const double seconds :
         {e.gate_forward_seconds, e.gate_backward_seconds, e.shared_forward_seconds,
          e.shared_backward_seconds, e.row_forward_seconds, e.row_backward_seconds, e.merge_forward_seconds,
          e.merge_backward_seconds, e.expert_forward_seconds, e.expert_backward_seconds})
      c.seconds(seconds, name);
  }
  for (const OutlineTensor& t : outline.tensors) {
    if (t.of == OutlineTensor::Of::block) continue;
    const auto layer = std::ranges::find(outline.experts, t.block, &OutlineExperts::block);
    c.require(layer != outline.experts.end(), "tensor '" + t.name + "' is of experts that are not there");
    c.require(t.of != OutlineTensor::Of::experts || t.rows == layer->experts,
              "tensor '" + t.name + "' must have a row for each expert");
  }
}

}  // namespace

void check(const Outline& outline, std::string_view where) {
  const Checker c(where);
  const bool measured = outline.source == Outline::kMeasured;
  c.require(measured || outline.source == Outline::kFlops,
            "source '" + outline.source + "' is none of: measured, flops");
  const double rate = outline.flops_per_second;
  c.require(measured ? rate == 0 : rate > 0 && std::isfinite(rate),
            measured ? "measured seconds have no flops_per_second" : "flops_per_second must be positive");
  c.require(outline.side_by_side >= 1, "side_by_side must be at least 1");
  c.require(outline.tokens_per_rank >= 1, "tokens_per_rank must be at least 1");
  c.require(outline.width >= 0 && outline.width <= 1 << 24, "width cannot be");
  c.seconds(outline.other_seconds, "other_seconds");
  c.require(!outline.blocks.empty(), "there is no block");
  c.require(!outline.tensors.empty(), "there is no tensor");
  std::set<std::string> blocks, tensors;
  for (const OutlineBlock& block : outline.blocks) {
    c.names(blocks, block.name, "block");
    c.seconds(block.forward_seconds, "forward of block '" + block.name + "'");
    c.seconds(block.backward_seconds, "backward of block '" + block.name + "'");
    c.seconds(block.update_seconds, "update of block '" + block.name + "'");
    const double cut = std::accumulate(block.cuts.begin(), block.cuts.end(), 0.0);
    c.require(block.cuts.size() <= 16 && std::ranges::all_of(block.cuts, [](double s) { return s >= 0; }) &&
                  cut <= 1 + 1e-9,
              "block '" + block.name + "': cuts must be shares of at most 1 together");
  }
  // Virtual time is counted in 64 bits of nanoseconds, and a run has many steps.
  constexpr double kLongestStep = 1e5;
  c.require(compute_seconds(outline) <= kLongestStep, "a step would compute for more than a day (100,000 s)");
  std::int64_t parameters = 0;
  constexpr std::int64_t kMost = std::int64_t{1} << 48;
  int last = 0;
  for (const OutlineTensor& tensor : outline.tensors) {
    c.names(tensors, tensor.name, "tensor");
    check_tensor(c, tensor, outline.blocks.size());
    c.require(tensor.block >= last, "tensor '" + tensor.name + "' stands behind one of a later block");
    last = tensor.block;
    c.require(tensor.length <= kMost - parameters, "the tensors are too long");
    parameters += tensor.length;
  }
  c.require(parameters == outline.parameters, "the tensors have " + std::to_string(parameters) +
                                                  " elements, and parameters says " +
                                                  std::to_string(outline.parameters));
  check_tables(c, outline);
  check_experts(c, outline);
}

namespace {

OutlineTensor::Of part_of(const ModelShape& shape, int parameter) {
  if (shape.parameters[static_cast<std::size_t>(parameter)].of_experts > 0) return OutlineTensor::Of::experts;
  const Piece first = shape.ready_after(parameter, 1);
  const auto layer = std::ranges::find(shape.experts, first.block, &ExpertShape::block);
  if (layer == shape.experts.end() || first.part < layer->gate) return OutlineTensor::Of::block;
  return first.part == layer->gate ? OutlineTensor::Of::gate : OutlineTensor::Of::shared;
}

}  // namespace

namespace {

// By FLOPs; a block of a single cut part is cut as a whole.
std::vector<double> cuts_of(const ModelShape& shape, int block) {
  double all = 0;
  std::vector<double> out;
  std::span<const PartShape> own = shape.blocks[static_cast<std::size_t>(block)].parts;
  const auto experts = std::ranges::find(shape.experts, block, &ExpertShape::block);
  if (experts != shape.experts.end()) own = own.first(static_cast<std::size_t>(experts->gate));
  for (const PartShape& part : own) {
    all += part.flops_per_token;
    if (part.cut) out.push_back(part.flops_per_token);
  }
  for (double& share : out) share = all > 0 ? share / all : 1.0 / static_cast<double>(out.size());
  return out;
}

}  // namespace

Outline outline_of(const ModelShape& shape, std::int64_t tokens_per_rank) {
  if (tokens_per_rank < 1) throw UsageError("a rank must have at least one token in a step");
  Outline out;
  out.model = shape.model;
  out.parameters = shape.num_elements();
  out.tokens_per_rank = tokens_per_rank;
  out.width = shape.width;
  for (int b = 0; b < shape.num_blocks(); ++b)
    out.blocks.push_back({.name = shape.blocks[static_cast<std::size_t>(b)].name, .cuts = cuts_of(shape, b)});
  for (std::size_t i = 0; i < shape.parameters.size(); ++i) {
    const ParameterShape& p = shape.parameters[i];
    OutlineTensor tensor{
        .name = p.name, .length = p.count(), .rows = p.rows(), .block = shape.block_of(static_cast<int>(i))};
    tensor.of = part_of(shape, static_cast<int>(i));
    if (p.of_experts > 0) {
      tensor.length = tensor.length / p.dims.front() * p.of_experts;
      tensor.rows = p.of_experts;
      out.parameters += tensor.length - p.count();
    }
    if (tensor.rows > 0) tensor.columns = tensor.length / tensor.rows;
    tensor.tied = p.tied;
    tensor.cut = p.cut;
    if (p.table) {
      OutlineTable& table = out.tables.emplace_back();
      table.name = p.name;
      table.rows = tensor.rows;
      table.width = tensor.columns;
      assume_lookups(table, tokens_per_rank, p.shared_lookups);
    }
    out.tensors.push_back(std::move(tensor));
  }
  for (const ExpertShape& layer : shape.experts) {
    out.experts.push_back({.name = layer.name,
                           .block = layer.block,
                           .width = layer.width,
                           .experts = layer.experts,
                           .choices = layer.choices,
                           .capacity_factor = layer.capacity_factor});
  }
  return out;
}

Outline outline_from_flops(const ModelShape& shape, std::int64_t tokens_per_rank, double flops_per_second) {
  if (!(flops_per_second > 0) || !std::isfinite(flops_per_second))
    throw UsageError("a rate of FLOPs a second must be positive");
  Outline out = outline_of(shape, tokens_per_rank);
  out.source = Outline::kFlops;
  out.flops_per_second = flops_per_second;
  const auto seconds = [&](double flops_per_token) {
    return flops_per_token * static_cast<double>(tokens_per_rank) / flops_per_second;
  };
  for (std::size_t b = 0; b < shape.blocks.size(); ++b) {
    const std::vector<PartShape>& parts = shape.blocks[b].parts;
    const auto experts = std::ranges::find(shape.experts, static_cast<int>(b), &ExpertShape::block);
    const std::size_t own =
        experts == shape.experts.end() ? parts.size() : static_cast<std::size_t>(experts->gate);
    double flops = 0;
    for (std::size_t p = 0; p < own; ++p) flops += parts[p].flops_per_token;
    out.blocks[b].forward_seconds = seconds(flops);
    out.blocks[b].backward_seconds = 2 * seconds(flops);
    if (experts == shape.experts.end()) continue;
    OutlineExperts& layer = out.experts[static_cast<std::size_t>(experts - shape.experts.begin())];
    const auto part = [&](int p) { return parts[static_cast<std::size_t>(p)].flops_per_token; };
    layer.gate_forward_seconds = seconds(part(experts->gate));
    if (experts->first_slice > experts->gate + 1)
      layer.shared_forward_seconds = seconds(part(experts->gate + 1));
    layer.row_forward_seconds =
        part(experts->first_slice) * experts->slices / experts->choices / flops_per_second;
    layer.merge_forward_seconds = seconds(part(experts->merge()));
    layer.gate_backward_seconds = 2 * layer.gate_forward_seconds;
    layer.shared_backward_seconds = 2 * layer.shared_forward_seconds;
    layer.row_backward_seconds = 2 * layer.row_forward_seconds;
    layer.merge_backward_seconds = 2 * layer.merge_forward_seconds;
  }
  check(out);
  return out;
}

Outline with_more_tokens(Outline outline, double times) {
  const auto rounded = [times](std::int64_t count) {
    return std::max<std::int64_t>(1, std::llround(times * static_cast<double>(count)));
  };
  outline.tokens_per_rank = rounded(outline.tokens_per_rank);
  outline.other_seconds *= times;
  for (OutlineBlock& block : outline.blocks) {
    block.forward_seconds *= times;
    block.backward_seconds *= times;
  }
  for (OutlineTable& table : outline.tables) {
    if (table.lookups_per_step > 0) table.lookups_per_step = rounded(table.lookups_per_step);
    table.rows_per_step = std::min(static_cast<double>(table.rows), times * table.rows_per_step);
    table.dense_forward_seconds *= times;
    table.dense_backward_seconds *= times;
  }
  for (OutlineExperts& e : outline.experts) {  // (a row takes as long as it did)
    for (double* seconds : {&e.gate_forward_seconds, &e.gate_backward_seconds, &e.shared_forward_seconds,
                            &e.shared_backward_seconds, &e.merge_forward_seconds, &e.merge_backward_seconds})
      *seconds *= times;
  }
  return outline;
}

void set_seconds(Outline& outline, const StepTimes& times) {
  outline.experts.clear();
  for (OutlineTensor& tensor : outline.tensors) tensor.of = OutlineTensor::Of::block;
  for (std::size_t b = 0; b < outline.blocks.size(); ++b) {
    outline.blocks[b].forward_seconds = times.forward[b];
    outline.blocks[b].backward_seconds = times.backward[b];
    outline.blocks[b].update_seconds = times.update[b];
  }
  for (std::size_t i = 0; i < outline.tensors.size(); ++i) outline.tensors[i].ready = times.ready[i];
  outline.other_seconds = times.other;
  check(outline);
}

double even_rows(const Outline& outline, const OutlineExperts& e) {
  const double copies = static_cast<double>(outline.tokens_per_rank) * e.choices;
  return copies * (e.capacity_factor > 0 ? e.capacity_factor : 1);
}

double compute_seconds(const Outline& outline) {
  double sum = outline.other_seconds;
  for (const OutlineBlock& b : outline.blocks)
    sum += b.forward_seconds + b.backward_seconds + b.update_seconds;
  for (const OutlineExperts& e : outline.experts) {
    sum += e.gate_forward_seconds + e.gate_backward_seconds + e.shared_forward_seconds +
           e.shared_backward_seconds + e.merge_forward_seconds + e.merge_backward_seconds +
           even_rows(outline, e) * (e.row_forward_seconds + e.row_backward_seconds) +
           e.experts * (e.expert_forward_seconds + e.expert_backward_seconds);  // in one slice
  }
  return sum;
}

namespace {

// The one part of a block as so many that are cut, one behind the other.
void part_products(BlockShape& block, std::size_t products) {
  if (products == 0) return;
  const PartShape whole = block.parts.front();
  block.parts.clear();
  for (std::size_t i = 0; i < products; ++i) {
    PartShape part{.name = products == 1 ? whole.name : whole.name + "." + std::to_string(i)};
    part.takes = i == 0 ? whole.takes : block.parts.back().gives;
    part.gives = i + 1 == products ? whole.gives : std::vector{part.name};
    if (i == 0) part.parameters = whole.parameters;
    part.cut = true;
    block.parts.push_back(std::move(part));
  }
}

// Puts the parts of a layer of experts behind the one of its block, and its parameters where they are used.
void add_experts(ModelShape& shape, const Outline& outline, const OutlineExperts& from,
                 const ExpertLayout& layout) {
  BlockShape& block = shape.blocks[static_cast<std::size_t>(from.block)];
  const int gate = static_cast<int>(block.parts.size());
  PartShape& own = block.parts.back();
  const std::string given = own.gives.front(), inner = given + ".inner";
  own.gives = {inner};
  const bool shares =
      from.shared_forward_seconds > 0 || std::ranges::any_of(outline.tensors, [&](const OutlineTensor& t) {
        return t.block == from.block && t.of == OutlineTensor::Of::shared;
      });
  ExpertShape layer{.name = from.name,
                    .block = from.block,
                    .gate = gate,
                    .first_slice = gate + (shares ? 2 : 1),
                    .slices = layout.slices,
                    .width = from.width,
                    .experts = from.experts,
                    .choices = from.choices,
                    .capacity_factor = from.capacity_factor};
  for (PartShape& part : expert_parts(layer, inner, shares ? from.name + ".shared" : "", given))
    block.parts.push_back(std::move(part));
  const std::vector<int> all = std::exchange(block.parts.front().parameters, {});
  for (const int p : all) {
    ParameterShape& parameter = shape.parameters[static_cast<std::size_t>(p)];
    switch (outline.tensors[static_cast<std::size_t>(p)].of) {
      case OutlineTensor::Of::block:
        block.parts[0].parameters.push_back(p);
        break;
      case OutlineTensor::Of::gate:
        block.parts[static_cast<std::size_t>(gate)].parameters.push_back(p);
        break;
      case OutlineTensor::Of::shared:
        block.parts[static_cast<std::size_t>(gate) + 1].parameters.push_back(p);
        break;
      case OutlineTensor::Of::experts:
        parameter.of_experts = from.experts;
        parameter.dims.front() = from.experts / layout.ranks;
        parameter.first = layout.rank * parameter.dims.front();
        for (int part = layer.first_slice; part < layer.merge(); ++part)
          block.parts[static_cast<std::size_t>(part)].parameters.push_back(p);
        break;
    }
  }
  shape.experts.push_back(std::move(layer));
}

}  // namespace

ModelShape shape_of(const Outline& outline, const ExpertLayout& layout, const TensorOptions& share) {
  std::vector<ChainBlock> blocks;
  blocks.reserve(outline.blocks.size());
  for (const OutlineBlock& block : outline.blocks) blocks.push_back({.name = block.name, .parameters = {}});
  for (const OutlineTensor& tensor : outline.tensors) {
    std::vector<std::int64_t> dims{tensor.length};
    if (tensor.rows > 0) dims = {tensor.rows, tensor.columns};
    const auto table = std::ranges::find(outline.tables, tensor.name, &OutlineTable::name);
    const bool there = table != outline.tables.end();
    blocks[static_cast<std::size_t>(tensor.block)].parameters.push_back(
        {.name = tensor.name,
         .dims = std::move(dims),
         .table = there,
         .rows_per_step = there ? table->rows_per_step : 0,
         .tied = tensor.tied,
         .cut = tensor.cut});
  }
  ModelShape out = chain_shape(outline.model, blocks);
  out.width = outline.width;
  // A tied table is the last block's matrix.
  for (std::size_t i = 0; i < outline.tensors.size(); ++i) {
    std::vector<int>& last = out.blocks.back().parts.front().parameters;
    const bool elsewhere = outline.tensors[i].block + 1 < static_cast<int>(outline.blocks.size());
    if (outline.tensors[i].tied && elsewhere) last.push_back(static_cast<int>(i));
  }
  if (!share.is_whole()) {
    for (std::size_t b = 0; b < outline.blocks.size(); ++b)
      part_products(out.blocks[b], outline.blocks[b].cuts.size());
  }
  for (const OutlineExperts& layer : outline.experts) add_experts(out, outline, layer, layout);
  return tensor_shape(out, share);
}

}  // namespace weft
