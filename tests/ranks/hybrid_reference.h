// What tests of hybrid embeddings compare with, one process: a small model with two tables and a dense
// vector, float64.
//
// A token reads row a of table "in" and row b of table "out"; with z = in[a] * w - out[b] its loss is the sum
// over columns of log(cosh(z)). The batch of a step is dealt to the ranks unevenly, one of them gets nothing
// in some steps. The reference is a plain loop over all tokens, with rows in a map and the optimizers' rules
// written out once more.
//
// With `negatives` the loss of a token has a term log(cosh(in[a] * w + out[n])) for each of so many rows n of
// "out" more, the same for all tokens of a step.
//
// A token has a weight. The last row of each table is read by a token of its own, in some steps by it and by
// its opposite: their gradients are exactly zero then, and the moments that the row has decay.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "state/optimizer.h"
#include "weft/random.h"

namespace weft::toy {

inline constexpr std::int64_t kRowsIn = 61, kRowsOut = 45, kColumns = 7;
inline constexpr std::int64_t kPadding = 3;  // of "in"
inline constexpr std::int64_t kSteps = 20;

struct Token {
  std::int64_t in = 0, out = 0;
  double weight = 1;
};

inline std::int64_t skewed(Random& random, std::int64_t rows) {  // small ids more often
  const double u = random.uniform();
  return static_cast<std::int64_t>(u * u * u * static_cast<double>(rows));
}

inline std::vector<Token> batch_of(std::int64_t step) {
  Random random(7, 1, static_cast<std::uint32_t>(step));
  std::vector<Token> out(20 + random.below(8));
  for (Token& token : out) token = {skewed(random, kRowsIn - 1), skewed(random, kRowsOut - 1)};
  out[0].in = kPadding;
  // Of four steps: a gradient, zeros that are read next, zeros that are not, nothing.
  const Token last{kRowsIn - 1, kRowsOut - 1};
  if (step % 4 != 3) out.push_back(last);
  if (step % 4 == 1 || step % 4 == 2) out.push_back({last.in, last.out, -1});
  return out;
}

inline std::vector<std::int64_t> negatives_of(std::int64_t step, int count) {
  std::vector<std::int64_t> out;
  for (int i = 0; i < count; ++i) out.push_back((7 * step + 11 * i) % kRowsOut);
  return out;
}

// Token i of a step: whose it is. The last rank has none in every third step.
inline int rank_of(std::int64_t step, std::size_t i, int size) {
  Random random(9, 2, static_cast<std::uint32_t>(step), static_cast<std::uint32_t>(i));
  const int others = size > 1 && step % 3 == 2 ? size - 1 : size;
  return static_cast<int>(random.below(static_cast<std::uint32_t>(others)));
}

inline double initial(std::uint32_t tensor, std::int64_t row, std::int64_t column) {
  return Random(11, tensor, static_cast<std::uint32_t>(row), static_cast<std::uint32_t>(column)).uniform() -
         0.5;
}

inline constexpr double kLrDense = 0.05;
inline double lr_of(std::int64_t step) { return 0.05 / (1.0 + 0.1 * static_cast<double>(step)); }

inline OptimizerOptions optimizer(const std::string& name) {
  OptimizerOptions out = default_options(name);
  out.lr = lr_of(0);
  if (name == "adagrad") out.lr_decay = 0.01;
  return out;
}

using Rows = std::map<std::int64_t, std::vector<double>>;

// How an implementation could be wrong.
struct Faults {
  bool counts_each_part = false;  // two updates a step, each of which counts
  bool own_next_only = false;     // a row that only another rank reads next is updated behind its lookup
  // Rows that the next step does not read are updated behind the lookup of the step after it: so it is with
  // one in advance that does not wait for them.
  bool delayed_too_late = false;
  bool early_of_all = false;  // rows are looked up in advance although this step updates them
  bool duplicates = false;    // the rule sees a row once for each token
  bool divides_twice = false;
  bool drops_zeros = false;  // rows whose gradient is zero are not touched
  bool updates_padding = false;
  bool touches_all = false;  // dense Adam: moments of all rows decay
};

struct Asked {
  Faults faults{};
  double clip = 0;
  int size = 1;           // of the job that it stands for: what faults depend on
  std::int64_t bad = -1;  // step that is left out
  int negatives = 0;
};

struct OneProcess {
  OptimizerOptions options;
  Asked asked;
  Faults faults;
  Rows in, out, moments[2][2];  // of each table
  std::vector<double> w;
  std::vector<double> losses, norms;
  std::int64_t counted = 0, num_zeros = 0;  // steps; rows whose gradient was zero in some step

