#include "workload/job_strategies.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/names.h"
#include "collectives/registry.h"
#include "data_parallel/formula.h"
#include "data_parallel/schemes.h"
#include "embedding/ways.h"
#include "experts/policies.h"
#include "weft/error.h"
#include "world/mesh.h"

namespace weft {

namespace {

// Names of the strategies that add up gradients, beside the scheme's own.
constexpr const char* kCopies = "copies";
constexpr const char* kTied = "tied";
constexpr const char* kOfExperts = "expert_parallel";
constexpr const char* kTables = "tables";

// "tables", "tables-2": strategies of one kind have names of their own, which state has as well.
std::string numbered(const std::string& name, std::size_t before) {
  return before == 0 ? name : name + "-" + std::to_string(before + 1);
}

// Parameters by whose they are.
struct Parted {
  struct Tables {
    const TableWay* way = nullptr;
    std::vector<int> parameters;
  };
  std::vector<int> scheme;
  std::vector<int> copies;  // that all tensor-parallel ranks have
  std::vector<int> experts;
  std::vector<int> tied;      // between stages
  std::vector<Tables> apart;  // from it: those of a way together, in the order of the first of them
};
Parted parted(const ModelShape& shape, const TablesOptions& options) {
  Parted out;
  const TableWays ways(options.way);
  const bool some_apart = ways.any(TableWay::Kind::hybrid) || ways.any(TableWay::Kind::dense);
  for (std::size_t p = 0; p < shape.parameters.size(); ++p) {
    const ParameterShape& parameter = shape.parameters[p];
    // A table that is a matrix elsewhere gets a gradient for every row: dense, where tables are apart.
    const bool tied = parameter.tied && some_apart;
    const TableWay& way = tied ? find_table_way("dense") : ways.of(parameter.name);
    if (!parameter.stages.empty()) {
      out.tied.push_back(static_cast<int>(p));
      continue;
    }
    if (parameter.of_experts > 0) {
      out.experts.push_back(static_cast<int>(p));
      continue;
    }
    const bool under_scheme = (!parameter.table && !tied) || way.kind == TableWay::Kind::scheme;
    if (!shape.sums.empty() && parameter.cut_of == 0 && (under_scheme || way.kind == TableWay::Kind::dense)) {
      out.copies.push_back(static_cast<int>(p));
      continue;
    }
    if (under_scheme) {
      out.scheme.push_back(static_cast<int>(p));
      continue;
    }
    auto with = std::ranges::find(out.apart, &way, &Parted::Tables::way);
    if (with == out.apart.end()) with = out.apart.insert(with, {&way, {}});
    with->parameters.push_back(static_cast<int>(p));
  }
  return out;
}

// Throws UsageError.
void check_names(const ModelShape& shape, const TablesOptions& options) {
  std::vector<std::string_view> tables;
  for (const ParameterShape& p : shape.parameters) {
    if (p.table) tables.push_back(p.name);
  }
  const TableWays ways(options.way);
  for (const std::string& name : ways.named()) {
    if (std::ranges::find(tables, name) == tables.end())
      throw UsageError(unknown_name("table", name, tables));
  }
}

constexpr std::array kDataAxes{Axis::dp, Axis::ep};
constexpr std::array kStageAxes{Axis::dp, Axis::ep, Axis::tp};
constexpr std::array kExpertAxes{Axis::dp, Axis::tp};  // ranks with the same experts
constexpr std::uint32_t kStageLabel = 0x7374'6167u;    // "stag"
constexpr std::uint32_t kHolders = 0x686f'6c64u;       // "hold"

std::vector<ParameterInfo> infos_of(const ModelShape& model, const std::vector<int>& parameters) {
  std::vector<ParameterInfo> out;
  for (const int p : parameters) {
    const ParameterShape& shape = model.parameters[static_cast<std::size_t>(p)];
    out.push_back({.name = shape.name,
                   .count = shape.count(),
                   .use = model.block_of(p),
                   .rows = shape.rows(),
                   .shard = shape.of_experts > 0 || shape.cut >= 0 ? shard_of(shape) : Shard{},
                   .tied = shape.tied});
  }
  return out;
}

// With what the job says of them, where sums leave it open.
JobOptions settled(JobOptions options) {
  options.parallel.scheme.wire = wire_of(options.parallel.scheme, options.step.stage);
  return options;
}

}  // namespace

std::string wire_of(const SchemeOptions& scheme, const StageOptions& stage) {
  return scheme.wire == "auto" && stage.bf16_sums ? "bf16" : scheme.wire;
}

Shard shard_of(const ParameterShape& p) {
  if (p.cut_of > 0)
    return Shard::range(p.whole_dims(), static_cast<std::size_t>(p.cut), p.cut_first,
                        p.dims[static_cast<std::size_t>(p.cut)]);
  if (p.of_experts == 0) return Shard::whole(p.dims);
  return Shard::range(p.whole_dims(), 0, p.first, p.dims.front());
}

std::vector<ParameterInfo> under_scheme(const ModelShape& shape, const TablesOptions& options) {
  return infos_of(shape, parted(shape, options).scheme);
}

std::vector<bool> held_tables(const ModelShape& shape, const TablesOptions& options) {
  std::vector<bool> out(shape.parameters.size());
  for (const Parted::Tables& tables : parted(shape, options).apart) {
    if (tables.way->kind != TableWay::Kind::hybrid) continue;
    for (const int p : tables.parameters) out[static_cast<std::size_t>(p)] = true;
  }
  return out;
}

void check_stay_dense(const ModelShape& whole, const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    if (std::ranges::find(whole.parameters, name, &ParameterShape::name) == whole.parameters.end())
      throw UsageError("buckets: '" + name + "' is to stay dense, and there is no such parameter");
  }
}

