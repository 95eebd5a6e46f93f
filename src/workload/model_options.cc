#include "weft/train/model_options.h"

#include "base/names.h"
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
      {"lm", "default", {.layers = 2}},
      {"lm", "tiny", {.vocabulary = 256, .context = 32, .width = 32, .layers = 2}},
  };
  return table;
}

}  // namespace

std::vector<std::string_view> model_names() { return {"gpt", "lm"}; }
std::vector<std::string_view> model_presets() { return {"default", "tiny"}; }

ModelOptions model_options(std::string_view model, std::string_view preset) {
  bool known = false;
  for (const Preset& row : presets()) {
    if (row.model == model && row.name == preset) return row.options;
    known |= row.model == model;
  }
  if (!known) throw UsageError(unknown_name("model", model, model_names()));
  throw UsageError(unknown_name("preset of a model", preset, model_presets()));
}

void check_model(std::string_view model, const ModelOptions& o) {
  model_options(model);  // the name
  const auto require = [&](bool holds, const std::string& what) {
    if (!holds) throw UsageError("model " + std::string(model) + ": " + what);
  };
  const auto got = [](auto value) { return ", not " + std::to_string(value); };
  require(o.vocabulary >= 2 && o.vocabulary <= 1 << 24, "vocabulary must be 2 to 2^24" + got(o.vocabulary));
  require(o.context >= 1 && o.context <= 1 << 20, "context must be 1 to 2^20 tokens" + got(o.context));
  require(o.width >= 1 && o.width <= 1 << 18, "width must be 1 to 2^18" + got(o.width));
  require(o.layers >= 1 && o.layers <= 1000, "layers must be 1 to 1000" + got(o.layers));
  require(o.dropout >= 0 && o.dropout < 1, "dropout must be in [0, 1)" + got(o.dropout));
  if (model == "gpt") {
    require(o.heads >= 1 && o.width % o.heads == 0,
            "width " + std::to_string(o.width) + " must be a multiple of heads" + got(o.heads));
  }
  require(o.samples >= 0 && o.samples < o.vocabulary,
          "samples must be less than the vocabulary of " + std::to_string(o.vocabulary) + got(o.samples));
}

}  // namespace weft
