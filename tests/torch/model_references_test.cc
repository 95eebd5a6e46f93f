// Losses of the models of pairs and spans against the same mathematics written out: one head, one token of an
// LSTM at a time, no fused operation. In float64, and without dropout.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <map>
#include <string>

#include "torch/model_cases.h"

namespace weft {
namespace {

class Plain {
 public:
  Plain(const Model& model, const ModelOptions& options) : o_(options) {
    for (const Parameter& p : model.parameters()) values_[p.name] = p.tensor.detach();
  }

  torch::Tensor rows(const std::string& name, const torch::Tensor& ids) const {
    return at(name + ".weight").index_select(0, ids.flatten()).view({ids.size(0), ids.size(1), o_.width});
  }
  torch::Tensor linear(const torch::Tensor& x, const std::string& name) const {
    return x.matmul(at(name + ".weight").t()) + at(name + ".bias");
  }
  torch::Tensor norm(const torch::Tensor& x, const std::string& name) const {
    const torch::Tensor centred = x - x.mean(-1, true);
    return centred / (centred.square().mean(-1, true) + 1e-5).sqrt() * at(name + ".weight") +
           at(name + ".bias");
  }
  torch::Tensor self(const torch::Tensor& x, const std::string& name, bool causal) const {
    // Head by head: query, key, value.
    const torch::Tensor all =
        linear(norm(x, name + ".norm"), name + ".heads").unflatten(2, {o_.heads, 3, o_.width / o_.heads});
    const auto part = [&](int which) { return all.select(3, which).flatten(2); };
    return x + linear(attention(part(0), part(1), part(2), causal), name + ".projection");
  }
  torch::Tensor cross(const torch::Tensor& x, const torch::Tensor& seen, const std::string& name) const {
    const torch::Tensor query = linear(norm(x, name + ".norm"), name + ".query");
    const std::vector<torch::Tensor> kv = linear(seen, name + ".kv").chunk(2, 2);
    return x + linear(attention(query, kv[0], kv[1], false), name + ".projection");
  }
  torch::Tensor mlp(const torch::Tensor& x, const std::string& name) const {
    const torch::Tensor up = linear(norm(x, name + ".norm"), name + ".up");
    const torch::Tensor gelu = 0.5 * up * (1 + (std::sqrt(2 / M_PI) * (up + 0.044715 * up.pow(3))).tanh());
    return x + linear(gelu, name + ".down");
  }
  torch::Tensor lstm(const torch::Tensor& x, const std::string& name) const {
    const std::int64_t d = o_.width;
    torch::Tensor h = torch::zeros({x.size(0), d}, torch::kFloat64), c = h;
    std::vector<torch::Tensor> out;
    for (std::int64_t t = 0; t < x.size(1); ++t) {
      const torch::Tensor gates = linear(x.select(1, t), name + ".input") + linear(h, name + ".state");
      const auto gate = [&](int i) { return gates.slice(1, i * d, (i + 1) * d); };
      c = gate(1).sigmoid() * c + gate(0).sigmoid() * gate(2).tanh();
      h = gate(3).sigmoid() * c.tanh();
      out.push_back(h);
    }
    return torch::stack(out, 1);
  }
  // One head, keys that differ from the values.
  torch::Tensor context(const torch::Tensor& x, const torch::Tensor& encoded) const {
    const torch::Tensor query = x.matmul(at("decoder.attention.query.weight").t());
    const torch::Tensor key = encoded.matmul(at("decoder.attention.key.weight").t());
    return weighted(query, key, encoded, false);
  }
  const torch::Tensor& at(const std::string& name) const { return values_.at(name); }

 private:
  static torch::Tensor weighted(const torch::Tensor& query, const torch::Tensor& key,
                                const torch::Tensor& value, bool causal) {
    torch::Tensor scores = query.matmul(key.transpose(1, 2)) / std::sqrt(static_cast<double>(query.size(2)));
    if (causal) scores = scores + torch::ones_like(scores[0]).triu(1) * -1e30;
    return scores.softmax(-1).matmul(value);
  }
  torch::Tensor attention(const torch::Tensor& query, const torch::Tensor& key, const torch::Tensor& value,
                          bool causal) const {
    std::vector<torch::Tensor> outs;
    for (int h = 0; h < o_.heads; ++h) {
      const auto head = [&](const torch::Tensor& x) {
        return x.chunk(o_.heads, 2)[static_cast<std::size_t>(h)];
      };
      outs.push_back(weighted(head(query), head(key), head(value), causal));
    }
    return torch::cat(outs, 2);
  }

  ModelOptions o_;
  std::map<std::string, torch::Tensor> values_;
};

// -ln of the probability of each target that is counted.
double cross_entropy(const torch::Tensor& logits, const torch::Tensor& targets) {
  const torch::Tensor chances = logits.log_softmax(-1);
  double sum = 0;
  for (std::int64_t i = 0; i < targets.numel(); ++i) {
    const auto target = targets.flatten()[i].item<std::int64_t>();
    if (target != kNotCounted) sum -= chances[i][target].item<double>();
  }
  return sum;
}

struct Reference {
  ModelOptions options;
  std::unique_ptr<Model> model;
  Batch batch;
  double loss = 0;

