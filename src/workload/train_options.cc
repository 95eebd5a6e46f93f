#include "workload/train_options.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numbers>
#include <optional>

#include "base/identity.h"
#include "base/names.h"
#include "data_parallel/schemes.h"
#include "embedding/ways.h"
#include "experts/packing.h"
#include "pipeline/pipeline.h"
#include "state/optimizer.h"
#include "step/stage.h"
#include "weft/error.h"
#include "workload/job_strategies.h"
#include "workload/model_shapes.h"

namespace weft {

namespace {

std::string text_of(double value) {
  std::string text = std::to_string(value);
  while (text.back() == '0') text.pop_back();
  if (text.back() == '.') text.pop_back();
  return text;
}
std::string text_of(std::int64_t value) { return std::to_string(value); }

template <class T>
void require(bool holds, const char* name, const char* rule, T value) {
  if (!holds) throw UsageError(std::string(name) + " must be " + rule + ", not " + text_of(value));
}

void require_known(std::string_view kind, const std::string& name,
                   const std::vector<std::string_view>& known) {
  if (std::find(known.begin(), known.end(), name) == known.end())
    throw UsageError(unknown_name(kind, name, known));
}

void check_schedule(const TrainOptions& o) {
  validate(o.optimizer);
  require_known("schedule of the learning rate", o.lr_schedule, lr_schedule_names());
  require(o.lr_warmup >= 0, "lr-warmup", "0 or more", o.lr_warmup);
  require(o.lr_final >= 0 && o.lr_final <= 1, "lr-final", "0 to 1", o.lr_final);
  require(o.clip_norm >= 0 && std::isfinite(o.clip_norm), "clip-norm", "0 or more", o.clip_norm);
  if (o.clip_local && o.clip_norm == 0) throw UsageError("clip-local clips to clip-norm, which is 0");
  require_known("maker of optimizers", o.optimizer_from, {"weft", "torch"});
  if (o.scheme.momentum_correction > 0 && (o.optimizer.name != "sgd" || o.optimizer.momentum != 0)) {
    throw UsageError("momentum-correction is for sgd without a momentum of its own, not for " +
                     o.optimizer.name + " with " + text_of(o.optimizer.momentum));
  }
}

}  // namespace

std::vector<std::string_view> lr_schedule_names() { return {"constant", "cosine"}; }

DataOptions data_options(const TrainOptions& o) {
  DataOptions out = o.data;
  out.words = o.sizes.vocabulary;
  out.seed = o.seed;
  return out;
}

ModelOptions model_sizes(const TrainOptions& o, const DataSource& source) {
  ModelOptions out = o.sizes;
  out.vocabulary = source.vocabulary();
  out.seed = o.seed;
  return out;
}

Mesh mesh_of(const ModelOptions& sizes, int ranks) {
  return {.dp = ranks / sizes.stage.stages / sizes.tensor.ranks,
          .pp = sizes.stage.stages,
          .tp = sizes.tensor.ranks,
          .ep = sizes.experts.ranks};
}

ModelOptions with_rank(ModelOptions sizes, int rank, int ranks) {
  const Coordinates at = mesh_of(sizes, ranks).coordinates(rank);
  sizes.experts.rank = at.ep;
  sizes.stage.stage = at.pp;
  sizes.tensor.rank = at.tp;
  return sizes;
}

DataRank data_rank_of(const ModelOptions& sizes, int rank, int ranks) {
  const Mesh mesh = mesh_of(sizes, ranks);
  return {mesh.coordinates(rank).dp, mesh.dp};
}

BatchOptions batch_options(const TrainOptions& o, int rank, int ranks) {
  const DataRank data = data_rank_of(o.sizes, rank, ranks);
  return {.kind = batch_kind_of(o.model),
          .sequences = o.global_batch,
          .length = sequence_length(o),
          .seed = o.seed,
          .rank = data.rank,
          .size = data.size};
}

std::int64_t sequences_of_rank(const TrainOptions& o, int data_ranks) {
  return (o.global_batch + data_ranks - 1) / data_ranks;
}

std::int64_t sequence_length(const TrainOptions& o) { return o.length != 0 ? o.length : o.sizes.context; }

namespace {

// What is of all gradients of a rank in one does not go with tables that are apart from the others.
void check_with_tables(const TrainOptions& o) {
  const TableWays ways(o.tables.way);
  const bool held = ways.any(TableWay::Kind::hybrid);
  if (held) validate_rows(optimizer_options(o));
  if (!held && !ways.any(TableWay::Kind::dense)) return;
  const std::string and_not = " goes with tables of way 'scheme', not with '" + o.tables.way + "': ";
  if (o.clip_local && o.clip_norm > 0)
    throw UsageError("clip-local" + and_not + "their gradients are not part of the rank's norm");
  if (o.scheme.momentum_correction > 0)
    throw UsageError("momentum-correction" + and_not + "they would be trained without momentum");
}

void check_with_experts(const TrainOptions& o) {
  if (o.sizes.experts.ranks == 1 || !has_experts(o.model)) return;
  const std::string and_not = " does not go with experts that ranks share (ep above 1): ";
  if (o.find_unused) throw UsageError("find-unused" + and_not + "each expert would have steps of its own");
  if (o.clip_local && o.clip_norm > 0)
    throw UsageError("clip-local" + and_not + "a rank's norm would depend on which experts it has");
  if (o.sizes.layers < o.sizes.experts.every)
    throw UsageError("mesh: of " + std::to_string(o.sizes.layers) +
                     " layers none has experts that ranks could share");
}

void check_with_stages(const TrainOptions& o, int ranks) {
  const StageOptions& stage = o.sizes.stage;
  check(PipelineOptions{.stage = stage, .backward = o.backward});
  if (stage.is_whole()) {
    if (o.backward.compresses())
      throw UsageError(std::string(o.backward.bits > 0 ? "backward-bits" : "backward-rank") +
                       " is of what goes back between stages, and there is one stage");
    return;
  }
  if (ranks > 0 && ranks % stage.stages != 0)
    throw UsageError("mesh: " + std::to_string(stage.stages) + " stages do not divide " +
                     std::to_string(ranks) + " ranks");
  check_stage(stage, o.accumulate);
  check_stay_dense(model_shape(o.model, o.sizes), o.scheme.buckets.stay_dense);  // a stage has not all names
  check_messages(o.backward.messages, stage.stages * stage.chunks, o.accumulate);
  const std::string and_not = " does not go with stages: ";
  if (o.clip_local && o.clip_norm > 0)
    throw UsageError("clip-local" + and_not + "a rank's norm would depend on which layers it has");
  if (o.find_unused) throw UsageError("find-unused" + and_not + "each stage would have steps of its own");
  if (o.scheme.momentum_correction > 0)
    throw UsageError("momentum-correction" + and_not + "what they share is summed dense, without it");
  if (is_auto_packing(o.sizes.experts.packing))
    throw UsageError("expert-packing auto" + and_not + "experts stay where the mesh has them");
}

void check_with_tensor_ranks(const TrainOptions& o, int ranks) {
  const TensorOptions& tensor = o.sizes.tensor;
  if (tensor.is_whole()) return;
  const int others = o.sizes.stage.stages * tensor.ranks;
  if (ranks > 0 && ranks % others != 0)
    throw UsageError("mesh: " + std::to_string(others) +
                     " ranks of stages and tensor-parallel ranks do not divide " + std::to_string(ranks) +
                     " ranks");
  const std::string and_not = " does not go with tensor-parallel ranks: ";
  if (o.clip_local && o.clip_norm > 0)
    throw UsageError("clip-local" + and_not + "a rank's norm would depend on its share of the matrices");
  if (o.scheme.momentum_correction > 0)
    throw UsageError("momentum-correction" + and_not + "what all of them have is summed dense, without it");
  if (o.find_unused) throw UsageError("find-unused" + and_not + "each would have steps of its own");
  if (is_auto_packing(o.sizes.experts.packing))
    throw UsageError("expert-packing auto" + and_not + "experts stay where the mesh has them");
}

}  // namespace

void check_train(const TrainOptions& o, int ranks) {
  check_model(o.model, o.sizes);
  check_with_stages(o, ranks);
  check_with_tensor_ranks(o, ranks);
  const int data_ranks = ranks / o.sizes.stage.stages / o.sizes.tensor.ranks;
  if (ranks > 0 && data_ranks % o.sizes.experts.ranks != 0)
    throw UsageError("mesh: " + std::to_string(o.sizes.experts.ranks) +
                     " ranks that share the experts do not divide " + std::to_string(data_ranks) + " ranks");
  check_with_experts(o);
  require(sequence_length(o) >= 1 && sequence_length(o) <= o.sizes.context, "length",
          ("1 to the model's context of " + std::to_string(o.sizes.context)).c_str(), o.length);
  require(o.global_batch >= 1 && o.global_batch <= 1 << 24, "global-batch", "1 to 2^24 sequences",
          o.global_batch);
  require(o.steps >= 1, "steps", "1 or more", o.steps);
  require(o.accumulate >= 1 && o.accumulate <= 1 << 20, "accumulate", "1 to 2^20",
          std::int64_t{o.accumulate});
  require(o.threads >= 1 && o.threads <= 1024, "threads", "1 to 1024", std::int64_t{o.threads});
  check_scheme(o.scheme, data_ranks);
  check_tables(o.tables);
  check_with_tables(o);
  require(o.warmup_steps >= 0, "warmup-steps", "0 or more", o.warmup_steps);
  check_schedule(o);
}

std::string why_updates_wait(const TrainOptions& o) {
  std::string why;
  const auto add = [&why](bool holds, std::string_view reason) {
    if (holds) why += (why.empty() ? "" : ", ") + std::string(reason);
  };
  add(o.clip_norm > 0 && !o.clip_local, "clip-norm is of all gradients");
  add(o.skip_not_finite, "skip-not-finite may leave the step out");
  add(o.find_unused, "find-unused asks all ranks");
  return why;
}

DataParallelOptions data_parallel_options(const TrainOptions& o) {
  DataParallelOptions out;
  out.scheme = o.scheme;
  out.scheme.seed = o.seed;
  if (!find_scheme(o.scheme.name).selects) out.scheme.momentum_correction = 0;
  out.clip_local = o.clip_local ? o.clip_norm : 0;
  out.find_unused = o.find_unused;
  return out;
}

OptimizerOptions optimizer_options(const TrainOptions& o) {
  OptimizerOptions out = o.optimizer;
  const bool corrects = o.scheme.momentum_correction > 0;
  if (corrects && !find_scheme(o.scheme.name).selects) out.momentum = o.scheme.momentum_correction;
  return out;
}

double lr_at(const TrainOptions& o, std::int64_t step) {
  if (step < o.lr_warmup)
    return o.optimizer.lr * static_cast<double>(step + 1) / static_cast<double>(o.lr_warmup);
  if (o.lr_schedule != "cosine") return o.optimizer.lr;
  const std::int64_t falling = o.steps - 1 - o.lr_warmup;  // steps from the first to the last
  const double done =
      falling > 0 ? std::min(1.0, static_cast<double>(step - o.lr_warmup) / static_cast<double>(falling))
                  : 1.0;
  const double share = o.lr_final + (1 - o.lr_final) * 0.5 * (1 + std::cos(std::numbers::pi * done));
  return o.optimizer.lr * share;
}

double density_at(const TrainOptions& o, std::int64_t step) {
  if (!find_scheme(o.scheme.name).selects) return 1;
  const double density = o.scheme.density;
  if (step >= o.warmup_steps || density >= kWarmUpDensity) return density;
  const double done = static_cast<double>(step) / static_cast<double>(o.warmup_steps);
  return kWarmUpDensity * std::pow(density / kWarmUpDensity, done);
}

std::uint64_t hash_of(const TrainOptions& o) {
  std::uint64_t hash = 0;
  const auto add = [&hash](std::uint64_t part) { hash = mix(hash ^ part); };
  const StageOptions& stage = o.sizes.stage;
  for (const std::string* text :
       {&o.model, &o.lr_schedule, &o.data.kind, &o.data.vocabulary, &o.scheme.name, &stage.tied_sum}) {
    add(text->size());
    for (const char c : *text) add(static_cast<unsigned char>(c));
  }
  for (const std::int64_t value : {o.global_batch, o.length, o.steps, std::int64_t{o.accumulate},
                                   o.warmup_steps, o.lr_warmup, o.data.synthetic_tokens})
    add(static_cast<std::uint64_t>(value));
  // (A stage's tensors tell nothing of layers that are dealt to nobody, none tells of heads.)
  for (const std::int64_t size :
       {o.sizes.vocabulary, o.sizes.context, o.sizes.width, o.sizes.hidden, o.sizes.projection,
        std::int64_t{o.sizes.layers}, std::int64_t{o.sizes.heads}, o.sizes.samples})
    add(static_cast<std::uint64_t>(size));
  const ExpertOptions& e = o.sizes.experts;
  if (o.sizes.untied) add(1);
  for (const int value : {stage.stages, stage.compressed, stage.bf16 ? 1 : 0, stage.bf16_sums ? 1 : 0})
    add(static_cast<std::uint64_t>(value));
  if (!o.sizes.tensor.is_whole()) {
    add(static_cast<std::uint64_t>(o.sizes.tensor.ranks));
    if (o.sizes.tensor.bf16) add(16);
  }
  for (const int value : {e.count, e.choices, e.every, e.shared, e.slices, e.ranks})
    add(static_cast<std::uint64_t>(value));
  for (const double value :
       {e.capacity_factor, e.balance_loss, e.z_loss, e.jitter, o.sizes.dropout, o.lr_final,
        o.planned_link.hop_seconds, o.planned_link.seconds_per_byte, o.planned_link.fold_seconds_per_byte})
    add(std::bit_cast<std::uint64_t>(value));
  if (o.planned_link.node_ranks > 1) {
    add(static_cast<std::uint64_t>(o.planned_link.node_ranks));
    for (const double value : {o.planned_link.scale_up_hop_seconds, o.planned_link.scale_up_seconds_per_byte})
      add(std::bit_cast<std::uint64_t>(value));
  }
  add(o.seed);
  return hash;
}

}  // namespace weft