JobStrategies::JobStrategies(Engine& engine, const Comm& world, const ModelShape& shape,
                             const JobOptions& options)
    : options_(settled(options)),
      mesh_(options.mesh.ranks() == 1 ? Mesh{.dp = world.size()} : options.mesh),
      data_(mesh_.dp == world.size() ? world : axis_group(world, mesh_, Axis::dp)),
      stage_(data_),
      all_(std::make_unique<Strategies>(engine, world, shape, options.step)),
      places_(shape.parameters.size()),
      byte_scale_(options.byte_scale) {
  check_tables(options.tables);
  check_names(shape, options.tables);
  const Parted parts = parted(shape, options.tables);
  if (parts.scheme.empty() && parts.tied.empty()) throw UsageError("the model has nothing but tables");
  if (shape.chunks.empty()) check_stay_dense(shape, options.parallel.scheme.buckets.stay_dense);
  DataParallelOptions parallel = options_.parallel;
  parallel.dtype = options.dtype;
  parallel.one_at_a_time = !shape.experts.empty() && find_expert_policy(options.experts.policy).whole;
  const bool alone = mesh_.dp < world.size() && mesh_.dp == 1;  // nothing is sent: nothing is left behind
  parallel.scheme.name = alone ? lossless_scheme().name : scheme_of_stage();
  parallel_ = &add_parallel(engine, data_, parts.scheme, parallel);
  if (mesh_.tp > 1) stage_ = ranks_along(kStageAxes, {}, kStageLabel);
  if (!parts.copies.empty()) add_copies(parts.copies);
  if (!parts.tied.empty()) add_tied(parts.tied);
  for (const Parted::Tables& tables : parts.apart) {
    const TableWay& way = *tables.way;
    if (way.kind == TableWay::Kind::hybrid) {
      add_hybrid(engine, way, tables.parameters, options);
      continue;
    }
    parallel.name = numbered(kTables, dense_tables_.size());
    parallel.scheme.name = lossless_scheme().name;
    parallel.scheme.all_reduce = way.all_reduce;
    dense_tables_.push_back(&add_parallel(engine, data_, tables.parameters, parallel));
  }
  if (!shape.experts.empty()) {
    add_expert_strategies(parts.experts);
    router_ = &all_->add(std::make_unique<RouterSums>(
        engine, data_, shape.experts,
        RouterSums::Options{.experts = options.experts, .first_slot = all_->next_slot(data_)}));
  }
  if (!shape.sums.empty()) {
    const Comm group = axis_group(world, mesh_, Axis::tp);
    TensorSums::Options sums;
    sums.dtype = options.dtype;
    sums.micro_batches = options.micro_batches;
    sums.tokens = options.tokens;
    sums.first_slot = all_->next_slot(group);
    sums_ = &all_->add(std::make_unique<TensorSums>(engine, group, shape.sums, sums));
  }
  if (!options.step.stage.is_whole()) add_stages();
  all_->install();
}

