#include "workload/step_parts.h"

#include <algorithm>
#include <cmath>

#include "base/identity.h"
#include "base/statistics.h"
#include "embedding/ways.h"
#include "patterns/blocks.h"
#include "pipeline/pipeline.h"
#include "state/optimizer.h"
#include "weft/error.h"
#include "workload/token_cuts.h"

namespace weft {

namespace {

constexpr std::size_t kAlign = 16;         // floats of a cache line: a window starts at one
constexpr std::size_t kPlaces = 1u << 16;  // of windows, so many cache lines apart at most
constexpr std::size_t kPassedPlaces = 64;  // of what passes between stages

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

std::span<const float> GradientWindows::of(int rank, std::int64_t step, int tensor,
                                           const JobStrategies::Place& place) const {
  if (place.table != nullptr) return of(rank, step, tensor, place.table->num_rows());
  const std::int64_t count = place.parallel->plan().parameter(place.local).count;
  return of(rank, step, tensor).first(static_cast<std::size_t>(count));
}

GradientWindows::Asked GradientWindows::asked(int rank, std::int64_t step) const {
  Asked out;
  for (const Drawn& table : tables_) out.ids.push_back(table.draws.ids(seed_, rank, step));
  for (std::size_t t = 0; t < tables_.size(); ++t)
    out.lookups.push_back({.table = tables_[t].name, .ids = out.ids[t]});
  return out;
}

namespace {

// From when each gradient is there to how long after the one before it.
void order_gradients(PartTimes& part) {
  // Of equal times the tensor that was used last comes first.
  std::ranges::sort(part.gradients, [](const ReadyGradient& a, const ReadyGradient& c) {
    return a.seconds != c.seconds ? a.seconds < c.seconds : a.tensor > c.tensor;
  });
  double before = 0;
  for (ReadyGradient& gradient : part.gradients) {
    const double since = gradient.seconds - before;
    before = gradient.seconds;
    gradient.seconds = since;
  }
  part.rest_seconds = std::max(0.0, part.backward_seconds - before);
}

void add_experts(std::vector<PartTimes>& parts, const ExpertShape& shape, const OutlineExperts& layer,
                 int local) {
  parts.resize(static_cast<std::size_t>(shape.merge()) + 1);
  const auto set = [&](int part, double forward, double backward) {
    parts[static_cast<std::size_t>(part)].forward_seconds = forward;
    parts[static_cast<std::size_t>(part)].backward_seconds = backward;
  };
  set(shape.gate, layer.gate_forward_seconds, layer.gate_backward_seconds);
  if (shape.first_slice > shape.gate + 1)
    set(shape.gate + 1, layer.shared_forward_seconds, layer.shared_backward_seconds);
  set(shape.merge(), layer.merge_forward_seconds, layer.merge_backward_seconds);
  for (int s = shape.first_slice; s < shape.merge(); ++s) {
    set(s, local * layer.expert_forward_seconds, local * layer.expert_backward_seconds);
    parts[static_cast<std::size_t>(s)].row_forward_seconds = layer.row_forward_seconds;
    parts[static_cast<std::size_t>(s)].row_backward_seconds = layer.row_backward_seconds;
  }
}

}  // namespace

namespace {

int place_of(const Outline& outline, const std::string& tensor) {
  const auto found = std::ranges::find(outline.tensors, tensor, &OutlineTensor::name);
  return static_cast<int>(found - outline.tensors.begin());
}

}  // namespace

namespace {

// Of the parts that are not experts': the products, where they are cut, else the one part of the block.
std::vector<PartTimes> own_times(const OutlineBlock& block, const BlockShape& shape, int tensor_ranks) {
  std::vector<PartTimes> out(shape.parts.size());
  std::size_t products = 0;
  for (std::size_t p = 0; p < out.size(); ++p) {
    if (shape.parts[p].role != PartRole::product) continue;
    const double share = block.cuts[products++] / tensor_ranks;
    out[p].forward_seconds = share * block.forward_seconds;
    out[p].backward_seconds = share * block.backward_seconds;
  }
  if (products > 0) return out;
  out.front().forward_seconds = block.forward_seconds;
  out.front().backward_seconds = block.backward_seconds;
  return out;
}

}  // namespace

Timetable timetable_of(const Outline& outline, const ModelShape& shape, const Ranks& ranks) {
  Timetable out;
  for (int b = 0; b < shape.num_blocks(); ++b)
    out.push_back(own_times(outline.blocks[static_cast<std::size_t>(shape.origin_of(b))],
                            shape.blocks[static_cast<std::size_t>(b)], ranks.tensor));
  for (const ExpertShape& layer : shape.experts)
    add_experts(out[static_cast<std::size_t>(layer.block)], layer,
                *std::ranges::find(outline.experts, layer.name, &OutlineExperts::name),
                layer.experts / ranks.experts);
  for (std::size_t i = 0; i < shape.parameters.size(); ++i) {
    const Piece behind = shape.ready_after(static_cast<int>(i), 1);
    const OutlineTensor& tensor =
        outline.tensors[static_cast<std::size_t>(place_of(outline, shape.parameters[i].name))];
    const double ready = tensor.block == shape.origin_of(behind.block) ? tensor.ready : 1;  // else a copy
    PartTimes& part = out[static_cast<std::size_t>(behind.block)][static_cast<std::size_t>(behind.part)];
    part.gradients.push_back({static_cast<int>(i), ready * part.backward_seconds});
  }
  for (std::vector<PartTimes>& block : out) {
    for (PartTimes& part : block) order_gradients(part);
  }
  return out;
}

RankModel rank_model(const Outline& outline, const EmulationOptions& options, const ExpertLayout& layout,
                     int rank) {
  RankModel out;
  const TensorOptions share = tensor_of(options, rank);
  out.shape = stage_shape(shape_of(outline, layout, share), stage_of(options, rank));
  out.times = timetable_of(outline, out.shape, {.experts = layout.ranks, .tensor = share.ranks});
  for (const ParameterShape& p : out.shape.parameters) out.tensors.push_back(place_of(outline, p.name));
  return out;
}

StageOptions stage_of(const EmulationOptions& options, int rank) {
  StageOptions out = options.stage;
  out.stages = options.mesh.pp;
  out.stage = out.is_whole() ? 0 : options.mesh.coordinates(rank).pp;
  return out;
}

TensorOptions tensor_of(const EmulationOptions& options, int rank) {
  const TableWays ways(options.tables.way);
  return {.ranks = options.mesh.tp,
          .rank = options.mesh.coordinates(rank).tp,
          .bf16 = options.tensor_bf16,
          .tables = !ways.any(TableWay::Kind::hybrid)};
}

PassedValues::PassedValues(const Outline& outline, const EmulationOptions& options, JobStrategies& job)
    : job_(job), tokens_(TokenCuts(outline, options).all()) {
  if (job.pipeline() != nullptr) {
    values_.resize(static_cast<std::size_t>(tokens_.front() * job.pipeline()->width()) +
                   kAlign * kPassedPlaces);
    draw({.seed = options.seed}, values_);
  }
  if (job.tensor_sums() == nullptr) return;
  std::int64_t most = 0;
  for (const SumShape& sum : job.tensor_sums()->sums()) most = std::max(most, sum.values);
  shares_.assign(static_cast<std::size_t>(tokens_.front() * most), 0);
}

void PassedValues::begin() {
  if (job_.pipeline() != nullptr) job_.pipeline()->set_tokens(tokens_);
  if (job_.tensor_sums() != nullptr) job_.tensor_sums()->set_tokens(tokens_);
}

const SumShape* PassedValues::sum_of(const std::string& activation) const {
  if (job_.tensor_sums() == nullptr) return nullptr;
  const std::vector<SumShape>& sums = job_.tensor_sums()->sums();
  const auto found = std::ranges::find(sums, activation, &SumShape::activation);
  return found == sums.end() ? nullptr : &*found;
}

bool PassedValues::has(const std::string& activation) const {
  if (sum_of(activation) != nullptr) return true;
  return job_.pipeline() != nullptr &&
         std::ranges::any_of(job_.pipeline()->chunks(), [&](const ChunkShape& chunk) {
           return chunk.arrives == activation || chunk.leaves == activation;
         });
}

Dense PassedValues::tensor(const TensorName& name) {
  const std::int64_t tokens = tokens_.at(static_cast<std::size_t>(name.micro_batch));
  if (const SumShape* const sum = sum_of(name.name))
    return Dense(std::span(shares_).first(static_cast<std::size_t>(tokens * sum->values)));
  const std::size_t place = static_cast<std::size_t>(name.micro_batch) % kPassedPlaces;
  return Dense(std::span(values_).subspan(kAlign * place,
                                          static_cast<std::size_t>(tokens * job_.pipeline()->width())));
}

Outline of_one_micro_batch(Outline outline, const EmulationOptions& options) {
  const int micro_batches = options.micro_batches;
  for (OutlineBlock& block : outline.blocks) {
    block.forward_seconds /= micro_batches;
    block.backward_seconds /= micro_batches;
    block.update_seconds /= options.mesh.tp;
  }
  for (OutlineExperts& e : outline.experts) {
    for (double* seconds : {&e.gate_forward_seconds, &e.gate_backward_seconds, &e.shared_forward_seconds,
                            &e.shared_backward_seconds, &e.merge_forward_seconds, &e.merge_backward_seconds})
      *seconds /= micro_batches;
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

JobOptions job_options(const EmulationOptions& options, const Outline& outline, int rank) {
  JobOptions out{.parallel = options.parallel,
                 .tables = options.tables,
                 .experts = expert_options(outline, options, rank),
                 .optimizer = options.optimizer,
                 .dtype = DType::float32,
                 .step = {}};
  out.step.lookahead = true;
  out.step.updates_wait = options.updates_wait;
  out.step.stage = stage_of(options, rank);
  out.mesh = options.mesh;
  out.backward = options.backward;
  out.micro_batches = options.micro_batches;
  out.tokens = TokenCuts(outline, options).most();
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

ExpertValues::ExpertValues(JobStrategies& job, const OptimizerOptions& optimizer)
    : job_(job), kinds_{"value"} {
  for (const Moment& moment : moments_of(optimizer)) kinds_.emplace_back(moment.name);
  job.all().state().add("model",
                        {.rows = [this] { return rows(); }, .missing = {}, .commit = {}, .roll_back = {}});
}

std::vector<LiveRow> ExpertValues::rows() {
  std::vector<LiveRow> out;
  std::size_t longest = 0;
  for (const ParameterShape& p : job_.all().shape().parameters) {
    if (p.of_experts == 0) continue;
    for (const std::string& kind : kinds_) {
      LiveRow row;
      row.row = {.key = {"model", kind, p.name},
                 .dtype = DType::float32,
                 .rule = LayoutRule::moves,
                 .shard = shard_of(p),
                 .peers = job_.holders(p)};
      const std::size_t bytes = row.row.num_bytes();
      longest = std::max(longest, bytes);
      row.read = [this, bytes](auto&) { return std::span<const std::byte>(zeros_).first(bytes); };
      row.write = [](std::span<const std::byte>) {};
      out.push_back(std::move(row));
    }
  }
  zeros_.resize(longest);
  return out;
}

std::unique_ptr<ExpertPacking> packing_of(JobStrategies& job, const Outline& outline,
                                          const EmulationOptions& options) {
  const ExpertOptions& experts = options.experts;
  if (job.experts() == nullptr || (experts.packing == "1" && experts.packing_memory == 0)) return nullptr;
  const Comm& world = job.all().world();
  const PackingSetting setting{.micro_batches = options.micro_batches,
                               .tokens = TokenCuts(outline, options).most(),
                               .moments = static_cast<int>(moments_of(options.optimizer).size()),
                               .network = packing_network(world.cost(), options.packing_link, world.size()),
                               .options = options.packing};
  return std::make_unique<ExpertPacking>(job, experts, setting);
}

void StepAccount::ended(const Step& step, const StepTimes& times) {
  all_.times.push_back(times);
  all_.step_seconds.push_back(step.seconds);
  all_.waited_seconds.push_back(step.waited);
  all_.exchange_seconds.push_back(step.exchanged);
  all_.hand_over_seconds.push_back(step.handed_over);
}

void StepAccount::settled(const Step& more) {
  all_.step_seconds.back() += more.seconds;
  all_.waited_seconds.back() += more.waited;
  all_.exchange_seconds.back() += more.exchanged;
}

void StepAccount::complete(const JobStrategies& job, const LinkCost& link) {
  all_.payload_bytes.push_back(static_cast<double>(job.sent_bytes() + job.table_bytes()));
  all_.table_formula_bytes.push_back(static_cast<double>(job.table_formula_bytes(link)));
  all_.compute_seconds.push_back(job.computed_seconds());
}

EmulatedSteps StepAccount::take(std::int64_t warmup, const JobStrategies& job) {
  EmulatedSteps out = all_;
  for (std::vector<double>* values :
       {&out.step_seconds, &out.waited_seconds, &out.exchange_seconds, &out.payload_bytes,
        &out.table_formula_bytes, &out.compute_seconds, &out.hand_over_seconds}) {
    values->erase(values->begin(), values->begin() + warmup);
  }
  out.times.erase(out.times.begin(), out.times.begin() + warmup);
  out.notes = job.notes();
  if (const Pipeline* const stages = job.pipeline(); stages != nullptr) {
    out.kept_bytes = stages->kept().peak_bytes();
    out.on_the_way_bytes = stages->on_the_way().peak_bytes();
    out.fresh_pieces = stages->kept().fresh() + stages->on_the_way().fresh();
  }
  return out;
}

std::vector<std::vector<double>> seconds_of(std::span<const EmulatedSteps> ranks) {
  std::vector<std::vector<double>> out;
  for (const EmulatedSteps& rank : ranks) out.push_back(rank.step_seconds);
  return out;
}

}  // namespace weft
