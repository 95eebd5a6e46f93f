#include "workload/model_shapes.h"

#include <string>
#include <utility>
#include <vector>

namespace weft {

namespace {

// Parameters as they come, and the parts that use them.
class Builder {
 public:
  explicit Builder(std::string model) { shape_.model = std::move(model); }

  void block(std::string name) { shape_.blocks.push_back({.name = std::move(name), .parts = {}}); }
  // Takes what the part before it gave.
  void part(const std::string& name, double flops_per_token) {
    PartShape part{.name = name, .gives = {name}, .flops_per_token = flops_per_token};
    if (!last_.empty()) part.takes = {last_};
    last_ = name;
    shape_.blocks.back().parts.push_back(std::move(part));
  }
  int parameter(std::string name, std::vector<std::int64_t> dims, bool table = false) {
    const int place = static_cast<int>(shape_.parameters.size());
    shape_.parameters.push_back({.name = std::move(name), .dims = std::move(dims), .table = table});
    use(place);
    return place;
  }
  void use(int parameter) { shape_.blocks.back().parts.back().parameters.push_back(parameter); }
  void affine(const std::string& name, std::vector<std::int64_t> weight) {
    const std::int64_t out = weight.front();
    parameter(name + ".weight", std::move(weight));
    parameter(name + ".bias", {out});
  }
  ModelShape take() {
    shape_.blocks.back().parts.back().gives = {kLoss};
    return std::move(shape_);
  }

 private:
  ModelShape shape_;
  std::string last_;
};

// embedding | layer 0 .. n-1, each attention and mlp | head, whose weight is the embedding's table
ModelShape gpt_shape(const ModelOptions& o) {
  const std::int64_t d = o.width;
  const auto width = static_cast<double>(d);
  Builder b("gpt");
  b.block("embedding");
  b.part("embedding", 0);
  const int tokens = b.parameter("embedding.token.weight", {o.vocabulary, d});
  b.parameter("embedding.position.weight", {o.context, d});
  for (int i = 0; i < o.layers; ++i) {
    const std::string name = "layer." + std::to_string(i);
    b.block(name);
    // Products with 4 d^2 weights, scores and weighted sum over half the context each.
    b.part(name + ".attention", 8 * width * width + 2 * static_cast<double>(o.context) * width);
    b.affine(name + ".attention.norm", {d});
    b.affine(name + ".attention.qkv", {3 * d, d});
    b.affine(name + ".attention.projection", {d, d});
    b.part(name + ".mlp", 16 * width * width);
    b.affine(name + ".mlp.norm", {d});
    b.affine(name + ".mlp.up", {4 * d, d});
    b.affine(name + ".mlp.down", {d, 4 * d});
  }
  b.block("head");
  b.part("head", 2 * width * static_cast<double>(o.vocabulary));
  b.affine("head.norm", {d});
  b.use(tokens);
  return b.take();
}

// embedding | lstm 0 .. n-1 | softmax
ModelShape lm_shape(const ModelOptions& o) {
  const std::int64_t d = o.width;
  const auto width = static_cast<double>(d);
  const bool sampled = o.samples > 0;
  Builder b("lm");
  b.block("embedding");
  b.part("embedding", 0);
  b.parameter("embedding.weight", {o.vocabulary, d}, /*table=*/true);
  for (int i = 0; i < o.layers; ++i) {
    const std::string name = "lstm." + std::to_string(i);
    b.block(name);
    b.part(name, 16 * width * width);
    b.parameter(name + ".input.weight", {4 * d, d});
    b.parameter(name + ".state.weight", {4 * d, d});
    b.parameter(name + ".input.bias", {4 * d});
    b.parameter(name + ".state.bias", {4 * d});
  }
  b.block("softmax");
  b.part("softmax", 2 * width * static_cast<double>(sampled ? o.samples + 1 : o.vocabulary));
  b.parameter("softmax.weight", {o.vocabulary, d}, sampled);
  b.parameter("softmax.bias", {o.vocabulary, 1}, sampled);
  return b.take();
}

}  // namespace

ModelShape model_shape(std::string_view model, const ModelOptions& options) {
  check_model(model, options);
  return model == "gpt" ? gpt_shape(options) : lm_shape(options);
}

}  // namespace weft