void JobStrategies::add_stages() {
  const Comm& world = all_->world();
  const Comm stages = axis_group(world, mesh_, Axis::pp);
  PipelineOptions pipeline{
      .stage = options_.step.stage, .backward = options_.backward, .dtype = options_.dtype};
  pipeline.peers = {stage_.rank(), stage_.size(), stage_.group_id()};
  pipeline.micro_batches = options_.micro_batches;
  pipeline.tokens = options_.tokens;
  pipeline.first_slot = all_->next_slot(stages);
  if (sums_ != nullptr) {
    pipeline.copies = sums_->group();
    pipeline.gather_slot = all_->next_slot(sums_->group());
  }
  pipeline_ =
      &all_->add(std::make_unique<Pipeline>(all_->engine(), stages, all_->shape(), pipeline, all_->state()));
}

Comm JobStrategies::ranks_along(std::span<const Axis> axes, std::span<const int> stages,
                                std::uint32_t label) const {
  const auto along = [&](Axis axis) { return std::ranges::find(axes, axis) != axes.end(); };
  const Comm& world = all_->world();
  const Coordinates mine = mesh_.coordinates(world.rank());
  std::vector<int> members;
  for (int rank = 0; rank < world.size(); ++rank) {
    const Coordinates at = mesh_.coordinates(rank);
    const bool of_stage =
        stages.empty() ? at.pp == mine.pp : std::ranges::find(stages, at.pp) != stages.end();
    if (of_stage && (along(Axis::dp) || at.dp == mine.dp) && (along(Axis::tp) || at.tp == mine.tp) &&
        (along(Axis::ep) || at.ep == mine.ep))
      members.push_back(rank);
  }
  return world.subgroup(members, label);
}

bool JobStrategies::is_first_copy() const { return mesh_.coordinates(all_->world().rank()).tp == 0; }

const Scheme& JobStrategies::dense_sums() const {
  const Scheme& run = find_scheme(options_.parallel.scheme.name);
  if (run.dense()) return run;
  return options_.step.stage.bf16_sums ? rounding_scheme() : lossless_scheme();
}

std::string_view JobStrategies::scheme_of_stage() const {
  const StageOptions& stage = options_.step.stage;
  const bool compressed = stage.compressed == kAllStages || stage.stage < stage.compressed;
  return compressed ? std::string_view(options_.parallel.scheme.name) : dense_sums().name;
}

// Dense whatever the scheme, and not rounded: what rounding left behind would be there once a copy.
void JobStrategies::add_copies(const std::vector<int>& parameters) {
  DataParallelOptions options = options_.parallel;
  options.name = kCopies;
  options.dtype = options_.dtype;
  options.scheme.name = lossless_scheme().name;
  options.copies = {mesh_.tp, mesh_.coordinates(all_->world().rank()).tp, stage_.group_id()};
  copies_ = &add_parallel(all_->engine(), data_, parameters, options);
}

