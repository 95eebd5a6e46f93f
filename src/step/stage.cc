#include "step/stage.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <string>

#include "base/names.h"
#include "weft/error.h"

namespace weft {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw UsageError("pipeline: " + what); }

bool is_layer(const BlockShape& block) { return block.name.starts_with("layer."); }

// Blocks of each chunk of the model.
std::vector<ChunkBlocks> dealt(const ModelShape& whole, const StageOptions& options) {
  const int chunks = options.stages * options.chunks;
  const auto first = std::ranges::find_if(whole.blocks, is_layer);
  const int before = static_cast<int>(first - whole.blocks.begin());
  const int layers = static_cast<int>(std::ranges::count_if(whole.blocks, is_layer));
  const bool together = std::all_of(first, first + layers, is_layer);
  if (layers == 0 || !together) refuse("model '" + whole.model + "' is no row of layers that could be cut");
  if (layers < chunks)
    refuse("model '" + whole.model + "' has " + std::to_string(layers) + " layers, too few for " +
           std::to_string(options.stages) + " stages" +
           (options.chunks > 1 ? " of " + std::to_string(options.chunks) + " chunks" : "") +
           ": every one has at least one");
  std::vector<ChunkBlocks> out;
  if (options.layers.empty()) {
    for (int c = 0; c < chunks; ++c) out.push_back(even_chunk(layers, chunks, c));
  } else {
    if (static_cast<int>(options.layers.size()) != chunks ||
        std::accumulate(options.layers.begin(), options.layers.end(), 0) != layers)
      refuse("layers of stages are so many for each of " + std::to_string(chunks) +
             ", together the model's " + std::to_string(layers));
    if (const int fewest = std::ranges::min(options.layers); fewest < 1)
      refuse("a stage has at least one layer, not " + std::to_string(fewest));
    int at = 0;
    for (const int count : options.layers) {
      out.push_back({at, count});
      at += count;
    }
  }
  for (ChunkBlocks& chunk : out) chunk.first += before;
  out.front() = {0, out.front().first + out.front().count};
  out.back().count = whole.num_blocks() - out.back().first;
  return out;
}

// The one activation that passes from the blocks before `block` to it and those behind it.
std::string passed_at(const ModelShape& whole, int block) {
  std::set<std::string> given, passed;
  for (int b = 0; b < whole.num_blocks(); ++b) {
    for (const PartShape& part : whole.blocks[static_cast<std::size_t>(b)].parts) {
      if (b < block)
        given.insert(part.gives.begin(), part.gives.end());
      else
        std::ranges::copy_if(part.takes, std::inserter(passed, passed.end()),
                             [&](const std::string& name) { return given.contains(name); });
    }
  }
  if (passed.size() != 1)
    refuse("model '" + whole.model + "' cannot be cut in front of block '" +
           whole.blocks[static_cast<std::size_t>(block)].name + "': " + std::to_string(passed.size()) +
           " activations pass there");
  return *passed.begin();
}

// Stages that use each parameter, ascending.
std::vector<std::vector<int>> users_of(const ModelShape& whole, const std::vector<ChunkBlocks>& chunks,
                                       const StageOptions& options) {
  std::vector<std::vector<int>> out(whole.parameters.size());
  for (std::size_t c = 0; c < chunks.size(); ++c) {
    for (int b = chunks[c].first; b < chunks[c].first + chunks[c].count; ++b) {
      for (const PartShape& part : whole.blocks[static_cast<std::size_t>(b)].parts) {
        for (const int p : part.parameters)
          out[static_cast<std::size_t>(p)].push_back(static_cast<int>(c) % options.stages);
      }
    }
  }
  for (std::vector<int>& stages : out) {
    std::ranges::sort(stages);
    stages.erase(std::unique(stages.begin(), stages.end()), stages.end());
  }
  return out;
}

void append(std::vector<Piece>& order, const ModelShape& shape, const ChunkShape& chunk, Work work,
            int micro_batch) {
  const std::size_t begin = order.size();
  for (int b = chunk.first; b < chunk.first + chunk.count; ++b) {
    const int parts = static_cast<int>(shape.blocks[static_cast<std::size_t>(b)].parts.size());
    for (int p = 0; p < parts; ++p) order.push_back({work, b, p, micro_batch});
  }
  if (work != Work::forward) std::reverse(order.begin() + static_cast<std::ptrdiff_t>(begin), order.end());
}

}  // namespace

PipelineSchedule pipeline_schedule_of(std::string_view name) {
  const auto found = std::ranges::find(kPipelineSchedules, name);
  if (found == std::end(kPipelineSchedules))
    throw UsageError(unknown_name("schedule", std::string(name), kPipelineSchedules));
  return static_cast<PipelineSchedule>(found - std::begin(kPipelineSchedules));
}

PipelineShape pipeline_shape(const StageOptions& options, int micro_batches) {
  return {.schedule = pipeline_schedule_of(options.schedule),
          .stages = options.stages,
          .chunks = options.chunks,
          .micro_batches = micro_batches,
          .doubled = options.double_warmup};
}