  OneProcess(const std::string& name, std::int64_t steps, const Asked& a = {})
      : options(optimizer(name)), asked(a), faults(a.faults) {
    for (std::int64_t r = 0; r < kRowsIn; ++r) in[r] = row(1, r);
    for (std::int64_t r = 0; r < kRowsOut; ++r) out[r] = row(2, r);
    w = row(3, 0);
    for (std::int64_t step = 0; step < steps; ++step) {
      if (step != asked.bad) train(step);
    }
    for (Late& l : late_) update(l.table, l.id, l.at);
  }
  static std::vector<double> row(std::uint32_t tensor, std::int64_t r) {
    std::vector<double> values;
    for (std::int64_t c = 0; c < kColumns; ++c) values.push_back(initial(tensor, r, c));
    return values;
  }

  // Of a step, one for each time that a row is read; and its loss is noted.
  using Gradients = std::array<std::vector<std::pair<std::int64_t, std::vector<double>>>, 2>;
  Gradients differentiate(std::int64_t step, std::vector<double>& grad_w) {
    const std::vector<Token> tokens = batch_of(step);
    const std::vector<std::int64_t> negatives = negatives_of(step, asked.negatives);
    const double n = static_cast<double>(tokens.size()) * (faults.divides_twice ? 2 : 1);
    Gradients grads;
    double loss = 0;
    for (const Token& t : tokens) {
      std::vector<double> gi(kColumns), go(kColumns);
      for (std::size_t c = 0; c < kColumns; ++c) {
        const double e = in[t.in][c], z = e * w[c] - out[t.out][c], s = t.weight * std::tanh(z) / n;
        loss += t.weight * std::log(std::cosh(z));
        gi[c] = w[c] * s;
        go[c] = -s;
        grad_w[c] += e * s;
        for (const std::int64_t id : negatives) {
          const double y = e * w[c] + out[id][c], q = t.weight * std::tanh(y) / n;
          loss += t.weight * std::log(std::cosh(y));
          gi[c] += w[c] * q;
          grad_w[c] += e * q;
        }
      }
      for (const std::int64_t id : negatives) {
        std::vector<double> g(kColumns);
        for (std::size_t c = 0; c < kColumns; ++c)
          g[c] = t.weight * std::tanh(in[t.in][c] * w[c] + out[id][c]) / n;
        grads[1].emplace_back(id, g);
      }
      if (t.in != kPadding || faults.updates_padding) grads[0].emplace_back(t.in, gi);
      grads[1].emplace_back(t.out, go);
    }
    losses.push_back(loss / static_cast<double>(tokens.size()));
    return grads;
  }

  void train(std::int64_t step) {
    std::vector<double> grad_w(kColumns, 0);
    const Gradients grads = differentiate(step, grad_w);
    Rows sums[2];
    double squares = 0;
    for (std::size_t t = 0; t < 2; ++t) {
      for (const auto& [id, g] : grads[t]) {
        std::vector<double>& sum = sums[t].try_emplace(id, kColumns, 0.0).first->second;
        for (std::size_t c = 0; c < kColumns; ++c) sum[c] += g[c];
      }
      for (const auto& [id, g] : sums[t]) {
        for (const double v : g) squares += v * v;
      }
    }
    for (const double v : grad_w) squares += v * v;
    const double norm = std::sqrt(squares),
                 scale = asked.clip > 0 ? std::min(1.0, asked.clip / (norm + 1e-6)) : 1;
    norms.push_back(norm);
    counted += faults.counts_each_part ? 2 : 1;
    update_late(step);
    for (int t = 0; t < 2; ++t) {
      Rows& table = t == 0 ? in : out;
      if (faults.touches_all) {
        for (auto& [id, unused] : table) sums[t].try_emplace(id, kColumns, 0.0);
      }
      if (faults.duplicates) {
        for (const auto& [id, g] : grads[static_cast<std::size_t>(t)])
          update(t, id, {g, scale, lr_of(step), counted});
        continue;
      }
      for (const auto& [id, g] : sums[t]) {
        const bool zero = std::ranges::all_of(g, [](double v) { return v == 0; });
        num_zeros += zero ? 1 : 0;
        if (faults.drops_zeros && zero) continue;
        const At at{g, scale, lr_of(step), counted};
        const std::int64_t until = updated_in(step, t, id);
        if (until > step)
          late_.push_back({t, id, until, at});
        else
          update(t, id, at);
      }
    }
    for (std::size_t c = 0; c < kColumns; ++c) w[c] -= kLrDense * scale * grad_w[c];
  }

