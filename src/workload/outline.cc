#include "workload/outline.h"

#include <algorithm>
#include <cmath>
#include <set>

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
  c.seconds(outline.other_seconds, "other_seconds");
  c.require(!outline.blocks.empty(), "there is no block");
  c.require(!outline.tensors.empty(), "there is no tensor");
  std::set<std::string> blocks, tensors;
  for (const OutlineBlock& block : outline.blocks) {
    c.names(blocks, block.name, "block");
    c.seconds(block.forward_seconds, "forward of block '" + block.name + "'");
    c.seconds(block.backward_seconds, "backward of block '" + block.name + "'");
    c.seconds(block.update_seconds, "update of block '" + block.name + "'");
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
}

Outline outline_of(const ModelShape& shape, std::int64_t tokens_per_rank) {
  if (tokens_per_rank < 1) throw UsageError("a rank must have at least one token in a step");
  Outline out;
  out.model = shape.model;
  out.parameters = shape.num_elements();
  out.tokens_per_rank = tokens_per_rank;
  for (const BlockShape& block : shape.blocks) out.blocks.push_back({.name = block.name});
  for (std::size_t i = 0; i < shape.parameters.size(); ++i) {
    const ParameterShape& p = shape.parameters[i];
    OutlineTensor tensor{
        .name = p.name, .length = p.count(), .rows = p.rows(), .block = shape.block_of(static_cast<int>(i))};
    if (tensor.rows > 0) tensor.columns = tensor.length / tensor.rows;
    tensor.tied = p.tied;
    if (p.table) {
      OutlineTable& table = out.tables.emplace_back();
      table.name = p.name;
      table.rows = tensor.rows;
      table.width = tensor.columns;
      assume_lookups(table, tokens_per_rank, p.shared_lookups);
    }
    out.tensors.push_back(std::move(tensor));
  }
  return out;
}

Outline outline_from_flops(const ModelShape& shape, std::int64_t tokens_per_rank, double flops_per_second) {
  if (!(flops_per_second > 0) || !std::isfinite(flops_per_second))
    throw UsageError("a rate of FLOPs a second must be positive");
  Outline out = outline_of(shape, tokens_per_rank);
  out.source = Outline::kFlops;
  out.flops_per_second = flops_per_second;
  for (std::size_t b = 0; b < shape.blocks.size(); ++b) {
    double flops = 0;
    for (const PartShape& part : shape.blocks[b].parts) flops += part.flops_per_token;
    const double forward = flops * static_cast<double>(tokens_per_rank) / flops_per_second;
    out.blocks[b].forward_seconds = forward;
    out.blocks[b].backward_seconds = 2 * forward;
  }
  check(out);
  return out;
}

void set_seconds(Outline& outline, const StepTimes& times) {
  for (std::size_t b = 0; b < outline.blocks.size(); ++b) {
    outline.blocks[b].forward_seconds = times.forward[b];
    outline.blocks[b].backward_seconds = times.backward[b];
    outline.blocks[b].update_seconds = times.update[b];
  }
  for (std::size_t i = 0; i < outline.tensors.size(); ++i) outline.tensors[i].ready = times.ready[i];
  outline.other_seconds = times.other;
  check(outline);
}

double compute_seconds(const Outline& outline) {
  double sum = outline.other_seconds;
  for (const OutlineBlock& b : outline.blocks)
    sum += b.forward_seconds + b.backward_seconds + b.update_seconds;
  return sum;
}

ModelShape shape_of(const Outline& outline) {
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
         .tied = tensor.tied});
  }
  return chain_shape(outline.model, blocks);
}

}  // namespace weft
