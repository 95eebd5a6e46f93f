// gpt-moe, or bert2gpt2-moe, in one process, with experts that are computed densely: every expert for every token, of which the
// gate's choices are kept. Nothing of src/experts/ is used here, and of the model only its parameters and the
// parts that have no experts.
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "patterns/blocks.h"
#include "torch/torch_alone.h"
#include "weft/random.h"
#include "weft_torch/models/model.h"
#include "weft_torch/models/ops.h"

namespace weft::torch_test {

struct Moe {
  ExpertOptions experts{.count = 8,
                        .choices = 2,
                        .capacity_factor = 1.0,
                        .every = 2,
                        .balance_loss = 0.05,
                        .z_loss = 0.01,
                        .jitter = 0.1,
                        .slices = 2};
  std::string model = "gpt-moe";
  int layers = 2;
  int world = 8;  // ranks, each with a share of the sequences
  int micro_batches = 1;
  int steps = 8;
  std::int64_t sequences = 15;  // no multiple of the ranks
  OptimizerOptions optimizer = default_options("sgd");
  double clip_norm = 0;
  torch::ScalarType type = torch::kFloat64;
  // Of alone(), what makes a control:
  double expert_scale = 1;     // of the gradients of experts
  bool one_capacity = false;   // of all ranks' tokens in one
  bool own_fractions = false;  // of the balance loss: of each rank's tokens alone
  bool second_before = false;  // second choices of a token stand before the next token's first one
};

constexpr std::int64_t kMoeLength = 6;
constexpr std::uint64_t kMoeSeed = 5;

inline std::unique_ptr<Model> moe_model(const Moe& t, int ranks, int rank) {
  ModelOptions o = model_options(t.model, "tiny");
  o.vocabulary = 40;
  o.width = 12;
  o.layers = t.layers;
  o.dropout = 0.2;
  o.experts = t.experts;
  o.experts.ranks = ranks;
  o.experts.rank = rank % ranks;
  std::unique_ptr<Model> model = make_model(t.model, o);
  model->to(t.type);
  return model;
}

inline Batch moe_batch(const Model& model, const Moe& t, std::int64_t step) {
  Batch batch{.tokens = torch::empty({t.sequences, kMoeLength}, torch::kInt64),
              .targets = torch::empty({t.sequences, kMoeLength}, torch::kInt64)};
  Random random(11, 1, static_cast<std::uint32_t>(step));
  const auto id = [&] {
    return static_cast<std::int64_t>(random.below(static_cast<std::uint32_t>(model.options().vocabulary)));
  };
  for (std::int64_t i = 0; i < batch.tokens.numel(); ++i) {
    batch.tokens.data_ptr<std::int64_t>()[i] = id();
    batch.targets.data_ptr<std::int64_t>()[i] = (i + step) % 5 == 3 ? kNotCounted : id();
  }
  if (t.model == "gpt-moe") return batch;
  batch.source = torch::empty({t.sequences, kMoeLength}, torch::kInt64);
  for (std::int64_t i = 0; i < batch.source.numel(); ++i) batch.source.data_ptr<std::int64_t>()[i] = id();
  return batch;
}

// A rank's micro-batches of a step.
inline std::vector<Batch> moe_share(const Batch& whole, const Moe& t, int rank) {
  const Blocks shares(t.world, t.sequences);
  const Batch mine = part_of(whole, shares.begin(rank), shares.begin(rank + 1));
  const Blocks cuts(t.micro_batches, sequences(mine));
  std::vector<Batch> out;
  for (int m = 0; m < t.micro_batches; ++m) out.push_back(part_of(mine, cuts.begin(m), cuts.begin(m + 1)));
  return out;
}

class DenseMoe {
 public:
  explicit DenseMoe(const Moe& training) : t_(training), model_(moe_model(training, 1, 0)) {
    for (const Parameter& p : model_->parameters()) by_name_[p.name] = p.tensor;
  }
  const Model& model() const { return *model_; }
  Model& model() { return *model_; }

  // The mean cross entropy, and what is learned from: with the routers' losses.
  struct Losses {
    double mean = 0;
    torch::Tensor total;
  };
  Losses losses(const Batch& whole, std::int64_t step) const {
    const StepContext context{.seed = kMoeSeed, .step = step};
    torch::Tensor sum = torch::zeros({}, torch::kFloat64), router = torch::zeros({}, torch::kFloat64);
    for (int m = 0; m < t_.micro_batches; ++m) {
      std::map<std::string, std::vector<Gate>> gates;  // of each layer, by rank
      for (int r = 0; r < t_.world; ++r) {
        const Batch mine = moe_share(whole, t_, r)[static_cast<std::size_t>(m)];
        if (sequences(mine) > 0) sum = sum + forward(mine, context, gates);
      }
      for (const auto& [layer, of_ranks] : gates) router = router + router_loss(of_ranks) / t_.micro_batches;
    }
    const auto tokens = static_cast<double>(counted(whole));
    return {sum.item<double>() / tokens, sum / tokens + router};
  }

