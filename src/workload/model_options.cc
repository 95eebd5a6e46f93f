#include "weft/train/model_options.h"

#include "base/names.h"
#include "collectives/registry.h"
#include "data/batches.h"
#include "experts/policies.h"
#include "step/stage.h"
#include "weft/error.h"

namespace weft {

namespace {

struct Preset {
  std::string_view model, name;
  ModelOptions options;
};

const std::vector<Preset>& presets() {
  static const std::vector<Preset> table = {
      {"gpt", "default", {}},
      {"gpt", "tiny", {.vocabulary = 256, .context = 32, .width = 32, .layers = 2, .heads = 2}},
      {"gpt-moe", "default", {.width = 256, .layers = 6, .heads = 4}},
      {"gpt-moe",
       "tiny",
       {.vocabulary = 256, .context = 32, .width = 32, .layers = 2, .heads = 2, .experts = {.count = 4}}},
      {"gpt-moe",
       "paper",
       {.vocabulary = 32'000,
        .context = 512,
        .width = 512,
        .layers = 24,
        .heads = 8,
        .experts = {.count = 16, .every = 1}}},
      {"lm", "default", {.layers = 2}},
      {"lm", "tiny", {.vocabulary = 256, .context = 32, .width = 32, .layers = 2}},
      {"lm",
       "paper",
       {.vocabulary = 793'471,
        .context = 20,
        .width = 512,
        .hidden = 2048,
        .projection = 512,
        .layers = 2,
        .samples = 8192}},
      {"gnmt", "default", {.width = 256, .layers = 2}},
      {"gnmt", "tiny", {.vocabulary = 256, .context = 32, .width = 32, .layers = 3}},
      {"gnmt", "paper", {.vocabulary = 32'320, .context = 50, .width = 1024, .layers = 4}},
      {"transformer", "default", {.width = 256, .layers = 2, .heads = 4}},
      {"transformer", "tiny", {.vocabulary = 256, .context = 32, .width = 32, .layers = 2, .heads = 2}},
      {"transformer",
       "paper",
       {.vocabulary = 33'712, .context = 50, .width = 1024, .layers = 6, .heads = 16}},
      {"bert", "default", {}},
      {"bert", "tiny", {.vocabulary = 256, .context = 32, .width = 32, .layers = 2, .heads = 2}},
      {"bert", "paper", {.vocabulary = 30'522, .context = 512, .width = 768, .layers = 12, .heads = 12}},
      {"bert2gpt2-moe", "default", {.width = 192, .layers = 2, .heads = 4}},
      {"bert2gpt2-moe",
       "tiny",
       {.vocabulary = 256, .context = 32, .width = 32, .layers = 2, .heads = 2, .experts = {.count = 4}}},
      {"bert2gpt2-moe",
       "paper",
       {.vocabulary = 30'522,
        .context = 512,
        .width = 768,
        .layers = 12,
        .heads = 12,
        .experts = {.count = 16}}},
  };
  return table;
}

}  // namespace

std::vector<std::string_view> model_names() {
  std::vector<std::string_view> out;
  for (const Preset& row : presets()) {
    if (out.empty() || out.back() != row.model) out.push_back(row.model);
  }
  return out;
}
std::vector<std::string_view> model_presets() { return {"default", "tiny", "paper"}; }

ModelOptions model_options(std::string_view model, std::string_view preset) {
  std::vector<std::string_view> known;
  for (const Preset& row : presets()) {
    if (row.model != model) continue;
    if (row.name == preset) return row.options;
    known.push_back(row.name);
  }
  if (known.empty()) throw UsageError(unknown_name("model", model, model_names()));
  throw UsageError(unknown_name("preset of a model", preset, known));
}

namespace {

void check_experts(const std::string& model, const ExpertOptions& o) {
  const auto require = [&](bool holds, const std::string& what) {
    if (!holds) throw UsageError("model " + model + ": " + what);
  };
  const auto got = [](auto value) { return ", not " + std::to_string(value); };
  require(o.count >= 1 && o.count <= 1 << 16, "experts must be 1 to 2^16" + got(o.count));
  require(o.choices >= 1 && o.choices <= 2, "expert-choices must be 1 or 2" + got(o.choices));
  require(o.choices <= o.count, "a token cannot choose " + std::to_string(o.choices) + " of " +
                                    std::to_string(o.count) + " experts");
  require(o.capacity_factor >= 0 && o.capacity_factor <= 1e6,
          "expert-capacity must be positive, or 0 where no token is dropped" + got(o.capacity_factor));
  require(o.every >= 1, "experts-every must be at least 1" + got(o.every));
  require(o.shared >= 0 && o.shared <= 1024, "shared-experts must be 0 to 1024" + got(o.shared));
  require(o.balance_loss >= 0 && o.balance_loss <= 1e6 && o.z_loss >= 0 && o.z_loss <= 1e6,
          "balance-loss and z-loss must be 0 or more");
  require(o.jitter >= 0 && o.jitter < 1, "gate-jitter must be in [0, 1)" + got(o.jitter));
  require(o.slices >= 1 && o.slices <= 1024, "expert-slices must be 1 to 1024" + got(o.slices));
  require(find_expert_policy(o.policy).slices || o.slices == 1,
          "policy " + o.policy + " has tokens in one slice, expert-slices 1" + got(o.slices));
  if (o.all_to_all != "auto")
    require(find_algorithm(Family::all_to_all, o.all_to_all).uneven_bytes != nullptr,
            "expert-all-to-all " + o.all_to_all + " has messages of equal length alone");
  require(o.ranks >= 1 && o.count % o.ranks == 0, std::to_string(o.count) + " experts cannot be dealt to " +
                                                      std::to_string(o.ranks) + " ranks, as many to each");
  require(o.rank >= 0 && o.rank < o.ranks,
          "rank " + std::to_string(o.rank) + " is none of those that have experts");
}

}  // namespace

void check_model(std::string_view model, const ModelOptions& o) {
  model_options(model);  // the name
  const auto require = [&](bool holds, const std::string& what) {
    if (!holds) throw UsageError("model " + std::string(model) + ": " + what);
  };
  const auto got = [](auto value) { return ", not " + std::to_string(value); };
  require(o.vocabulary >= 2 && o.vocabulary <= 1 << 24, "vocabulary must be 2 to 2^24" + got(o.vocabulary));
  require(o.context >= 1 && o.context <= 1 << 20, "context must be 1 to 2^20 tokens" + got(o.context));
  require(o.width >= 1 && o.width <= 1 << 18, "width must be 1 to 2^18" + got(o.width));
  require(o.hidden >= 0 && o.hidden <= 1 << 18,
          "hidden must be 0 (as wide as the tables) to 2^18" + got(o.hidden));
  require(o.projection >= 0 && o.projection <= 1 << 18,
          "projection must be 0 (none) to 2^18" + got(o.projection));
  require(o.layers >= 1 && o.layers <= 1000, "layers must be 1 to 1000" + got(o.layers));
  require(o.dropout >= 0 && o.dropout < 1, "dropout must be in [0, 1)" + got(o.dropout));
  if (model != "lm") {
    require(o.hidden == 0 && o.projection == 0, "hidden and projection are of lm's LSTMs");
    require(o.samples == 0, "samples are of lm's softmax");
  }
  if (model != "gpt" && model != "gpt-moe")
    require(!o.untied, "its output has a matrix of its own, untied is of gpt and gpt-moe");
  if (!o.stage.is_whole()) {
    require(model == "gpt" || model == "gpt-moe" || model == "bert",
            "its blocks pass more than one activation on, stages are of gpt, gpt-moe and bert");
    check_stage(o.stage);
    const int chunks = o.stage.stages * o.stage.chunks;
    require(o.layers >= chunks, "layers must be at least 1 for each of " + std::to_string(chunks) +
                                    (o.stage.chunks > 1 ? " chunks" : " stages") + got(o.layers));
  }
  if (!o.tensor.is_whole()) {
    require(model == "gpt" || model == "gpt-moe" || model == "bert",
            "its layers are not cut among ranks, tensor parallelism is of gpt, gpt-moe and bert");
    require(o.tensor.ranks >= 1 && o.tensor.rank >= 0 && o.tensor.rank < o.tensor.ranks,
            "there is no tensor-parallel rank " + std::to_string(o.tensor.rank) + " of " +
                std::to_string(o.tensor.ranks));
    require(o.heads % o.tensor.ranks == 0, "heads must be a multiple of the " +
                                               std::to_string(o.tensor.ranks) + " tensor-parallel ranks" +
                                               got(o.heads));
    require(o.vocabulary >= o.tensor.ranks, "vocabulary must be at least 1 for each of " +
                                                std::to_string(o.tensor.ranks) + " tensor-parallel ranks" +
                                                got(o.vocabulary));
  }
  if (model == "gnmt") require(o.layers >= 2, "layers must be 2 to 1000" + got(o.layers));
  if (model == "bert")
    require(o.context >= kShortestSpans, "context must be 4 to 2^20 tokens" + got(o.context));
  if (has_experts(model))
    check_experts(std::string(model), o.experts);
  else
    require(o.experts.policy == ExpertOptions{}.policy, "it has no experts, and so no policy of them");
  if (model != "lm" && model != "gnmt") {
    require(o.heads >= 1 && o.width % o.heads == 0,
            "width " + std::to_string(o.width) + " must be a multiple of heads" + got(o.heads));
  }
  require(o.samples >= 0 && o.samples < o.vocabulary,
          "samples must be less than the vocabulary of " + std::to_string(o.vocabulary) + got(o.samples));
}

}  // namespace weft
