#include "planner/messages.h"

#include <algorithm>
#include <numeric>

#include "patterns/blocks.h"
#include "planner/text.h"
#include "weft/error.h"
#include "workload/drawn_experts.h"
#include "workload/job_strategies.h"
#include "workload/step_parts.h"
#include "workload/token_cuts.h"

namespace weft {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw UsageError("backward-messages critical: " + what); }

// What one rank of a stage has to do in a micro-batch, by chunk of the model.
class StageTimes {
 public:
  StageTimes(const Outline& outline, const EmulationOptions& options, const KernelCosts& kernels,
             JobStrategies& job, int rank)
      : outline_(outline),
        micro_batches_(options.micro_batches),
        model_(rank_model(outline, options, expert_layout(options, rank), rank)) {
    if (job.tensor_sums() == nullptr) return;
    sums_ = job.tensor_sums()->sums();
    const std::vector<PlanRow> rows = job.tensor_sums()->rows();
    for (std::size_t s = 0; s < rows.size(); ++s) {
      const double rounding = sums_[s].bf16 ? kernels.round_element + kernels.widen_element : 0;
      sum_seconds_.push_back(rows[s].seconds / options.micro_batches +
                             rounding * static_cast<double>(rows[s].count));
    }
  }
  const std::vector<ChunkShape>& chunks() const { return model_.shape.chunks; }
  double of(const ChunkShape& chunk, bool forward) const {
    double out = 0;
    for (int b = chunk.first; b < chunk.first + chunk.count; ++b) {
      for (const PartTimes& part : model_.times[static_cast<std::size_t>(b)])
        out += forward ? part.forward_seconds : part.backward_seconds;
      out += rows_of(b, forward);
    }
    for (std::size_t s = 0; s < sums_.size(); ++s) {
      const bool here = sums_[s].block >= chunk.first && sums_[s].block < chunk.first + chunk.count;
      if (here && sums_[s].gradient != forward) out += sum_seconds_[s];
    }
    return out;
  }

 private:
  // Of experts, where all of them get as many.
  double rows_of(int block, bool forward) const {
    double out = 0;
    for (const ExpertShape& layer : model_.shape.experts) {
      if (layer.block != block) continue;
      const OutlineExperts& experts = *std::ranges::find(outline_.experts, layer.name, &OutlineExperts::name);
      out += even_rows(outline_, experts) / micro_batches_ *
             (forward ? experts.row_forward_seconds : experts.row_backward_seconds);
    }
    return out;
  }

  const Outline& outline_;
  const int micro_batches_;
  const RankModel model_;
  std::vector<SumShape> sums_;
  std::vector<double> sum_seconds_;
};

// Of messages between two stages.
class StageLink {
 public:
  StageLink(const EmulationOptions& options, const KernelCosts& kernels, std::int64_t tokens,
            std::int64_t width)
      : options_(options),
        kernels_(kernels),
        shares_(options.mesh.tp, tokens),
        codec_("gradients", {width, options.backward, options.stage.bf16}) {}

  MessageSeconds dense(int from, int to) const {
    return of(from, to, shares_.count(0) * codec_.form().width * (options_.stage.bf16 ? 2 : 4));
  }
  MessageSeconds coded(int from, int to) const {
    MessageSeconds out = of(from, to, codec_.form().bytes(shares_.count(0)));
    out.more += codec_.encode_seconds(kernels_, shares_.count(0));
    for (int r = 0; r < shares_.size(); ++r)
      out.more += StageCodec::decode_seconds(kernels_, codec_.form(), shares_.count(r));
    return out;
  }

 private:
  MessageSeconds of(int from, int to, std::int64_t message) const {
    const LinkCost& link = *options_.planned_link;
    const auto node = [&](int stage) { return options_.mesh.rank_of({.pp = stage}) / link.node_ranks; };
    const bool inside = node(from) == node(to);
    const LinkCost cost = inside ? link.inside() : link;
    const auto bytes = static_cast<double>(message);
    MessageSeconds out{.port = bytes * cost.seconds_per_byte * (inside ? 1 : link.node_ranks),
                       .more = cost.hop_seconds};
    if (shares_.size() > 1) {
      const LinkCost near = link.inside();
      out.more += (shares_.size() - 1) * (near.hop_seconds + bytes * near.seconds_per_byte);
    }
    return out;
  }

  const EmulationOptions& options_;
  const KernelCosts& kernels_;
  const Blocks shares_;
  const StageCodec codec_;
};