 private:
  struct At {
    std::vector<double> gradient;
    double scale, lr;
    std::int64_t step;
  };
  struct Late {
    int table;
    std::int64_t id, until;
    At at;
  };
  std::vector<Late> late_;

  // In front of the updates of a step, when its rows have been read.
  void update_late(std::int64_t step) {
    std::erase_if(late_, [&](const Late& l) {
      if (l.until <= step) update(l.table, l.id, l.at);
      return l.until <= step;
    });
  }

  // The step whose rows were read before this update of a row is seen.
  std::int64_t updated_in(std::int64_t step, int table, std::int64_t id) const {
    const std::set<int> have = readers(step, table, id), next = readers(step + 1, table, id);
    const bool others = std::ranges::any_of(next, [&](int r) { return !have.contains(r); });
    if (faults.own_next_only && others) return step + 1;
    if (faults.early_of_all && !next.empty()) return step + 1;
    if (faults.delayed_too_late && next.empty()) return step + 2;
    return step;
  }

  std::set<int> readers(std::int64_t step, int table, std::int64_t id) const {
    std::set<int> ranks;
    const std::vector<Token> tokens = batch_of(step);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      if ((table == 0 ? tokens[i].in : tokens[i].out) == id) ranks.insert(rank_of(step, i, asked.size));
    }
    return ranks;
  }

  void update(int t, std::int64_t id, const At& at) {
    std::vector<double>& value = (t == 0 ? in : out)[id];
    std::vector<double>& m = moments[t][0].try_emplace(id, kColumns, 0.0).first->second;
    std::vector<double>& v = moments[t][1].try_emplace(id, kColumns, 0.0).first->second;
    const double step = static_cast<double>(at.step), lr = at.lr;
    for (std::size_t c = 0; c < kColumns; ++c) {
      const double x = at.scale * at.gradient[c];
      if (options.name == "sgd") value[c] -= lr * x;
      if (options.name == "adagrad") {
        v[c] += x * x;
        value[c] -= lr / (1 + (step - 1) * options.lr_decay) * x / (std::sqrt(v[c]) + options.eps);
      }
      if (options.name != "adam" && options.name != "adamw") continue;
      if (options.name == "adamw") value[c] *= 1 - lr * options.weight_decay;
      m[c] = options.beta1 * m[c] + (1 - options.beta1) * x;
      v[c] = options.beta2 * v[c] + (1 - options.beta2) * x * x;
      const double size =
          lr * std::sqrt(1 - std::pow(options.beta2, step)) / (1 - std::pow(options.beta1, step));
      value[c] -= size * m[c] / (std::sqrt(v[c]) + options.eps);
    }
  }
};

// Lists of a table in a step, rank by rank.
inline std::vector<std::set<std::int64_t>> lists_of(int table, std::int64_t step, int size,
                                                    int negatives = 0) {
  std::vector<std::set<std::int64_t>> out(static_cast<std::size_t>(size));
  const std::vector<Token> tokens = batch_of(step);
  for (std::size_t i = 0; i < tokens.size(); ++i)
    out[static_cast<std::size_t>(rank_of(step, i, size))].insert(table == 0 ? tokens[i].in : tokens[i].out);
  for (auto& list : out) {
    if (table == 1)
      for (const std::int64_t id : negatives_of(step, negatives)) list.insert(id);
  }
  return out;
}

}  // namespace weft::toy
