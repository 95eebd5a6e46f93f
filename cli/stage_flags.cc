#include "stage_flags.h"

#include <algorithm>
#include <charconv>

#include "data_parallel/schemes.h"
#include "patterns/pipeline.h"
#include "weft/error.h"
#include "workload/model_shapes.h"

namespace weft::cli {

void add_stage_flags(Settings& s, TrainFlags& t) {
  BackwardOptions& backward = t.options.backward;
  s.group("Stages (--mesh pp=2; gpt, gpt-moe, bert)");
  s.add("schedule", t.schedule,
        "of micro-batches (--accumulate): " +
            list_of({std::begin(kPipelineSchedules), std::end(kPipelineSchedules)}) + " (default 1f1b)");
  s.add("stage-chunks", t.stage_chunks, "interleaved: separate runs of layers that a stage has");
  s.add("stage-layers", t.stage_layers,
        "N,N,...: layers of each stage, interleaved of each chunk of the model (default: evenly, the first "
        "ones one "
        "more)");
  s.add("pipeline-warmup", t.pipeline_warmup,
        "1f1b, zb-h1: single (default), double: twice as many forwards first, so that sends hide");
  s.add("compressed-stages", t.compressed_stages,
        "the first so many have gradients summed by --scheme, the others dense: N, all (default); auto: by "
        "what the plan predicts");
  s.add("factor-rank", t.factor_rank,
        "auto, with compressed-stages auto: columns of all factors (powersgd-rank, backward-rank) by what "
        "the plan "
        "predicts, the most of which half as many would not save 5 % of a step");
  s.add("tied-sum", t.tied_sum,
        "how a table that two stages have is summed: " + list_of({kTiedSums.begin(), kTiedSums.end()}) +
            " (default auto: fused or two-step by cost; scheme: as all else, for comparison)");
  s.add("stage-wire", t.stage_wire, "what passes between stages travels as: float32 (default), bf16");
  s.add(
      "stage-sums", t.stage_sums,
      "sums of gradients beside a scheme that compresses, what stages sum dense and powersgd's factors, in: "
      "float32 (default), bf16 (so it is with dense-bf16)");
  s.add("tensor-wire", t.tensor_wire,
        "what tensor-parallel ranks (--mesh tp=2) add up travels as: float32 (default), bf16");
  s.add("backward-rank", backward.columns,
        "columns of the factors that gradients between stages travel as; 0 (default): as they are");
  s.add("backward-bits", backward.bits,
        "bits of the whole numbers that they travel as instead, 4 or 8; 0 (default): as they are");
  s.add("backward-messages", backward.messages,
        "which of them do: epilogue (default), all; critical: those that a step waits for, by what the plan "
        "predicts");
  s.add("backward-forgets", t.backward_forgets, "what that leaves behind is lost, for comparison");
}

bool is_bf16(const char* flag, const std::string& text) {
  if (text != "float32" && text != "bf16")
    throw UsageError(std::string("--") + flag + " is float32 or bf16, not '" + text + "'");
  return text == "bf16";
}

void give_way(BackwardOptions& backward, const IsTyped& typed) {
  const bool bits = typed("backward-bits"), columns = typed("backward-rank");
  if (bits && !columns) backward.columns = 0;
  if (columns && !bits) backward.bits = 0;
}

bool has_factors(const TrainFlags& t) {
  const std::string& scheme = t.options.scheme.name;
  return scheme == "powersgd" || scheme == kAuto || t.options.backward.columns > 0;
}

void resolve_stages(TrainFlags& t, int stages) {
  StageOptions& stage = t.options.sizes.stage;
  stage = {.stages = stages, .schedule = t.schedule, .chunks = t.stage_chunks};
  if (t.pipeline_warmup != "single" && t.pipeline_warmup != "double")
    throw UsageError("--pipeline-warmup is single or double, not '" + t.pipeline_warmup + "'");
  stage.double_warmup = t.pipeline_warmup == "double";
  stage.bf16 = is_bf16("stage-wire", t.stage_wire);
  stage.bf16_sums = is_bf16("stage-sums", t.stage_sums);
  for (std::size_t at = 0; at < t.stage_layers.size();) {
    const std::size_t end = std::min(t.stage_layers.find(',', at), t.stage_layers.size());
    int count = 0;
    const auto [rest, error] =
        std::from_chars(t.stage_layers.data() + at, t.stage_layers.data() + end, count);
    if (error != std::errc{} || rest != t.stage_layers.data() + end || count < 1)
      throw UsageError("--stage-layers '" + t.stage_layers +
                       "' is no list of numbers of layers, as 3,3,2 is");
    stage.layers.push_back(count);
    at = end + 1;
  }
  const std::string& compressed = t.compressed_stages;
  const char* const end = compressed.data() + compressed.size();
  if (compressed != "all" && compressed != kAuto) {
    const auto [rest, error] = std::from_chars(compressed.data(), end, stage.compressed);
    if (error != std::errc{} || rest != end || stage.compressed < 0)
      throw UsageError("--compressed-stages is a number of stages, all, or auto, not '" + compressed + "'");
  }
  if (!t.factor_rank.empty() && (t.factor_rank != kAuto || compressed != kAuto))
    throw UsageError(
        "--factor-rank is auto, with --compressed-stages auto; by hand: --powersgd-rank, --backward-rank");
  if (!t.factor_rank.empty() && !has_factors(t))
    throw UsageError("--factor-rank auto: nothing travels as factors (--scheme powersgd, --backward-rank)");
  stage.tied_sum = t.tied_sum;
  t.options.backward.lazy_error = !t.backward_forgets;
  if (!stage.is_whole()) return;
  if (t.schedule != StageOptions{}.schedule || t.stage_chunks != 1 || stage.double_warmup ||
      !stage.layers.empty() || compressed != "all" || !t.factor_rank.empty() || stage.bf16 ||
      t.tied_sum != StageOptions{}.tied_sum)
    throw UsageError(
        "a schedule, chunks, a warm-up, layers, a wire, compressed stages and tied sums are of stages: "
        "--mesh "
        "pp=2");
}

namespace {

// A parameter that blocks of two stages could have, as the table of a head that is none of its own.
bool has_shared_parameter(const TrainOptions& options) {
  const ModelShape shape = model_shape(options.model, options.sizes);
  std::vector<int> block(shape.parameters.size(), -1);
  for (int b = 0; b < shape.num_blocks(); ++b) {
    for (const PartShape& part : shape.blocks[static_cast<std::size_t>(b)].parts) {
      for (const int p : part.parameters) {
        int& first = block[static_cast<std::size_t>(p)];
        if (first >= 0 && first != b) return true;
        first = b;
      }
    }
  }
  return false;
}

}  // namespace

void check_effect(const TrainFlags& t, const IsTyped& typed) {
  const BackwardOptions& backward = t.options.backward;  // (take_auto() says so of critical ones)
  const bool names_some = typed("backward-messages") && backward.messages != BackwardOptions{}.messages &&
                          backward.messages != kCritical;
  if (!backward.compresses() && (names_some || (typed("backward-forgets") && !backward.lazy_error)))
    throw UsageError(
        "--backward-messages and --backward-forgets are of what goes back as factors or whole numbers "
        "(--backward-rank, --backward-bits), and nothing does");
  const StageOptions& stage = t.options.sizes.stage;
  const bool names_sum = typed("tied-sum") && stage.tied_sum != StageOptions{}.tied_sum;
  if (names_sum && !stage.is_whole() && !has_shared_parameter(t.options))
    throw UsageError("--tied-sum " + stage.tied_sum + ": " + t.options.model +
                     " has nothing here that two stages share");
  if (t.options.scheme.name == kAuto) return;
  const Scheme& scheme = find_scheme(t.options.scheme.name);
  if (typed("compressed-stages") && t.compressed_stages != "all" && scheme.dense())
    throw UsageError("--compressed-stages is of a scheme that compresses, and " + t.options.scheme.name +
                     " is dense on every stage");
  if (!typed("stage-sums") || !stage.bf16_sums) return;
  const bool factors = scheme.low_rank && t.options.scheme.wire != "float32";
  const bool some_dense = !scheme.dense() && !stage.is_whole() &&
                          (t.compressed_stages != "all" || has_shared_parameter(t.options));
  if (!factors && !some_dense)
    throw UsageError(
        "--stage-sums bf16 is of what stages sum dense beside a scheme that compresses, and of powersgd's "
        "factors; " +
        t.options.scheme.name + " has neither here (dense-bf16 rounds dense sums)");
}

void without_axes(TrainFlags& flags, const Mesh& mesh, const IsTyped& typed) {
  const TrainFlags plain;
  const auto reset = [&](std::string_view name, auto& value, const auto& as_plain) {
    if (!typed(name)) value = as_plain;
  };
  if (mesh.tp == 1) reset("tensor-wire", flags.tensor_wire, plain.tensor_wire);
  if (mesh.pp > 1) return;
  reset("schedule", flags.schedule, plain.schedule);
  reset("stage-layers", flags.stage_layers, plain.stage_layers);
  reset("pipeline-warmup", flags.pipeline_warmup, plain.pipeline_warmup);
  reset("stage-chunks", flags.stage_chunks, plain.stage_chunks);
  reset("compressed-stages", flags.compressed_stages, plain.compressed_stages);
  reset("factor-rank", flags.factor_rank, plain.factor_rank);
  reset("tied-sum", flags.tied_sum, plain.tied_sum);
  reset("stage-wire", flags.stage_wire, plain.stage_wire);
  reset("backward-forgets", flags.backward_forgets, plain.backward_forgets);
  BackwardOptions& backward = flags.options.backward;
  reset("backward-rank", backward.columns, plain.options.backward.columns);
  reset("backward-bits", backward.bits, plain.options.backward.bits);
  reset("backward-messages", backward.messages, plain.options.backward.messages);
}

}  // namespace weft::cli