DataParallel& JobStrategies::add_parallel(Engine& engine, const Comm& group,
                                          const std::vector<int>& parameters, DataParallelOptions options) {
  options.divisor = mesh_.dp;
  options.first_slot = all_->next_slot(group);
  std::erase_if(options.scheme.buckets.stay_dense, [&](const std::string& name) {
    return std::ranges::none_of(parameters, [&](int p) {
      return all_->shape().parameters[static_cast<std::size_t>(p)].name == name;
    });
  });
  DataParallel& out = all_->add(std::make_unique<DataParallel>(
      engine, group, infos_of(all_->shape(), parameters), options, &all_->state()));
  for (std::size_t i = 0; i < parameters.size(); ++i)
    places_[static_cast<std::size_t>(parameters[i])] = {&out, nullptr, static_cast<int>(i)};
  return out;
}

namespace {

// Of sums of so many values over groups of these sizes, one behind the other, each by its fastest algorithm. Whatever
// ranks are in them, so that all who share a table come to the same.
double sum_seconds(const Comm& comm, std::span<const int> sizes, std::int64_t count, DType dtype) {
  double seconds = 0;
  for (const int size : sizes) {
    const Shape call{.size = size,
                     .count = count,
                     .element_bytes = size_of(dtype),
                     .micro_op_bytes = comm.micro_op_bytes()};
    seconds += choose(Family::all_reduce, call, comm.cost()).seconds(call, comm.cost());
  }
  return seconds;
}

std::string microseconds(double seconds) { return std::to_string(std::llround(seconds * 1e6)) + " us"; }

}  // namespace

// In one sum or two, as asked for or by what they take.
void JobStrategies::choose_tied_sum(const Comm& group, std::span<const int> stages, std::int64_t count,
                                    DataParallelOptions& options) const {
  const std::string& asked = options_.step.stage.tied_sum;
  if (asked == "scheme") return;
  const Scheme& dense = dense_sums();
  options.scheme.name = dense.name;
  if (asked == "fused") return;
  if (asked == "two-step") {
    if (!dense.lossless)
      throw UsageError("tied-sum two-step: sums of two steps are not rounded; bfloat16 is summed fused");
    options.rows_of = data_.size();
    return;
  }
  if (asked == "hierarchical") {
    if (group.node_size() == 1 || group.node_size() == group.size())
      throw UsageError("tied-sum hierarchical: the " + std::to_string(group.size()) +
                       " ranks that have a copy are no whole nodes of several that are known (--nodes)");
    options.scheme.all_reduce = "two_level";
    return;
  }
  if (!dense.lossless) {
    options.why = "auto: fused, because sums of two steps are not rounded";
    return;
  }
  if (group.node_size() > 1) {
    options.why =
        "auto: fused, because copies share nodes: the second of two steps would leave each for every copy";
    return;
  }
  const std::array one{group.size()};
  const std::array two{data_.size(), static_cast<int>(stages.size())};
  const double fused = sum_seconds(group, one, count, options_.dtype),
               apart = sum_seconds(group, two, count, options_.dtype);
  const bool in_one = fused <= apart;
  if (!in_one) options.rows_of = data_.size();
  const std::string at_once = "fused over " + std::to_string(group.size()) + " copies";
  const std::string in_two = "in two steps";
  options.why = "auto: " + (in_one ? at_once : in_two) + " " + microseconds(in_one ? fused : apart) + ", " +
                (in_one ? in_two : at_once) + " " + microseconds(in_one ? apart : fused);
}

// Dense, unless asked for otherwise: what a stage left behind would be another's.
void JobStrategies::add_tied(const std::vector<int>& parameters) {
  constexpr std::uint32_t kLabel = 0x7469'6564u;  // "tied"
  const std::vector<int>& stages =
      all_->shape().parameters[static_cast<std::size_t>(parameters.front())].stages;
  for (const int p : parameters) {
    if (all_->shape().parameters[static_cast<std::size_t>(p)].stages != stages)
      throw UsageError("parameters are tied between different stages");
  }
  const Comm group = ranks_along(kDataAxes, stages, kLabel);
  DataParallelOptions options = options_.parallel;
  options.name = kTied;
  options.dtype = options_.dtype;
  std::int64_t count = 0;
  for (const ParameterInfo& info : infos_of(all_->shape(), parameters)) count += info.count;
  choose_tied_sum(group, stages, count, options);
  tied_ = &add_parallel(all_->engine(), group, parameters, options);
}

