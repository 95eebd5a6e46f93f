#include "workload/model_shapes.h"

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "base/names.h"
#include "step/stage.h"
#include "step/tensor.h"
#include "weft/error.h"

namespace weft {

namespace {

// Parameters as they come, and the parts that use them.
class Builder {
 public:
  explicit Builder(std::string model) { shape_.model = std::move(model); }

  void block(std::string name) { shape_.blocks.push_back({.name = std::move(name), .parts = {}}); }
  // Takes what the part before it gave.
  void part(const std::string& name, double flops_per_token) {
    if (last_.empty())
      part(name, flops_per_token, {});
    else
      part(name, flops_per_token, {last_});
  }
  void part(const std::string& name, double flops_per_token, std::vector<std::string> takes) {
    shape_.blocks.back().parts.push_back(
        {.name = name, .takes = std::move(takes), .gives = {name}, .flops_per_token = flops_per_token});
    last_ = name;
  }
  void part(PartShape shape) {
    last_ = shape.gives.back();
    shape_.blocks.back().parts.push_back(std::move(shape));
  }
  const std::string& last() const { return last_; }  // what the last part gives
  int num_parts() const { return static_cast<int>(shape_.blocks.back().parts.size()); }  // of the block
  void experts(ExpertShape layer) {
    layer.block = shape_.num_blocks() - 1;
    shape_.experts.push_back(std::move(layer));
  }
  int parameter(std::string name, std::vector<std::int64_t> dims, bool table = false) {
    const int place = static_cast<int>(shape_.parameters.size());
    shape_.parameters.push_back({.name = std::move(name), .dims = std::move(dims), .table = table});
    use(place);
    return place;
  }
  // Of this rank's experts.
  int of_experts(std::string name, std::vector<std::int64_t> dims, const ExpertOptions& o) {
    const int place = parameter(std::move(name), std::move(dims));
    ParameterShape& added = shape_.parameters[static_cast<std::size_t>(place)];
    added.of_experts = o.count;
    added.dims.front() = o.count / o.ranks;
    added.first = o.rank * added.dims.front();
    return place;
  }
  void share(int parameter, std::int64_t lookups) {
    shape_.parameters[static_cast<std::size_t>(parameter)].shared_lookups = lookups;
  }
  void tie(int parameter) {
    shape_.parameters[static_cast<std::size_t>(parameter)].tied = true;
    use(parameter);
  }
  void use(int parameter) { shape_.blocks.back().parts.back().parameters.push_back(parameter); }
  // `cut`: dimension of the weight along which tensor-parallel ranks cut it; a bias goes with its rows.
  void affine(const std::string& name, std::vector<std::int64_t> weight, int cut = -1) {
    const std::int64_t out = weight.front();
    set_cut(parameter(name + ".weight", std::move(weight)), cut);
    set_cut(parameter(name + ".bias", {out}), cut == 0 ? 0 : -1);
  }
  void set_cut(int parameter, int dimension) {
    shape_.parameters[static_cast<std::size_t>(parameter)].cut = dimension;
    if (dimension >= 0) cut_part();
  }
  void cut_part() { shape_.blocks.back().parts.back().cut = true; }
  void lstm(const std::string& name, std::int64_t cells, std::int64_t in, std::int64_t out) {
    parameter(name + ".input.weight", {4 * cells, in});
    parameter(name + ".state.weight", {4 * cells, out});
    parameter(name + ".input.bias", {4 * cells});
    parameter(name + ".state.bias", {4 * cells});
  }
  // Of what passes from block to block.
  void width(std::int64_t values) { shape_.width = values; }
  ModelShape take() {
    shape_.blocks.back().parts.back().gives = {kLoss};
    return std::move(shape_);
  }