void check_stage(const StageOptions& o, int micro_batches) {
  const PipelineSchedule schedule = pipeline_schedule_of(o.schedule);
  if (o.stages < 1 || o.stage < 0 || o.stage >= o.stages)
    refuse("there is no stage " + std::to_string(o.stage) + " of " + std::to_string(o.stages));
  if (o.chunks < 1) refuse("a stage has at least one chunk, not " + std::to_string(o.chunks));
  const bool interleaved = schedule == PipelineSchedule::interleaved;
  if (o.chunks > 1 && !interleaved) refuse("chunks are of the schedule interleaved, not of " + o.schedule);
  if (o.chunks > 1 && o.stages == 1) refuse("chunks are of several stages, and there is one");
  if (o.double_warmup && (interleaved || schedule == PipelineSchedule::gpipe))
    refuse("a doubled warm-up is of the schedules 1f1b and zb-h1, not of " + o.schedule);
  if (o.compressed != kAllStages && (o.compressed < 0 || o.compressed > o.stages))
    refuse("compressed stages are 0 to " + std::to_string(o.stages) + ", not " +
           std::to_string(o.compressed));
  if (std::ranges::find(kTiedSums, o.tied_sum) == kTiedSums.end())
    throw UsageError(unknown_name("sum of what stages share", o.tied_sum, kTiedSums));
  if (micro_batches > 0 && interleaved && micro_batches % o.stages != 0)
    refuse("interleaved takes a multiple of its " + std::to_string(o.stages) +
           " stages as micro-batches, not " + std::to_string(micro_batches));
}

bool in_halves(const StageOptions& options) {
  return !options.is_whole() && pipeline_schedule_of(options.schedule) == PipelineSchedule::zb_h1;
}

int fewest_micro_batches(const StageOptions& options) {
  return pipeline_schedule_of(options.schedule) == PipelineSchedule::interleaved ? options.stages : 1;
}

ModelShape stage_shape(const ModelShape& whole, const StageOptions& options) {
  check_stage(options);
  if (options.is_whole()) return whole;
  const std::vector<ChunkBlocks> chunks = dealt(whole, options);
  const std::vector<std::vector<int>> users = users_of(whole, chunks, options);
  ModelShape out{.model = whole.model,
                 .parameters = {},
                 .blocks = {},
                 .experts = {},
                 .chunks = {},
                 .sums = {},
                 .width = whole.width};
  std::vector<int> places(whole.parameters.size(), -1);
  const int last = static_cast<int>(chunks.size()) - 1;
  for (int c = options.stage; c <= last; c += options.stages) {
    const ChunkBlocks& mine = chunks[static_cast<std::size_t>(c)];
    out.chunks.push_back({.number = c,
                          .first = out.num_blocks(),
                          .count = mine.count,
                          .origin = mine.first,
                          .arrives = c == 0 ? "" : passed_at(whole, mine.first),
                          .leaves = c == last ? "" : passed_at(whole, mine.first + mine.count)});
    for (int b = mine.first; b < mine.first + mine.count; ++b) {
      BlockShape block = whole.blocks[static_cast<std::size_t>(b)];
      for (PartShape& part : block.parts) {
        for (int& used : part.parameters) {
          int& place = places[static_cast<std::size_t>(used)];
          if (place < 0) {
            place = static_cast<int>(out.parameters.size());
            out.parameters.push_back(whole.parameters[static_cast<std::size_t>(used)]);
            const std::vector<int>& stages = users[static_cast<std::size_t>(used)];
            if (stages.size() > 1) out.parameters.back().stages = stages;
          }
          used = place;
        }
      }
      for (ExpertShape layer : whole.experts) {
        if (layer.block != b) continue;
        layer.block = out.num_blocks();
        out.experts.push_back(layer);
      }
      for (SumShape sum : whole.sums) {
        if (sum.block != b) continue;
        sum.block = out.num_blocks();
        out.sums.push_back(sum);
      }
      out.blocks.push_back(std::move(block));
    }
  }
  out.check();
  return out;
}

std::vector<Piece> step_order(const ModelShape& shape, const StageOptions& options, int micro_batches) {
  if (options.is_whole()) return whole_batch(shape.parts(), micro_batches);
  check_stage(options, micro_batches);
  std::vector<Piece> out;
  for (const StageItem& item : pipeline_order(pipeline_shape(options, micro_batches), options.stage)) {
    const ChunkShape& chunk = *std::ranges::find(shape.chunks, item.chunk, &ChunkShape::number);
    append(out, shape, chunk, item.work, item.micro_batch);
  }
  return out;
}

std::vector<Piece> forward_order(const ModelShape& shape) {
  std::vector<Piece> out;
  append(out, shape, {.first = 0, .count = shape.num_blocks()}, Work::forward, 0);
  return out;
}

}  // namespace weft