Mesh JobStrategies::mesh_with(int expert_ranks) const {
  Mesh out = mesh_;
  out.ep = expert_ranks;
  return out;
}

void JobStrategies::add_hybrid(Engine& engine, const TableWay& way, const std::vector<int>& parameters,
                               const JobOptions& options) {
  std::vector<TableInfo> infos;
  for (const int p : parameters) {
    const ParameterShape& shape = all_->shape().parameters[static_cast<std::size_t>(p)];
    infos.push_back({.name = shape.name,
                     .rows = shape.rows(),
                     .columns = shape.count() / shape.rows(),
                     .use = all_->shape().block_of(p),
                     .rows_per_step = shape.rows_per_step});
  }
  HybridOptions hybrid = hybrid_options(way, options.tables, data_.size());
  hybrid.name = numbered(hybrid.name, hybrids_.size());
  hybrid.dtype = options.dtype;
  hybrid.optimizer = options.optimizer;
  hybrid.lookahead = options.step.lookahead;
  hybrid.memory_rows = options.table_memory_rows;
  hybrid.counted = is_first_copy();
  const StepOptions& step = options.step;
  hybrid.updates_wait = step.clip_norm > 0 || step.skip_not_finite || !step.updates_wait.empty();
  hybrid.first_slot = all_->next_slot(data_);
  HybridEmbedding& added = all_->add(std::make_unique<HybridEmbedding>(engine, data_, infos, hybrid));
  hybrids_.push_back(&added);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const int local = static_cast<int>(i);
    places_[static_cast<std::size_t>(parameters[i])] = {nullptr, &added.table(local), local};
  }
}

void JobStrategies::check_experts(int ranks) const {
  const int data = mesh_.dp, count = options_.experts.count;
  if (ranks < 1 || data % ranks != 0)
    throw UsageError("experts on " + std::to_string(ranks) + " ranks: " + std::to_string(data) +
                     " ranks are no whole number of such groups");
  if (count % ranks != 0)
    throw UsageError("experts: " + std::to_string(count) + " of them cannot be dealt to " +
                     std::to_string(ranks) + " ranks, as many to each");
}

// Of experts that so many ranks have.
DataParallelOptions JobStrategies::expert_sums(int replicas) const {
  DataParallelOptions out = options_.parallel;
  out.name = kOfExperts;
  out.one_at_a_time = find_expert_policy(options_.experts.policy).whole;
  out.dtype = options_.dtype;
  out.scheme.teams = 0;  // as many as its ranks allow
  // Nothing is sent, so nothing is left behind; or it would be left behind several times.
  out.scheme.name = replicas == 1 || mesh_.tp > 1 ? lossless_scheme().name : scheme_of_stage();
  return out;
}

void JobStrategies::add_expert_strategies(const std::vector<int>& parameters) {
  const Comm& world = all_->world();
  const ExpertOptions& o = options_.experts;
  check_experts(o.ranks);
  const Mesh mesh = mesh_with(o.ranks);
  if (mesh.coordinates(world.rank()).ep != o.rank)
    throw UsageError("rank " + std::to_string(world.rank()) + " has the experts of place " +
                     std::to_string(mesh.coordinates(world.rank()).ep) + " of " + std::to_string(o.ranks) +
                     ", and its model those of " + std::to_string(o.rank));
  const Comm replicas = axis_group(world, mesh, Axis::expert_dp, layouts_);
  DataParallelOptions parallel = expert_sums(replicas.size());
  parallel.first_step = first_step_;
  parallel.copies = {mesh_.tp, mesh.coordinates(world.rank()).tp,
                     ranks_along(kExpertAxes, {}, kHolders).group_id()};
  expert_parallel_ = &add_parallel(all_->engine(), replicas, parameters, parallel);
  ExpertsOptions exchange;
  exchange.route = {
      .experts = o.count, .choices = o.choices, .capacity_factor = o.capacity_factor, .slices = o.slices};
  exchange.dtype = options_.dtype;
  const ExpertPolicy& policy = find_expert_policy(o.policy);
  exchange.holds = policy.announces;
  exchange.defers = policy.defers;
  exchange.whole = policy.whole;
  exchange.all_to_all = o.all_to_all;
  if (o.packing != "1") exchange.packing = "packing " + o.packing;
  const Comm group = axis_group(world, mesh, Axis::ep, layouts_);
  exchange.first_slot = all_->next_slot(group);
  experts_ = &all_->add(std::make_unique<Experts>(all_->engine(), group, all_->shape().experts, exchange));
}

