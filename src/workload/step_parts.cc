#include "workload/step_parts.h"

#include <algorithm>
#include <cmath>

#include "base/identity.h"
#include "base/statistics.h"
#include "weft/error.h"

namespace weft {

namespace {

constexpr std::size_t kAlign = 16;         // floats of a cache line: a window starts at one
constexpr std::size_t kPlaces = 1u << 16;  // of windows, so many cache lines apart at most

}  // namespace

GradientWindows::GradientWindows(const Outline& outline, const EmulationOptions& options)
    : seed_(options.seed) {
  std::size_t longest = 0;
  const std::vector<bool> held = held_tables(shape_of(outline), options.tables);
  for (std::size_t i = 0; i < outline.tensors.size(); ++i) {
    const OutlineTensor& tensor = outline.tensors[i];
    std::int64_t length = tensor.length;
    if (held[i]) {
      const OutlineTable& table = *std::ranges::find(outline.tables, tensor.name, &OutlineTable::name);
      length = std::min(table.rows, table.lookups_per_step + table.shared_per_step) * table.width;
      tables_.push_back({table.name, TableDraws(table)});
    }
    widths_.push_back(static_cast<std::size_t>(tensor.columns));
    lengths_.push_back(static_cast<std::size_t>(length));
    longest = std::max(longest, lengths_.back());
  }
  values_.resize(longest + kAlign * kPlaces);
  draw({.distribution = options.gradients, .seed = options.seed}, values_);
}

std::span<const float> GradientWindows::of(int rank, std::int64_t step, int tensor) const {
  std::uint64_t hash = mix(seed_ ^ static_cast<std::uint64_t>(rank));
  hash = mix(hash ^ static_cast<std::uint64_t>(step));
  hash = mix(hash ^ static_cast<std::uint64_t>(tensor));
  return std::span(values_).subspan(kAlign * (hash % kPlaces), lengths_[static_cast<std::size_t>(tensor)]);
}

GradientWindows::Asked GradientWindows::asked(int rank, std::int64_t step) const {
  Asked out;
  for (const Drawn& table : tables_) out.ids.push_back(table.draws.ids(seed_, rank, step));
  for (std::size_t t = 0; t < tables_.size(); ++t)
    out.lookups.push_back({.table = tables_[t].name, .ids = out.ids[t]});
  return out;
}

std::vector<BlockBackward> backward_of(const Outline& outline) {
  std::vector<BlockBackward> out(outline.blocks.size());
  for (std::size_t i = 0; i < outline.tensors.size(); ++i) {
    const OutlineTensor& tensor = outline.tensors[i];
    const auto block = static_cast<std::size_t>(tensor.block);
    out[block].gradients.push_back(
        {static_cast<int>(i), tensor.ready * outline.blocks[block].backward_seconds});
  }
  for (std::size_t b = 0; b < out.size(); ++b) {
    std::vector<ReadyGradient>& gradients = out[b].gradients;
    // Of equal times the tensor that was used last comes first.
    std::ranges::sort(gradients, [](const ReadyGradient& a, const ReadyGradient& c) {
      return a.seconds != c.seconds ? a.seconds < c.seconds : a.tensor > c.tensor;
    });
    double before = 0;
    for (ReadyGradient& gradient : gradients) {
      const double since = gradient.seconds - before;
      before = gradient.seconds;
      gradient.seconds = since;
    }
    out[b].rest_seconds = std::max(0.0, outline.blocks[b].backward_seconds - before);
  }
  return out;
}

Outline of_one_micro_batch(Outline outline, int micro_batches) {
  for (OutlineBlock& block : outline.blocks) {
    block.forward_seconds /= micro_batches;
    block.backward_seconds /= micro_batches;
  }
  return outline;
}

Outline with_dense_tables(Outline outline, const TablesOptions& tables) {
  const std::vector<bool> held = held_tables(shape_of(outline), tables);
  for (const OutlineTable& table : outline.tables) {
    const auto found = std::ranges::find(outline.tensors, table.name, &OutlineTensor::name);
    if (held[static_cast<std::size_t>(found - outline.tensors.begin())]) continue;
    OutlineBlock& block = outline.blocks[static_cast<std::size_t>(found->block)];
    block.forward_seconds += table.dense_forward_seconds;
    block.backward_seconds += table.dense_backward_seconds;
    block.update_seconds += table.dense_update_seconds;
  }
  return outline;
}

JobOptions job_options(const EmulationOptions& options) {
  JobOptions out{.parallel = options.parallel,
                 .tables = options.tables,
                 .optimizer = options.optimizer,
                 .dtype = DType::float32,
                 .step = {}};
  out.step.lookahead = true;
  out.step.updates_wait = options.updates_wait;
  return out;
}

std::shared_ptr<const GradientWindows> windows_of(const Outline& outline, const EmulationOptions& options) {
  return options.windows != nullptr ? options.windows
                                    : std::make_shared<const GradientWindows>(outline, options);
}

void check(const EmulationOptions& options) {
  if (options.steps < 1) throw UsageError("an emulated run has at least one step");
  if (options.warmup < 0) throw UsageError("steps of warm-up must not be negative");
  if (options.micro_batches < 1) throw UsageError("an emulated step has at least one micro-batch");
}

void StepAccount::ended(const Step& step, const StepTimes& times) {
  all_.times.push_back(times);
  all_.step_seconds.push_back(step.seconds);
  all_.waited_seconds.push_back(step.waited);
  all_.hand_over_seconds.push_back(step.handed_over);
}

void StepAccount::settled(double seconds, double waited) {
  all_.step_seconds.back() += seconds;
  all_.waited_seconds.back() += waited;
}

void StepAccount::complete(JobStrategies& job) {
  all_.payload_bytes.push_back(static_cast<double>(job.take_sent_bytes()));
  all_.compute_seconds.push_back(job.computed_seconds());
}

EmulatedSteps StepAccount::take(std::int64_t warmup) {
  EmulatedSteps out = all_;
  for (std::vector<double>* values : {&out.step_seconds, &out.waited_seconds, &out.payload_bytes,
                                      &out.compute_seconds, &out.hand_over_seconds}) {
    values->erase(values->begin(), values->begin() + warmup);
  }
  out.times.erase(out.times.begin(), out.times.begin() + warmup);
  return out;
}

std::vector<std::vector<double>> seconds_of(std::span<const EmulatedSteps> ranks) {
  std::vector<std::vector<double>> out;
  for (const EmulatedSteps& rank : ranks) out.push_back(rank.step_seconds);
  return out;
}

}  // namespace weft