  explicit Reference(const char* name) : options(model_options(name, "tiny")) {
    options.dropout = 0;
    model = make_model(name, options);
    model->to(torch::kFloat64);
    const torch::NoGradGuard guard;
    Random random(3);  // Biases and norms that are not 0 and 1 any more: all of them count
    for (const Parameter& p : model->parameters()) {
      torch::Tensor flat = p.tensor.detach().view({-1});
      for (std::int64_t i = 0; i < flat.numel(); ++i)
        flat.data_ptr<double>()[i] += 0.2 * (random.uniform() - 0.5);
    }
    batch = random_batch(options, 3, 10, batch_kind_of(name));
    loss = model->loss(batch, {}).item<double>();
  }
};

TEST(Bert, EqualsItsMathematics) {
  const Reference r("bert");
  const Plain plain(*r.model, r.options);
  const auto loss = [&](bool causal) {
    torch::Tensor x =
        plain.rows("embedding.token", r.batch.tokens) + plain.at("embedding.position.weight").slice(0, 0, 10);
    for (int i = 0; i < r.options.layers; ++i) {
      const std::string name = "layer." + std::to_string(i);
      x = plain.mlp(plain.self(x, name + ".attention", causal), name + ".mlp");
    }
    // [sequences, places, 2]
    const torch::Tensor logits = plain.norm(x, "span.norm").matmul(plain.at("span.weight").t());
    return cross_entropy(logits.select(2, 0), r.batch.targets.select(1, 0)) +
           cross_entropy(logits.select(2, 1), r.batch.targets.select(1, 1));
  };
  EXPECT_NEAR(r.loss, loss(false), 1e-10);
  EXPECT_GT(std::abs(r.loss - loss(true)), 1e-4);  // control
}

TEST(Transformer, EqualsItsMathematics) {
  const Reference r("transformer");
  const Plain plain(*r.model, r.options);
  const auto embed = [&](const std::string& name, const torch::Tensor& ids) {
    torch::Tensor x = plain.rows(name, ids) * std::sqrt(32.0);
    for (std::int64_t t = 0; t < ids.size(1); ++t) {
      for (std::int64_t i = 0; i < 32; ++i) {
        const double angle = static_cast<double>(t) / std::pow(1e4, static_cast<double>(i / 2 * 2) / 32);
        x.select(1, t).select(1, i) += i % 2 == 0 ? std::sin(angle) : std::cos(angle);
      }
    }
    return x;
  };
  const auto loss = [&](bool causal, bool sees_source) {
    torch::Tensor seen = embed("encoder.embedding", r.batch.source);
    for (int i = 0; i < r.options.layers; ++i) {
      const std::string name = "encoder." + std::to_string(i);
      seen = plain.mlp(plain.self(seen, name + ".attention", false), name + ".mlp");
    }
    seen = plain.norm(seen, "encoder.norm");
    torch::Tensor x = embed("decoder.embedding", r.batch.tokens);
    for (int i = 0; i < r.options.layers; ++i) {
      const std::string name = "decoder." + std::to_string(i);
      x = plain.self(x, name + ".attention", causal);
      if (sees_source) x = plain.cross(x, seen, name + ".cross");
      x = plain.mlp(x, name + ".mlp");
    }
    const torch::Tensor logits = plain.linear(plain.norm(x, "projection.norm"), "projection");
    return cross_entropy(logits.flatten(0, 1), r.batch.targets);
  };
  EXPECT_NEAR(r.loss, loss(true, true), 1e-9);
  EXPECT_GT(std::abs(r.loss - loss(false, true)), 1e-4);  // controls
  EXPECT_GT(std::abs(r.loss - loss(true, false)), 1e-4);
}

TEST(Gnmt, EqualsItsMathematics) {
  const Reference r("gnmt");
  const Plain plain(*r.model, r.options);
  const auto loss = [&](bool reverse, bool residual) {
    torch::Tensor seen = plain.rows("encoder.embedding", r.batch.source);
    const torch::Tensor backwards = reverse ? seen.flip(1) : seen;
    const torch::Tensor other = plain.lstm(backwards, "encoder.lstm.0.reverse");
    seen = torch::cat({plain.lstm(seen, "encoder.lstm.0"), reverse ? other.flip(1) : other}, 2);
    seen = plain.lstm(seen, "encoder.lstm.1");
    seen = plain.lstm(seen, "encoder.lstm.2") + (residual ? seen : torch::zeros_like(seen));
    torch::Tensor x = plain.lstm(plain.rows("decoder.embedding", r.batch.tokens), "decoder.lstm.0");
    const torch::Tensor context = plain.context(x, seen);
    x = plain.lstm(torch::cat({x, context}, 2), "decoder.lstm.1");
    x = plain.lstm(torch::cat({x, context}, 2), "decoder.lstm.2") + x;
    return cross_entropy(plain.linear(x, "projection").flatten(0, 1), r.batch.targets);
  };
  ASSERT_EQ(r.options.layers, 3);
  EXPECT_NEAR(r.loss, loss(true, true), 1e-9);
  EXPECT_GT(std::abs(r.loss - loss(false, true)), 1e-6);  // controls
  EXPECT_GT(std::abs(r.loss - loss(true, false)), 1e-6);
}

}  // namespace
}  // namespace weft