// ---- another layout of the experts ----

bool JobStrategies::is_of_experts(const StateRow& row) const {
  return expert_parallel_ != nullptr && row.peers.group == expert_parallel_->group().group_id() &&
         (row.rule == LayoutRule::sum || row.rule == LayoutRule::moves);
}

std::unique_ptr<Relayout> JobStrategies::plan_move(int ranks) {
  if (experts_ == nullptr) throw UsageError("the model has no experts that could be dealt to other ranks");
  check_experts(ranks);
  if (mesh_.dp != all_->world().size())
    throw UsageError("experts of stages or tensor-parallel ranks stay where the mesh has them");
  const Comm& world = all_->world();
  const auto layout = [this, count = options_.experts.count](int ep) {
    return [mesh = mesh_with(ep), count](int rank) {
      const Coordinates at = mesh.coordinates(rank);
      const std::int64_t each = count / mesh.ep;
      return HeldPart{at.ep * each, each, {at.expert_dp, mesh.size(Axis::expert_dp)}};
    };
  };
  RelayoutOptions options{.rank = world.rank(),
                          .size = world.size(),
                          .from = layout(options_.experts.ranks),
                          .to = layout(ranks),
                          .zeros = {}};
  const DataParallelOptions sums = expert_sums(expert_parallel_->group().size());
  if (find_scheme(sums.scheme.name).lossless && sums.scheme.momentum_correction == 0)
    options.zeros = [](const StateRow&) { return true; };
  std::vector<LiveRow> rows = all_->state().rows();
  std::erase_if(rows, [this](const LiveRow& row) { return !is_of_experts(row.row); });
  return std::make_unique<Relayout>(rows, std::move(options));
}

Ticket JobStrategies::start_move(Relayout& move) {
  const Comm& world = all_->world();
  const SubmitOptions submit{.name = "experts that change hands",
                             .traffic = TrafficClass::blocking,
                             .slot = all_->next_slot(world) + 1,  // behind evaluations
                             .step = layouts_};
  return all_->engine().submit(world, submit, [&move](Comm comm) { return Relayout::exchange(comm, &move); });
}

void JobStrategies::lay_out(const ModelShape& shape, int ranks) {
  check_experts(ranks);
  options_.experts.ranks = ranks;
  options_.experts.rank = mesh_with(ranks).coordinates(all_->world().rank()).ep;
  ++layouts_;
  first_step_ = expert_parallel_->operation_step() - 1;  // its comparison is one, too
  const std::array<const Strategy*, 2> leaving{expert_parallel_, experts_};
  all_->make_place(shape, leaving);
  expert_parallel_ = nullptr;
  experts_ = nullptr;
  add_expert_strategies(parted(shape, options_.tables).experts);
  all_->install();
}

void JobStrategies::finish_move(const Relayout& move) {
  const LoadOptions load{
      .owners = {}, .elsewhere = {}, .only = [this](const StateRow& row) { return is_of_experts(row); }};
  all_->state().load(move, load);
}

