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
  for (const OutlineTensor& tensor : outline.tensors) {
    lengths_.push_back(static_cast<std::size_t>(tensor.length));
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

namespace {

StepOptions step_options(const EmulationOptions& options) {
  StepOptions out;
  out.lookahead = true;
  out.updates_wait = options.updates_wait;
  return out;
}

std::unique_ptr<DataParallel> parallel_of(Engine& engine, const Comm& world, const Outline& outline,
                                          const EmulationOptions& options, Strategies& all) {
  DataParallelOptions out = options.parallel;
  out.dtype = DType::float32;
  out.divisor = 0;
  out.first_slot = all.next_slot(world);
  return std::make_unique<DataParallel>(engine, world, parameters_of(outline), out, &all.state());
}

}  // namespace

EmulatedStrategies::EmulatedStrategies(Engine& engine, const Comm& world, const Outline& outline,
                                       const EmulationOptions& options)
    : all(engine, world, shape_of(outline), step_options(options)),
      parallel(all.add(parallel_of(engine, world, outline, options, all))) {
  all.install();
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

void StepAccount::complete(const DataParallel& parallel) {
  double sum = 0;
  for (int b = 0; b < parallel.plan().num_buckets(); ++b) sum += parallel.computed_seconds(b);
  all_.payload_bytes.push_back(static_cast<double>(parallel.sent_bytes()));
  all_.compute_seconds.push_back(sum);
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