// Of its gradients, what the backward of its last micro-batch does not hide.
double tail_of(const JobStrategies& job, double last_backward) {
  double sums = 0;
  for (const PlanRow& row : job.all().rows()) sums += row.traffic == TrafficClass::gradient ? row.seconds : 0;
  return std::max(0.0, sums - last_backward);
}

}  // namespace

PipelineTimes pipeline_times(const Outline& outline, const EmulationOptions& emulation,
                             const SimulationOptions& simulation) {
  const int stages = emulation.mesh.pp;
  const auto chunks = static_cast<std::size_t>(stages) * static_cast<std::size_t>(emulation.stage.chunks);
  const Outline of_one = of_one_micro_batch(with_dense_tables(outline, emulation.tables), emulation);
  const std::int64_t tokens = TokenCuts(outline, emulation).most();
  const StageLink link(emulation, simulation.costs.kernels, tokens, outline.width);
  const bool halves = pipeline_schedule_of(emulation.stage.schedule) == PipelineSchedule::zb_h1;
  PipelineTimes out;
  out.forward = out.backward = out.weights = std::vector<double>(chunks);
  out.ahead = out.back = out.coded = std::vector<MessageSeconds>(chunks);
  const auto time = [&](int stage, JobStrategies& job) {
    const StageTimes times(of_one, emulation, simulation.costs.kernels, job,
                           emulation.mesh.rank_of({.pp = stage}));
    double last = 0;
    for (const ChunkShape& chunk : times.chunks()) {
      const auto c = static_cast<std::size_t>(chunk.number);
      last = times.of(chunk, false);
      out.forward[c] = times.of(chunk, true);
      out.backward[c] = last * PartTimes::share_of(halves ? Work::input_gradient : Work::backward);
      out.weights[c] = last - out.backward[c];
      out.ahead[c] = link.dense(stage, (stage + 1) % stages);
      const int before = (stage + stages - 1) % stages;
      out.back[c] = link.dense(stage, before);
      out.coded[c] = link.coded(stage, before);
    }
    out.tail.push_back(tail_of(job, last));
  };
  for_each_stage(outline, emulation, simulation.ranks, time);
  return out;
}

MessagesChoice choose_messages(const Outline& outline, EmulationOptions emulation,
                               const SimulationOptions& simulation) {
  if (emulation.mesh.pp == 1) refuse("there is one stage, and nothing goes back between stages");
  if (!emulation.backward.compresses())
    refuse("nothing goes back as factors or whole numbers (--backward-rank, --backward-bits)");
  if (!emulation.planned_link) refuse("nobody has said what a message between stages takes (--plan-link)");
  emulation.backward.messages = BackwardOptions{}.messages;
  const PipelineTimes times = pipeline_times(outline, emulation, simulation);
  if (!(std::accumulate(times.forward.begin(), times.forward.end(), 0.0) > 0))
    refuse("the outline of " + outline.model + " has no seconds by which a step could be timed");
  StageOptions stage = emulation.stage;
  stage.stages = emulation.mesh.pp;
  const PipelineShape shape = pipeline_shape(stage, emulation.micro_batches);
  const MessageSet chosen = critical_messages(shape, times);
  MessageSet none(shape.micro_batches), epilogue = none, all = none;
  for (int chunk = 1; chunk < shape.all_chunks(); ++chunk) {
    for (int m = 0; m < shape.micro_batches; ++m) {
      all.add(chunk, m);
      if (in_epilogue(shape, chunk, m)) epilogue.add(chunk, m);
    }
  }
  MessagesChoice out{.messages = chosen.text(),
                     .chosen = chosen.count(),
                     .all = all.count(),
                     .epilogue = epilogue.count(),
                     .step_seconds = step_seconds(shape, times, chosen),
                     .none_seconds = step_seconds(shape, times, none),
                     .epilogue_seconds = step_seconds(shape, times, epilogue),
                     .all_seconds = step_seconds(shape, times, all),
                     .why = {}};
  out.why = std::to_string(out.chosen) + " of " + std::to_string(out.all) +
            " messages are compressed, and none of them could be missed; a step takes " +
            milliseconds(out.step_seconds) + " by these seconds, with none " +
            milliseconds(out.none_seconds) + ", with the " + std::to_string(out.epilogue) +
            " of the epilogue " + milliseconds(out.epilogue_seconds) + ", with all " +
            milliseconds(out.all_seconds);
  return out;
}

}  // namespace weft