  // The sum of the cross entropy of a batch, without anything that is of training.
  double evaluate(const Batch& batch) const {
    std::map<std::string, std::vector<Gate>> gates;
    return forward(batch, {.training = false}, gates).item<double>();
  }

 private:
  struct Gate {
    torch::Tensor probabilities;  // [tokens, experts]
    torch::Tensor squares;        // of the logarithms, summed
    std::vector<double> chosen;   // of each expert
  };

  torch::Tensor at(const std::string& name) const { return by_name_.at(name); }

  torch::Tensor forward(const Batch& batch, const StepContext& context,
                        std::map<std::string, std::vector<Gate>>& gates) const {
    const ModelShape& shape = model_->shape();
    std::map<std::string, torch::Tensor> given;
    for (int b = 0; b < shape.num_blocks(); ++b) {
      const std::vector<PartShape>& parts = shape.blocks[static_cast<std::size_t>(b)].parts;
      const auto experts = std::ranges::find(shape.experts, b, &ExpertShape::block);
      const bool has = experts != shape.experts.end();
      const std::size_t own = has ? static_cast<std::size_t>(experts->gate) : parts.size();
      for (std::size_t p = 0; p < own; ++p) {
        std::vector<torch::Tensor> taken;
        for (const std::string& name : parts[p].takes) taken.push_back(given.at(name));
        given[parts[p].gives.front()] = model_->forward(b, static_cast<int>(p), taken, batch, context)[0];
      }
      if (has)
        given[parts.back().gives.front()] =
            moe(given.at(parts[own].takes.front()), experts->name, batch, context, gates);
    }
    return given.at(kLoss);
  }

  // Of the dropout of a layer of experts, "decoder.1.experts" say: of gpt and an encoder, two of each layer
  // behind the embedding's; of a decoder three, behind its own embedding's.
  std::uint32_t site_of(const std::string& name) const {
    const std::size_t dot = name.find('.');
    const auto layer = static_cast<std::uint32_t>(std::stoi(name.substr(dot + 1)));
    const auto layers = static_cast<std::uint32_t>(model_->options().layers);
    return name.starts_with("decoder") ? 2 * layers + 2 + 3 * layer + 2 : 2 * layer + 2;
  }

  torch::Tensor moe(const torch::Tensor& x, const std::string& name, const Batch& batch,
                    const StepContext& context, std::map<std::string, std::vector<Gate>>& gates) const {
    const ExpertOptions& o = t_.experts;
    const std::int64_t d = x.size(-1), tokens = x.size(0) * x.size(1);
    const torch::Tensor h =
        torch::layer_norm(x, {d}, at(name + ".norm.weight"), at(name + ".norm.bias"), 1e-5);
    const DropoutSite site{.probability = model_->options().dropout,
                           .site = site_of(name),
                           .first_sequence = batch.first_sequence};
    const torch::Tensor seen = keyed_jitter(h, o.jitter, site, context).view({tokens, d});
    const torch::Tensor logits = seen.matmul(at(name + ".gate.weight").t());
    const torch::Tensor p = torch::softmax(logits, -1);
    const torch::Tensor plain = p.detach();
    std::vector<std::vector<std::int64_t>> chosen(static_cast<std::size_t>(tokens));
    for (std::int64_t t = 0; t < tokens; ++t) {
      torch::Tensor row = plain[t].clone();
      for (int i = 0; i < o.choices; ++i) {
        const std::int64_t e = row.argmax().item<std::int64_t>();
        chosen[static_cast<std::size_t>(t)].push_back(e);
        row[e] = -1;
      }
    }
    const torch::Tensor keeps = kept(chosen);
    Gate gate{.probabilities = p, .squares = torch::logsumexp(logits, -1).square().sum()};
    gate.chosen.assign(static_cast<std::size_t>(o.count), 0);
    torch::Tensor y = torch::zeros({tokens, d}, torch::kFloat64);
    const torch::Tensor rows = h.view({tokens, d});
    for (std::int64_t e = 0; e < o.count; ++e) {
      const torch::Tensor up =
          torch::gelu(rows.matmul(at(name + ".up.weight")[e].t()) + at(name + ".up.bias")[e], "tanh");
      const torch::Tensor out = up.matmul(at(name + ".down.weight")[e].t()) + at(name + ".down.bias")[e];
      std::vector<torch::Tensor> weights;
      for (std::int64_t t = 0; t < tokens; ++t) {
        const std::vector<std::int64_t>& mine = chosen[static_cast<std::size_t>(t)];
        torch::Tensor weight = torch::zeros({}, torch::kFloat64), all = torch::zeros({}, torch::kFloat64);
        for (const std::int64_t c : mine) all = all + p[t][c];
        for (std::size_t i = 0; i < mine.size(); ++i) {
          if (mine[i] != e) continue;
          ++gate.chosen[static_cast<std::size_t>(e)];
          weight = keeps[t][static_cast<std::int64_t>(i)] * (o.choices == 1 ? p[t][e] : p[t][e] / all);
        }
        weights.push_back(weight);
      }
      y = y + torch::stack(weights).unsqueeze(1) * out;
    }
    y = y.view(x.sizes());
    if (o.shared > 0) {
      const std::string shared = name.substr(0, name.rfind('.')) + ".shared";
      const torch::Tensor up =
          torch::gelu(h.matmul(at(shared + ".up.weight").t()) + at(shared + ".up.bias"), "tanh");
      y = y + up.matmul(at(shared + ".down.weight").t()) + at(shared + ".down.bias");
    }
    gates[name].push_back(std::move(gate));
    return x + keyed_dropout(y, site, context);
  }