 private:
  ModelShape shape_;
  std::string last_;
};

// A block of rows that are looked up by the batch's ids.
void add_table(Builder& b, const std::string& name, const ModelOptions& o) {
  b.block(name);
  b.part(name, 0, {});
  b.parameter(name + ".weight", {o.vocabulary, o.width}, /*table=*/true);
}

// Products with 4 d^2 weights; scores and weighted sum over the context each, where only what came before is
// seen over half of it.
void add_attention(Builder& b, const std::string& name, const ModelOptions& o, bool causal) {
  const std::int64_t d = o.width;
  const auto width = static_cast<double>(d), seen = static_cast<double>(o.context) * (causal ? 0.5 : 1);
  b.part(name, 8 * width * width + 4 * seen * width);
  b.affine(name + ".norm", {d});
  b.affine(name + ".heads", {3 * d, d}, 0);
  b.affine(name + ".projection", {d, d}, 1);
}

void add_mlp(Builder& b, const std::string& name, const ModelOptions& o) {
  const std::int64_t d = o.width;
  const auto width = static_cast<double>(d);
  b.part(name, 16 * width * width);
  b.affine(name + ".norm", {d});
  b.affine(name + ".up", {4 * d, d}, 0);
  b.affine(name + ".down", {d, 4 * d}, 1);
}

// A layer of experts behind an attention: gate, perhaps experts that all tokens share, a part for each slice,
// merge.
void add_experts(Builder& b, const std::string& layer, const ModelOptions& o) {
  const ExpertOptions& e = o.experts;
  const std::int64_t d = o.width;
  const auto width = static_cast<double>(d);
  const std::string shared = e.shared > 0 ? layer + ".shared" : "";
  ExpertShape shape{.name = layer + ".experts",
                    .gate = b.num_parts(),
                    .first_slice = b.num_parts() + (e.shared > 0 ? 2 : 1),
                    .slices = e.slices,
                    .width = d,
                    .experts = e.count,
                    .choices = e.choices,
                    .capacity_factor = e.capacity_factor};
  std::vector<int> norm, weights;
  for (PartShape& part : expert_parts(shape, b.last(), shared, shape.name)) {
    const int at = b.num_parts();
    const bool is_slice = part.of_others;
    part.flops_per_token = at == shape.gate         ? 2 * width * e.count
                           : is_slice               ? 16 * width * width * e.choices / e.slices
                           : at < shape.first_slice ? 16 * width * width * e.shared
                                                    : 0;
    b.part(std::move(part));
    if (at == shape.gate) {
      norm = {b.parameter(shape.name + ".norm.weight", {d}), b.parameter(shape.name + ".norm.bias", {d})};
      b.parameter(shape.name + ".gate.weight", {e.count, d});
    } else if (at < shape.first_slice) {
      for (const int used : norm) b.use(used);
      b.affine(shared + ".up", {4 * d * e.shared, d});
      b.affine(shared + ".down", {d, 4 * d * e.shared});
    } else if (at == shape.first_slice) {
      weights = {b.of_experts(shape.name + ".up.weight", {e.count, 4 * d, d}, e),
                 b.of_experts(shape.name + ".up.bias", {e.count, 4 * d}, e),
                 b.of_experts(shape.name + ".down.weight", {e.count, d, 4 * d}, e),
                 b.of_experts(shape.name + ".down.bias", {e.count, d}, e)};
    } else if (is_slice) {
      for (const int used : weights) b.use(used);
    }
  }
  b.experts(std::move(shape));
}

// embedding | layer 0 .. n-1, each attention and mlp (of gpt-moe, in every so many of them experts in its place) |
// head, whose weight is the embedding's table, unless it is untied
ModelShape decoder_shape(const char* model, const ModelOptions& o, bool experts) {
  const std::int64_t d = o.width;
  const auto width = static_cast<double>(d);
  Builder b(model);
  b.width(d);
  b.block("embedding");
  b.part("embedding", 0);
  const int tokens = b.parameter("embedding.token.weight", {o.vocabulary, d}, /*table=*/o.untied);
  b.set_cut(tokens, 0);
  b.parameter("embedding.position.weight", {o.context, d});
  for (int i = 0; i < o.layers; ++i) {
    const std::string name = "layer." + std::to_string(i);
    b.block(name);
    add_attention(b, name + ".attention", o, /*causal=*/true);
    if (experts && has_experts(o, i))
      add_experts(b, name, o);
    else
      add_mlp(b, name + ".mlp", o);
  }
  b.block("head");
  b.part("head", 2 * width * static_cast<double>(o.vocabulary));
  b.affine("head.norm", {d});
  if (o.untied)
    b.set_cut(b.parameter("head.weight", {o.vocabulary, d}), 0);
  else
    b.tie(tokens);
  b.cut_part();
  return b.take();
}

ModelShape gpt_shape(const ModelOptions& o) { return decoder_shape("gpt", o, false); }
ModelShape gpt_moe_shape(const ModelOptions& o) { return decoder_shape("gpt-moe", o, true); }

// embedding | lstm 0 .. n-1, each perhaps with a projection | softmax, whose bias is its table's last column
ModelShape lm_shape(const ModelOptions& o) {
  const std::int64_t h = lstm_width(o), out = lstm_output(o);
  const auto cells = static_cast<double>(h);
  const bool sampled = o.samples > 0;
  Builder b("lm");
  b.block("embedding");
  b.part("embedding", 0);
  b.parameter("embedding.weight", {o.vocabulary, o.width}, /*table=*/true);
  std::int64_t in = o.width;
  for (int i = 0; i < o.layers; ++i) {
    const std::string name = "lstm." + std::to_string(i);
    b.block(name);
    b.part(name, 8 * cells * static_cast<double>(in + out) + 2 * cells * static_cast<double>(o.projection));
    b.lstm(name, h, in, out);
    if (o.projection > 0) b.parameter(name + ".projection.weight", {o.projection, h});
    in = out;
  }
  b.block("softmax");
  b.part("softmax",
         2 * static_cast<double>(out) * static_cast<double>(sampled ? o.samples + 1 : o.vocabulary));
  const int softmax = b.parameter("softmax.weight", {o.vocabulary, out + 1}, sampled);
  b.share(softmax, o.samples);
  return b.take();
}

// encoder.embedding | encoder.lstm 0 .. n-1, the first in both directions | decoder.embedding |
// decoder.lstm 0 .. n-1, behind the first one attention over what the encoder gave, which the others take |
// projection
ModelShape gnmt_shape(const ModelOptions& o) {
  const std::int64_t d = o.width;
  const auto width = static_cast<double>(d);
  const auto flops = [&](std::int64_t in) { return 8 * width * static_cast<double>(in + d); };
  Builder b("gnmt");
  add_table(b, "encoder.embedding", o);
  for (int i = 0; i < o.layers; ++i) {
    const std::string name = "encoder.lstm." + std::to_string(i);
    const std::int64_t in = i == 1 ? 2 * d : d;
    b.block(name);
    b.part(name, i == 0 ? 2 * flops(in) : flops(in));
    b.lstm(name, d, in, d);
    if (i == 0) b.lstm(name + ".reverse", d, in, d);
  }
  const std::string encoded = b.last(), attention = "decoder.attention";
  add_table(b, "decoder.embedding", o);
  std::string below = b.last();
  for (int i = 0; i < o.layers; ++i) {
    const std::string name = "decoder.lstm." + std::to_string(i);
    const std::int64_t in = i == 0 ? d : 2 * d;
    b.block(name);
    b.part(name, flops(in), i == 0 ? std::vector{below} : std::vector{below, attention});
    b.lstm(name, d, in, d);
    below = name;
    if (i > 0) continue;
    b.part(attention, 4 * width * width + 4 * static_cast<double>(o.context) * width, {name, encoded});
    b.parameter(attention + ".query.weight", {d, d});
    b.parameter(attention + ".key.weight", {d, d});
  }
  b.block("projection");
  b.part("projection", 2 * width * static_cast<double>(o.vocabulary));
  b.affine("projection", {o.vocabulary, d});
  return b.take();
}

// encoder.embedding | encoder 0 .. n-1, each attention and mlp, behind the last one a norm |
// decoder.embedding | decoder 0 .. n-1, each attention, cross (over what the encoder gave) and mlp |
// projection. Positions are sinusoids: no parameter. bert2gpt2-moe has experts in place of the mlp in every so
// many layers on either side, positions that are learned, and the norm in a block of its own: a layer's experts
// are the last parts of a block
ModelShape pairs_shape(const char* model, const ModelOptions& o, bool experts) {
  const std::int64_t d = o.width;
  const auto width = static_cast<double>(d);
  Builder b(model);
  const auto add_embedding = [&](const std::string& name) {
    add_table(b, name, o);
    if (experts) b.parameter(name + ".position.weight", {o.context, d});
  };
  const auto add_last = [&](const std::string& name, int layer) {
    if (experts && has_experts(o, layer))
      add_experts(b, name, o);
    else
      add_mlp(b, name + ".mlp", o);
  };
  add_embedding("encoder.embedding");
  for (int i = 0; i < o.layers; ++i) {
    const std::string name = "encoder." + std::to_string(i);
    b.block(name);
    add_attention(b, name + ".attention", o, /*causal=*/false);
    add_last(name, i);
  }
  if (experts) b.block("encoder.norm");
  b.part("encoder.norm", 0);
  b.affine("encoder.norm", {d});
  const std::string encoded = b.last();
  add_embedding("decoder.embedding");
  for (int i = 0; i < o.layers; ++i) {
    const std::string name = "decoder." + std::to_string(i), cross = name + ".cross";
    b.block(name);
    add_attention(b, name + ".attention", o, /*causal=*/true);
    b.part(cross, 8 * width * width + 4 * static_cast<double>(o.context) * width, {b.last(), encoded});
    b.affine(cross + ".norm", {d});
    b.affine(cross + ".query", {d, d});
    b.affine(cross + ".kv", {2 * d, d});
    b.affine(cross + ".projection", {d, d});
    add_last(name, i);
  }
  b.block("projection");
  b.part("projection", 2 * width * static_cast<double>(o.vocabulary));
  b.affine("projection.norm", {d});
  b.affine("projection", {o.vocabulary, d});
  return b.take();
}

ModelShape transformer_shape(const ModelOptions& o) { return pairs_shape("transformer", o, false); }
ModelShape bert2gpt2_moe_shape(const ModelOptions& o) { return pairs_shape("bert2gpt2-moe", o, true); }

// embedding | layer 0 .. n-1, each attention and mlp | span, which gives every token a logit to be the first
// and one to be the last of the span
ModelShape bert_shape(const ModelOptions& o) {
  const std::int64_t d = o.width;
  Builder b("bert");
  b.width(d);
  b.block("embedding");
  b.part("embedding", 0);
  b.set_cut(b.parameter("embedding.token.weight", {o.vocabulary, d}, /*table=*/true), 0);
  b.parameter("embedding.position.weight", {o.context, d});
  for (int i = 0; i < o.layers; ++i) {
    const std::string name = "layer." + std::to_string(i);
    b.block(name);
    add_attention(b, name + ".attention", o, /*causal=*/false);
    add_mlp(b, name + ".mlp", o);
  }
  b.block("span");
  b.part("span", 4 * static_cast<double>(d));
  b.affine("span.norm", {d});
  b.parameter("span.weight", {2, d});  // a bias would be the same for all places, and change nothing
  return b.take();
}

struct KnownModel {
  std::string_view name;
  BatchKind kind;
  ModelShape (*shape)(const ModelOptions&);
  bool experts = false;
};
constexpr std::array kModels{
    KnownModel{"gpt", BatchKind::tokens, gpt_shape},
    KnownModel{"gpt-moe", BatchKind::tokens, gpt_moe_shape, /*experts=*/true},
    KnownModel{"lm", BatchKind::tokens, lm_shape},
    KnownModel{"gnmt", BatchKind::pairs, gnmt_shape},
    KnownModel{"transformer", BatchKind::pairs, transformer_shape},
    KnownModel{"bert", BatchKind::spans, bert_shape},
    KnownModel{"bert2gpt2-moe", BatchKind::pairs, bert2gpt2_moe_shape, /*experts=*/true},
};

const KnownModel& find(std::string_view model) {
  for (const KnownModel& row : kModels) {
    if (row.name == model) return row;
  }
  throw UsageError(unknown_name("model", model, model_names()));
}

}  // namespace

bool has_experts(const ModelOptions& o, int layer) { return (layer + 1) % o.experts.every == 0; }

bool has_experts(std::string_view model) { return find(model).experts; }

BatchKind batch_kind_of(std::string_view model) { return find(model).kind; }

ModelShape model_shape(std::string_view model, const ModelOptions& options) {
  check_model(model, options);
  return find(model).shape(options);
}

ModelShape rank_shape(std::string_view model, const ModelOptions& options) {
  TensorOptions tensor = options.tensor;
  tensor.tables = tensor.tables && !options.tables_elsewhere;
  return stage_shape(tensor_shape(model_shape(model, options), tensor), options.stage);
}

}  // namespace weft