std::int64_t JobStrategies::expert_elements(int ranks) const {
  std::int64_t sum = 0;
  for (const ParameterShape& p : all_->shape().parameters) {
    if (p.of_experts > 0) sum += p.count() / p.dims.front() * (p.of_experts / ranks);
  }
  return sum;
}

double JobStrategies::predicted_expert_sums(int ranks, const LinkCost& link) const {
  const int replicas = mesh_.dp / ranks;
  if (replicas == 1) return 0;
  ModelShape shape = all_->shape();
  for (ParameterShape& p : shape.parameters) {
    if (p.of_experts == 0) continue;
    p.dims.front() = p.of_experts / ranks;
    p.first = 0;  // any rank's
  }
  const SchemeOptions scheme = expert_sums(replicas).scheme;
  const BucketPlan plan(infos_of(shape, parted(shape, options_.tables).experts), bucket_options(scheme));
  double seconds = 0;
  for (const Bucket& bucket : plan.buckets()) {
    std::vector<ParameterInfo> parts;
    parts.reserve(bucket.pieces.size());
    for (const BucketPiece& piece : bucket.pieces) parts.push_back(plan.parameter(piece.parameter));
    const auto quota =
        bucket.dense ? bucket.count : std::llround(scheme.density * static_cast<double>(bucket.count));
    const Scheme& takes = scheme_of_bucket(find_scheme(scheme.name), bucket.dense, quota, bucket.count);
    seconds += cost_of(takes, scheme,
                       {.size = replicas,
                        .quota = quota,
                        .parts = parts,
                        .link = link,
                        .micro_op_bytes = all_->world().micro_op_bytes()})
                   .seconds;
  }
  return seconds;
}

namespace {

Peers peers_of(const Comm& group) { return {group.rank(), group.size(), group.group_id()}; }

}  // namespace

Peers JobStrategies::holders(const ParameterShape& parameter) const {
  const Comm& world = all_->world();
  const bool of_experts = parameter.of_experts > 0 && expert_parallel_ != nullptr;
  if (!of_experts && mesh_.dp == world.size()) return {world.rank(), world.size()};
  if (of_experts)
    return peers_of(mesh_.tp > 1 ? ranks_along(kExpertAxes, {}, kHolders) : expert_parallel_->group());
  if (parameter.cut_of == 0 && sums_ != nullptr) return peers_of(stage_);
  return peers_of(!parameter.stages.empty() && tied_ != nullptr ? tied_->group() : data_);
}

Peers JobStrategies::counters(const ParameterShape& parameter) const {
  constexpr std::uint32_t kLabel = 0x7374'6570u;  // "step"
  const Comm& world = all_->world();
  if (mesh_.dp == world.size()) return {world.rank(), world.size()};
  if (parameter.stages.empty() || tied_ == nullptr) return peers_of(stage_);
  return peers_of(mesh_.tp > 1 ? ranks_along(kStageAxes, parameter.stages, kLabel) : tied_->group());
}

std::vector<std::string> JobStrategies::owners() const {
  std::vector<std::string> out{std::string(parallel_->name())};
  for (const DataParallel* tables : dense_tables_) out.emplace_back(tables->name());
  if (expert_parallel_ != nullptr) out.emplace_back(expert_parallel_->name());
  if (tied_ != nullptr) out.emplace_back(tied_->name());
  if (copies_ != nullptr) out.emplace_back(copies_->name());
  if (pipeline_ != nullptr && options_.backward.compresses()) out.emplace_back(pipeline_->name());
  return out;
}

bool JobStrategies::has_residuals(std::string_view owner) {
  return owner == DataParallelOptions{}.name || owner == kTied || owner == kCopies || owner == kOfExperts ||
         owner.starts_with(kTables);
}

void JobStrategies::set_lr(double lr) {
  for (HybridEmbedding* tables : hybrids_) tables->set_lr(lr);
}

void JobStrategies::set_density(double density) {
  parallel_->set_density(density);
  if (expert_parallel_ != nullptr) expert_parallel_->set_density(density);
  if (tied_ != nullptr) tied_->set_density(density);
  options_.parallel.scheme.density = density;
}