  // 1 where a choice finds a place, [tokens, choices].
  torch::Tensor kept(const std::vector<std::vector<std::int64_t>>& chosen) const {
    const ExpertOptions& o = t_.experts;
    const auto tokens = static_cast<std::int64_t>(chosen.size());
    torch::Tensor out = torch::ones({tokens, o.choices}, torch::kFloat64);
    if (o.capacity_factor == 0) return out;
    const double all =
        t_.one_capacity ? static_cast<double>(t_.sequences * kMoeLength) : static_cast<double>(tokens);
    const double places = std::ceil(o.choices * o.capacity_factor * all / o.count);
    std::vector<double> taken(static_cast<std::size_t>(o.count));
    const auto ask = [&](std::int64_t t, int i) {
      double& of =
          taken[static_cast<std::size_t>(chosen[static_cast<std::size_t>(t)][static_cast<std::size_t>(i)])];
      if (of++ >= places) out[t][i] = 0;
    };
    if (t_.second_before) {
      for (std::int64_t t = 0; t < tokens; ++t) {
        for (int i = 0; i < o.choices; ++i) ask(t, i);
      }
      return out;
    }
    for (int i = 0; i < o.choices; ++i) {
      for (std::int64_t t = 0; t < tokens; ++t) ask(t, i);
    }
    return out;
  }

  torch::Tensor router_loss(const std::vector<Gate>& of_ranks) const {
    if (t_.own_fractions) {
      torch::Tensor out = torch::zeros({}, torch::kFloat64);
      for (const Gate& gate : of_ranks) out = out + of_all({gate}) / static_cast<double>(of_ranks.size());
      return out;
    }
    return of_all(of_ranks);
  }
  torch::Tensor of_all(const std::vector<Gate>& gates) const {
    const ExpertOptions& o = t_.experts;
    double tokens = 0;
    torch::Tensor squares = torch::zeros({}, torch::kFloat64), out = torch::zeros({}, torch::kFloat64);
    for (const Gate& gate : gates) {
      tokens += static_cast<double>(gate.probabilities.size(0));
      squares = squares + gate.squares;
    }
    for (std::int64_t e = 0; e < o.count; ++e) {
      double share = 0;
      torch::Tensor mean = torch::zeros({}, torch::kFloat64);
      for (const Gate& gate : gates) {
        share += gate.chosen[static_cast<std::size_t>(e)] / (o.choices * tokens);
        mean = mean + gate.probabilities.select(1, e).sum() / tokens;
      }
      out = out + o.balance_loss * o.count * share * mean;
    }
    return out + o.z_loss * squares / tokens;
  }

  Moe t_;
  std::unique_ptr<Model> model_;
  std::map<std::string, torch::Tensor> by_name_;
};

inline Trained alone(const Moe& t) {
  DenseMoe dense(t);
  const auto optimizer = torchs(t.optimizer, dense.model());
  Trained out;
  for (int step = 0; step < t.steps; ++step) {
    optimizer->zero_grad();
    const DenseMoe::Losses losses = dense.losses(moe_batch(dense.model(), t, step), step);
    losses.total.backward();
    std::vector<torch::Tensor> tensors;
    for (std::size_t i = 0; i < dense.model().parameters().size(); ++i) {
      const torch::Tensor& tensor = dense.model().parameters()[i].tensor;
      if (dense.model().shape().parameters[i].of_experts > 0 && tensor.grad().defined())
        tensor.grad().mul_(t.expert_scale);
      tensors.push_back(tensor);
    }
    if (t.clip_norm > 0) torch::nn::utils::clip_grad_norm_(tensors, t.clip_norm);
    optimizer->step();
    out.losses.push_back(losses.mean);
  }
  for (const Parameter& p : dense.model().parameters()) out.parameters.push_back(p.tensor.detach().clone());
  return out;
}

}  // namespace weft::torch_test
