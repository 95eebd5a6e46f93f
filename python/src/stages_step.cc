#include "stages_step.h"

#include <algorithm>
#include <utility>

#include "data_parallel/schemes.h"
#include "pipeline/message_set.h"
#include "wait.h"
#include "weft/collective.h"
#include "weft/error.h"

namespace weft::python {

namespace {

constexpr const char* kSameBatch = "all ranks call the same, those of one pipeline with the same batch";

[[noreturn]] void refuse(const std::string& what) { throw UsageError("pipeline: " + what); }

ModelShape shape_of(const StagesSpec& spec) {
  ModelShape out{.model = "of Python", .parameters = spec.parameters, .blocks = {}};
  const std::size_t last = spec.modules.size() - 1;
  for (std::size_t b = 0; b <= last; ++b) {
    PartShape part{.name = "layer." + std::to_string(b), .takes = {}, .gives = {}};
    part.parameters = spec.modules[b];
    if (b > 0) part.takes = {"layer." + std::to_string(b - 1)};
    part.gives = {b == last ? kLoss : part.name};
    out.blocks.push_back({.name = part.name, .parts = {part}});
  }
  return out;
}

Mesh mesh_of(const Comm& world, const StagesSpec& spec) {
  const int stages = spec.stage.stages;
  if (stages < 1) refuse("there is at least one stage, not " + std::to_string(stages));
  if (world.size() % stages != 0)
    refuse(std::to_string(stages) + " stages do not divide " + std::to_string(world.size()) + " ranks");
  return {.dp = world.size() / stages, .pp = stages};
}

void check(const StagesSpec& spec, const Mesh& mesh) {
  if (spec.modules.empty()) refuse("there is no module");
  if (spec.micro_batches < 1)
    refuse("a step has at least one micro-batch, not " + std::to_string(spec.micro_batches));
  check_stage(spec.stage, spec.micro_batches);
  if (spec.stage.is_whole() && spec.backward.compresses())
    refuse(std::string(spec.backward.bits > 0 ? "backward_bits" : "backward_rank") +
           " is of what goes back between stages, and there is one stage");
  weft::check(PipelineOptions{.stage = spec.stage,
                              .backward = spec.backward,
                              .dtype = spec.parallel.dtype,
                              .peers = {},
                              .copies = {}});
  check_messages(spec.backward.messages, spec.stage.stages * spec.stage.chunks, spec.micro_batches);
  check_scheme(spec.parallel.scheme, mesh.dp);
  if (spec.parallel.dtype == DType::float64 && !find_scheme(spec.parallel.scheme.name).wide)
    refuse("float64 gradients are summed by '" + std::string(lossless_scheme().name) + "' only, not by '" +
           spec.parallel.scheme.name + "'");
  if (spec.parallel.clip_local > 0)
    refuse("clip_local does not go with stages: a rank's norm would depend on which modules it has");
  if (spec.parallel.scheme.momentum_correction > 0 && !spec.stage.is_whole())
    refuse("momentum_correction does not go with stages: what they share is summed dense, without it");
  if (spec.parallel.find_unused)
    refuse("find_unused does not go with stages: parameters that nobody used have gradients of zeros");
}

// Of each module. What any rank would refuse of its own stage all of them refuse.
std::vector<int> stages_of(const ModelShape& whole, const StagesSpec& spec) {
  std::vector<int> out(spec.modules.size(), 0), tied;
  for (int s = 0; s < spec.stage.stages; ++s) {
    StageOptions options = spec.stage;
    options.stage = s;
    const ModelShape shape = stage_shape(whole, options);
    for (int b = 0; b < shape.num_blocks(); ++b) out[static_cast<std::size_t>(shape.origin_of(b))] = s;
    if (shape.parameters.empty())
      refuse("stage " + std::to_string(s) +
             " has no parameter that is trained (layers: how many modules each has)");
    for (const ParameterShape& p : shape.parameters) {
      if (p.stages.empty()) continue;
      if (tied.empty()) tied = p.stages;
      if (p.stages != tied)
        refuse("'" + p.name + "' is shared by other stages than another parameter that is shared");
    }
  }
  return out;
}

}  // namespace

void StagesStep::require_whole() const {
  if (interrupted_)
    refuse("the last step was interrupted: this job cannot go on (start it again from a checkpoint)");
}

// Whoever computed the pieces of the last walk may have left it, or a step without its end.
void StagesStep::require_between_steps() {
  if (is_installed()) interrupted_ = interrupted_ || walker_->walking() || job_->all().under_way();
  require_whole();
}

template <class F>
auto StagesStep::uninterrupted(F work) {
  require_whole();
  interrupted_ = true;
  auto out = work();
  interrupted_ = false;
  return out;
}

StagesStep::StagesStep(World& world, StagesSpec spec, std::uint32_t slot)
    : world_(world), spec_(std::move(spec)), slot_(slot) {
  mesh_ = mesh_of(world.comm(), spec_);
  spec_.stage.stage = place().pp;
  check(spec_, mesh_);
  whole_ = shape_of(spec_);
  whole_.check();
  stage_of_module_ = stages_of(whole_, spec_);
  shape_ = stage_shape(whole_, spec_.stage);
}

int StagesStep::origin_of_parameter(int parameter) const {
  const std::string& name = shape_.parameters[static_cast<std::size_t>(parameter)].name;
  return static_cast<int>(std::ranges::find(spec_.parameters, name, &ParameterShape::name) -
                          spec_.parameters.begin());
}

int StagesStep::holders_of(int parameter) const {
  const std::size_t stages = shape_.parameters[static_cast<std::size_t>(parameter)].stages.size();
  return mesh_.dp * std::max(1, static_cast<int>(stages));
}

void StagesStep::agree(const std::vector<AgreedLine>& lines) {
  require_between_steps();
  if (world_.size() == 1) return;
  Agreement agreement(mesh_.dp);
  uninterrupted([&] {
    const SubmitOptions submit{.name = "what ranks of a pipeline have alike",
                               .traffic = TrafficClass::blocking,
                               .slot = slot_ + 1,
                               .step = agreed_++};
    agreement.start(world_.engine(), world_.comm(), submit, lines, kSameBatch);
    await(agreement.ticket());
    return true;
  });
  agreement.check();
}

StagesStep::Passed StagesStep::tell(Passed mine) {
  if (spec_.stage.is_whole()) return mine;
  return uninterrupted([&] {
    const SubmitOptions submit{.name = "what passes between stages",
                               .traffic = TrafficClass::blocking,
                               .slot = slot_,
                               .step = told_++};
    // A walk that is left leaves the operation behind: it has its own.
    const auto values = std::make_shared<Passed>(mine);
    await(world_.engine().submit(axis_group(world_, mesh_, Axis::pp), submit, [values](Comm comm) {
      return broadcast(comm, Dense(std::span<std::int64_t>(*values)));
    }));
    return *values;
  });
}

std::uint32_t StagesStep::num_slots() const {
  // In any group, of any rank: those of the list of strategies; two sums; what passes between stages.
  const auto parameters = static_cast<std::uint32_t>(spec_.parameters.size());
  return 4 + 2 * (2 + parameters) + 2 * static_cast<std::uint32_t>(spec_.stage.stages * spec_.stage.chunks);
}

void StagesStep::install(std::int64_t width, std::uint32_t first_slot) {
  shape_.width = width;
  JobOptions options{.parallel = spec_.parallel,
                     .tables = {},
                     .experts = {},
                     .mesh = mesh_,
                     .backward = spec_.backward,
                     .optimizer = {},
                     .dtype = spec_.parallel.dtype,
                     .step = {}};
  options.parallel.awaited_together = true;  // finish() returns when the last sum is there
  options.step.skip_not_finite = true;       // what such a step means, Python decides
  options.step.stage = spec_.stage;
  options.step.first_slot = first_slot;
  options.micro_batches = spec_.micro_batches;
  job_ = std::make_unique<JobStrategies>(world_.engine(), world_.comm(), shape_, options);
  Driver& driver = *this;
  walker_ = std::make_unique<Walker>(driver, job_->all());
}

StagesStep::Stop StagesStep::walk(const std::function<void()>& go) {
  return uninterrupted([&] {
    stop_ = {};
    go();
    return stop_;
  });
}

void StagesStep::begin_walk() {
  require_between_steps();
  given_.clear();
}

StagesStep::Stop StagesStep::begin(std::span<const std::int64_t> tokens, std::int64_t counted) {
  Strategies& all = job_->all();
  begin_walk();
  scaled_ = false;
  if (job_->pipeline() != nullptr) job_->pipeline()->set_tokens(tokens);
  all.batch_known({.tokens = job_->counts_tokens() ? counted : 0, .lookups = {}});
  return walk([this, &all] { walker_->begin(all.next_table(spec_.micro_batches)); });
}

StagesStep::Stop StagesStep::begin_forward(std::int64_t tokens) {
  begin_walk();
  if (job_->pipeline() != nullptr) job_->pipeline()->set_tokens({&tokens, 1});
  return walk([this] { walker_->begin(job_->all().forward_table()); });
}

StagesStep::Stop StagesStep::go_on() {
  return walk([this] { walker_->go_on(); });
}

double StagesStep::scale() const {
  const double tokens = job_->all().tokens();
  return tokens > 0 ? mesh_.dp / tokens : 0.0;
}

StepResult StagesStep::finish(double loss) {
  Strategies& all = job_->all();
  all.loss_known(job_->counts_tokens() ? loss : 0);
  walk([this, &all] { walker_->walk(all.tables(spec_.micro_batches).settle); });
  return *all.result();
}

const ChunkShape& StagesStep::chunk_at(int chunk) const {
  if (chunk < 0 || static_cast<std::size_t>(chunk) >= shape_.chunks.size())
    refuse("there is no chunk " + std::to_string(chunk) + " of this stage");
  return shape_.chunks[static_cast<std::size_t>(chunk)];
}

void StagesStep::give(int chunk, bool back, int micro_batch, Dense values) {
  const ChunkShape& of = chunk_at(chunk);
  given_[{back ? of.arrives : of.leaves, back, micro_batch}] = values;
}

std::shared_ptr<std::byte[]> StagesStep::arrived(int chunk, bool back, int micro_batch) const {
  const ChunkShape& of = chunk_at(chunk);
  const Pipeline& pipeline = *job_->pipeline();
  return back ? pipeline.gradient_arrived(of.leaves, micro_batch) : pipeline.arrived(of.arrives, micro_batch);
}

void StagesStep::gradient_ready(int parameter, Dense gradient) {
  const auto count = static_cast<std::size_t>(gradient.count);
  if (gradient.dtype == DType::float64)
    job_->all().gradient_ready(parameter, std::span(reinterpret_cast<const double*>(gradient.data), count));
  else
    job_->all().gradient_ready(parameter, std::span(reinterpret_cast<const float*>(gradient.data), count));
}

void StagesStep::result_of(int parameter, Dense out) const {
  const auto count = static_cast<std::size_t>(out.count);
  if (out.dtype == DType::float64)
    job_->all().result_of(parameter, std::span(reinterpret_cast<double*>(out.data), count));
  else
    job_->all().result_of(parameter, std::span(reinterpret_cast<float*>(out.data), count));
}

StateSnapshot StagesStep::save() { return job_->all().state().save(world_.rank(), world_.size()); }

void StagesStep::load(std::span<const StateSnapshot> snapshots) {
  const auto has = [](const std::vector<ParameterShape>& parameters, const std::string& name) {
    return std::ranges::find(parameters, name, &ParameterShape::name) != parameters.end();
  };
  const LoadOptions options{.owners = {},
                            .elsewhere =
                                [this, has](const StateKey& key) {
                                  return has(whole_.parameters, key.name) &&
                                         !has(shape_.parameters, key.name);
                                },
                            .only = nullptr,
                            .kin = JobStrategies::has_residuals};
  const SnapshotSource source(snapshots, world_.rank(), world_.size());
  job_->all().state().load(source, options);
  // Where any rank's own state has errors of messages, that of the last stage's last rank has.
  if (const std::string line = job_->left_out(source); !line.empty() && world_.rank() == world_.size() - 1)
    world_.engine().log_line(line);
}

std::vector<Ticket> StagesStep::tickets() const {
  return job_ == nullptr ? std::vector<Ticket>() : job_->all().tickets();
}

Task<void> StagesStep::compute(Piece piece) {
  if (piece.work == weft::Work::update) co_return;
  const bool back = goes_back(piece.work);
  if (back && !std::exchange(scaled_, true) && job_->pipeline() != nullptr)
    job_->pipeline()->set_scale(scale());
  stop_ = {.at = back                                ? Stop::At::backward
                 : piece.work == weft::Work::forward ? Stop::At::forward
                                                     : Stop::At::weights,
           .module = shape_.origin_of(piece.block),
           .micro_batch = piece.micro_batch,
           .ready = {}};
  const Piece whole{weft::Work::backward, piece.block, piece.part, piece.micro_batch};
  for (int p = 0; adds_gradients(piece.work) && p < static_cast<int>(shape_.parameters.size()); ++p) {
    if (shape_.ready_after(p, spec_.micro_batches) == whole) stop_.ready.push_back(p);
  }
  Walker::Gate& resumed = walker_->gate();
  co_await resumed;
}

Task<void> StagesStep::wait(Ticket ticket) {
  await(ticket);
  co_return;
}

void StagesStep::await(const Ticket& ticket) {
  python::wait(world_.engine(), ticket);
  if (ticket.error()) std::rethrow_exception(ticket.error());
}

Dense StagesStep::tensor(const TensorName& name) {
  const auto found = given_.find({name.name, name.of == TensorName::Of::gradient, name.micro_batch});
  return found == given_.end() ? TensorSource::tensor(name) : found->second;
}

}  // namespace weft::python