void JobStrategies::add_optimizer_rows(std::vector<LiveRow>& rows, const Peers& peers) {
  for (HybridEmbedding* tables : hybrids_) {
    for (LiveRow& row : tables->optimizer_rows(peers)) {
      const auto same =
          std::ranges::find_if(rows, [&](const LiveRow& other) { return other.row.key == row.row.key; });
      if (same == rows.end()) {
        rows.push_back(std::move(row));
        continue;
      }
      same->write = [others = same->write, mine = row.write](std::span<const std::byte> values) {
        others(values);
        mine(values);
      };
    }
  }
}

std::uint64_t JobStrategies::sent_bytes() const {
  std::uint64_t out = parallel_->sent_bytes();
  for (const DataParallel* tables : dense_tables_) out += tables->sent_bytes();
  if (expert_parallel_ != nullptr) out += expert_parallel_->sent_bytes();
  if (experts_ != nullptr) out += experts_->step_bytes();
  if (tied_ != nullptr) out += tied_->sent_bytes();
  if (copies_ != nullptr) out += copies_->sent_bytes();
  out *= static_cast<std::uint64_t>(byte_scale_);
  if (pipeline_ != nullptr) out += pipeline_->step_bytes();
  if (sums_ != nullptr) out += sums_->step_bytes();
  return out;
}

std::uint64_t JobStrategies::table_bytes() const {
  std::uint64_t out = 0;
  for (const HybridEmbedding* tables : hybrids_) out += tables->step_bytes();
  return out;
}

std::int64_t JobStrategies::formula_bytes(const LinkCost& link, std::size_t micro_op_bytes) const {
  const int size = data_.size();
  std::int64_t out = weft::formula_bytes(*parallel_, size, link, micro_op_bytes);
  if (tied_ != nullptr) out += weft::formula_bytes(*tied_, tied_->group().size(), link, micro_op_bytes);
  if (copies_ != nullptr) out += weft::formula_bytes(*copies_, size, link, micro_op_bytes);
  for (const DataParallel* tables : dense_tables_)
    out += weft::formula_bytes(*tables, size, link, micro_op_bytes);
  if (expert_parallel_ != nullptr)
    out += weft::formula_bytes(*expert_parallel_, expert_parallel_->group().size(), link, micro_op_bytes) +
           experts_->formula_bytes();
  out *= byte_scale_;
  if (pipeline_ != nullptr) out += pipeline_->formula_bytes();
  if (sums_ != nullptr) out += sums_->formula_bytes();
  return out + table_formula_bytes(link);
}

std::int64_t JobStrategies::table_formula_bytes(const LinkCost& link) const {
  LinkCost whole = link;
  whole.seconds_per_byte /= byte_scale_;
  whole.fold_seconds_per_byte /= byte_scale_;
  whole.scale_up_seconds_per_byte /= byte_scale_;
  std::int64_t out = 0;
  for (const HybridEmbedding* tables : hybrids_) out += tables->formula_bytes(whole);
  return out;
}

std::vector<std::string> JobStrategies::notes() const {
  std::vector<std::string> out;
  for (const HybridEmbedding* tables : hybrids_) {
    for (int t = 0; t < tables->num_tables(); ++t) {
      const HybridTable& table = tables->table(t);
      if (const std::string note = table.note(); !note.empty())
        out.push_back("table '" + table.info().name + "': " + note);
    }
  }
  return out;
}

double JobStrategies::computed_seconds() const {
  double sum = 0;
  const auto add = [&sum](const DataParallel& parallel) {
    for (int b = 0; b < parallel.plan().num_buckets(); ++b) sum += parallel.computed_seconds(b);
  };
  add(*parallel_);
  for (const DataParallel* tables : dense_tables_) add(*tables);
  if (expert_parallel_ != nullptr) add(*expert_parallel_);
  return sum;
}

}  // namespace weft
