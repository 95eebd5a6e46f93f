// The optimizers against the published formulas, written once more as a plain loop in float64.
#include "state/optimizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "unit/optimizer_samples.h"
#include "weft/error.h"

namespace weft {
namespace {

using namespace optimizer_samples;  // NOLINT(google-build-using-namespace): made for these tests

// u = 2^-24 or 2^-53, n = 20 steps, lr = 0.01, weight decay 0.1 at most, beta1 and momentum 0.9 at most.
//   w        SGD's buffer is at most 25 (1 - 0.9^k) after k steps with |g| < 2.5, so |w| < 1.5 + 3 < 5; it is
//            rounded twice a step: 2 n * 5 u = 200 u
//   SGD      the buffer: three roundings a step of 25 u at most, fading by 0.9: 750 u; Nesterov doubles it;
//            times n lr: 300 u
//   Adam     directions are at most 7 (below), so |w| < 2.5 and 0.25 <= |g| <= 1.75 with decay. m: four
//            roundings a step of 4 u at most (|g - m| <= 3.5), 320 u in all steps. sqrt(v^) >= 0.25, right to
//            3 n u relative. Direction m^ / sqrt(v^) <= 1.75 / 0.25 = 7: (320 / 0.25 + 7 * 60) u = 1700 u;
//            times n lr: 340 u
//   Adagrad  directions are at most 1, the sum right to 2 n u relative: less than Adam
//   scalars  rounded once each: 5 u of updates that are 3 at most in all steps: 15 u
// In all less than 700 u; in float64 the reference rounds as often, so twice that. A wrong formula is off by
// more than ten times the tolerance.
template <class T>
constexpr double kTolerance = (sizeof(T) == 8 ? 1400 : 700) * std::numeric_limits<T>::epsilon() / 2;

// ---- the reference: one parameter ----

struct Reference {
  OptimizerOptions o;
  std::vector<double> w, a, b;  // value and state
  int step = 0;
  // Broken variants.
  bool no_bias_correction = false;
  bool no_first_buffer = false;
  bool no_own_steps = false;

  Reference(const OptimizerOptions& options, std::vector<double> value)
      : o(options), w(std::move(value)), a(w.size()), b(w.size()) {
    if (o.name == "adagrad") a.assign(w.size(), o.initial_accumulator);
  }

  void update(const std::vector<double>& gradient) {
    ++step;
    for (std::size_t i = 0; i < w.size(); ++i) one(w[i], gradient[i], a[i], b[i]);
  }

  void one(double& x, double g, double& first, double& second) const {
    const int t = no_own_steps ? 2 * step : step;
    if (o.name == "adamw")
      x = x - o.lr * o.weight_decay * x;  // Loshchilov and Hutter 2019, as torch scales it
    else
      g = g + o.weight_decay * x;
    if (o.name == "sgd") {  // Sutskever et al. 2013, as torch writes it
      if (o.momentum != 0) {
        const bool start = t == 1 && !no_first_buffer;
        first = start ? g : o.momentum * first + (1 - o.dampening) * g;
        g = o.nesterov ? g + o.momentum * first : first;
      }
      x = x - o.lr * g;
    } else if (o.name == "adagrad") {  // Duchi et al. 2011
      first = first + g * g;
      x = x - o.lr / (1 + (t - 1) * o.lr_decay) * g / (std::sqrt(first) + o.eps);
    } else {  // Kingma and Ba 2015, algorithm 1
      first = o.beta1 * first + (1 - o.beta1) * g;
      second = o.beta2 * second + (1 - o.beta2) * g * g;
      const double m = no_bias_correction ? first : first / (1 - std::pow(o.beta1, t));
      const double v = no_bias_correction ? second : second / (1 - std::pow(o.beta2, t));
      x = x - o.lr * m / (std::sqrt(v) + o.eps);
    }
  }
};

std::vector<double> widened(const auto& x) { return {x.begin(), x.end()}; }

// The largest difference between the optimizer's values and the reference's over all steps.
template <class T>
double difference(
    const OptimizerOptions& options, std::size_t n,
    const std::function<void(Reference&)>& spoil = [](Reference&) {}) {
  const std::vector<OptimizerParameter> parameters{{"w", static_cast<std::int64_t>(n), dtype_of<T>()}};
  Optimizer optimizer(options, parameters);
  std::vector<T> value = numbers<T>(n, 1, 0);
  Reference reference(options, widened(value));
  spoil(reference);
  double largest = 0;
  for (int s = 0; s < kSteps; ++s) {
    const std::vector<T> gradient = numbers<T>(n, 2, static_cast<std::uint32_t>(s));
    optimizer.update(0, value, gradient);
    reference.update(widened(gradient));
    for (std::size_t i = 0; i < n; ++i) {
      const double d = std::fabs(static_cast<double>(value[i]) - reference.w[i]);
      largest = d > largest || std::isnan(d) ? d : largest;
    }
  }
  EXPECT_EQ(optimizer.step(0), kSteps);
  return largest;
}

TEST(Optimizer, EqualsThePublishedFormulas) {
  for (const OptimizerOptions& options : all_options()) {
    for (const std::size_t n : {0, 1, 7, 1000}) {
      EXPECT_LE(difference<float>(options, n), kTolerance<float>) << describe(options) << " " << n;
      EXPECT_LE(difference<double>(options, n), kTolerance<double>) << describe(options) << " " << n;
    }
  }
}

TEST(Optimizer, BrokenFormulasAreSeen) {
  const auto expect_seen = [](const OptimizerOptions& options, const std::function<void(Reference&)>& spoil) {
    EXPECT_GT(difference<float>(options, 7, spoil), 10 * kTolerance<float>) << describe(options);
    EXPECT_GT(difference<double>(options, 7, spoil), 10 * kTolerance<double>) << describe(options);
  };
  for (const OptimizerOptions& options : all_options()) {
    const bool is_adam = options.name == "adam" || options.name == "adamw";
    if (is_adam) expect_seen(options, [](Reference& r) { r.no_bias_correction = true; });
    if (is_adam) expect_seen(options, [](Reference& r) { r.no_own_steps = true; });
    if (options.dampening != 0) expect_seen(options, [](Reference& r) { r.no_first_buffer = true; });
    if (options.nesterov) expect_seen(options, [](Reference& r) { r.o.nesterov = false; });
    if (options.lr_decay != 0) expect_seen(options, [](Reference& r) { r.o.lr_decay = 0; });
    if (options.weight_decay == 0) continue;
    expect_seen(options, [](Reference& r) { r.o.weight_decay = 0; });
    if (is_adam) {
      expect_seen(options, [](Reference& r) { r.o.name = r.o.name == "adam" ? "adamw" : "adam"; });
    }
  }
}

// Elements know nothing of each other: a long update is the updates of its pieces, to the bit, so the vectors
// of the long one compute what the scalars of the short ones do.
template <class T>
void expect_pieces_equal_whole() {
  constexpr std::size_t n = 101;
  for (const OptimizerOptions& options : all_options()) {
    const std::vector<OptimizerParameter> whole{{"w", n, dtype_of<T>()}};
    std::vector<OptimizerParameter> single;
    for (std::size_t i = 0; i < n; ++i) single.push_back({std::to_string(i), 1, dtype_of<T>()});
    Optimizer one(options, whole);
    Optimizer many(options, single);
    std::vector<T> a = numbers<T>(n, 1, 0);
    std::vector<T> b = a;
    for (int s = 0; s < kSteps; ++s) {
      const std::vector<T> gradient = numbers<T>(n, 2, static_cast<std::uint32_t>(s));
      one.update(0, a, gradient);
      for (std::size_t i = 0; i < n; ++i) {
        many.update(static_cast<int>(i), std::span(b).subspan(i, 1), std::span(gradient).subspan(i, 1));
      }
    }
    EXPECT_EQ(a, b) << describe(options);
  }
}

TEST(Optimizer, VectorsAndScalarsGiveTheSameBits) {
  expect_pieces_equal_whole<float>();
  expect_pieces_equal_whole<double>();
}

TEST(Optimizer, ParametersCountTheirOwnSteps) {
  OptimizerOptions options = default_options("adam");
  options.lr = 0.01;
  const std::vector<OptimizerParameter> parameters{{"often", 7}, {"seldom", 7}};
  Optimizer optimizer(options, parameters);
  std::vector<float> often = numbers<float>(7, 1, 0);
  std::vector<float> seldom = often;
  Reference reference(options, widened(seldom));
  for (int s = 0; s < kSteps; ++s) {
    const std::vector<float> gradient = numbers<float>(7, 2, static_cast<std::uint32_t>(s));
    optimizer.update(0, often, gradient);
    if (s % 5 != 0) continue;
    optimizer.update(1, seldom, gradient);
    reference.update(widened(gradient));
  }
  EXPECT_EQ(optimizer.step(0), kSteps);
  EXPECT_EQ(optimizer.step(1), kSteps / 5);
  for (std::size_t i = 0; i < 7; ++i) EXPECT_NEAR(seldom[i], reference.w[i], kTolerance<float>);
}

TEST(Optimizer, TheLearningRateCanChange) {
  const OptimizerOptions options{.name = "sgd", .lr = 0.5};
  const std::vector<OptimizerParameter> parameters{{"w", 1}};
  Optimizer optimizer(options, parameters);
  std::vector<float> value{1};
  const std::vector<float> gradient{1};
  optimizer.update(0, value, gradient);
  EXPECT_EQ(value[0], 0.5f);
  optimizer.set_lr(0.25);
  EXPECT_EQ(optimizer.options().lr, 0.25);
  optimizer.update(0, value, gradient);
  EXPECT_EQ(value[0], 0.25f);
  EXPECT_THROW(optimizer.set_lr(-1), UsageError);
  EXPECT_THROW(optimizer.set_lr(NAN), UsageError);
  EXPECT_THROW(optimizer.set_lr(INFINITY), UsageError);
  EXPECT_EQ(optimizer.options().lr, 0.25);
}

TEST(Optimizer, OptionsCanChangeButNotTheStateTheyNeed) {
  const std::vector<OptimizerParameter> parameters{{"w", 1}};
  const OptimizerOptions adam = default_options("adam");
  OptimizerOptions other = adam;
  other.beta1 = 0.5;
  other.eps = 0.1;
  Optimizer changed(adam, parameters), given(other, parameters), same(adam, parameters);
  changed.set_options(other);
  std::vector<float> a{1}, b{1}, c{1};
  for (const float g : {1.0f, -0.5f, 2.0f}) {
    const std::vector<float> gradient{g};
    changed.update(0, a, gradient);
    given.update(0, b, gradient);
    same.update(0, c, gradient);
  }
  EXPECT_EQ(a, b);
  EXPECT_NE(a, c);  // control
  other.beta1 = 1;
  EXPECT_THROW(changed.set_options(other), UsageError);
  EXPECT_THROW(changed.set_options(default_options("adamw")), UsageError);
  EXPECT_EQ(changed.options().beta1, 0.5);
  Optimizer sgd({.name = "sgd"}, parameters);
  EXPECT_THROW(sgd.set_options({.name = "sgd", .momentum = 0.9}), UsageError);
}

TEST(Optimizer, DefaultsAreTorchs) {
  EXPECT_EQ(default_options("sgd").lr, 1e-3);
  EXPECT_EQ(default_options("sgd").momentum, 0);
  EXPECT_EQ(default_options("adam").lr, 1e-3);
  EXPECT_EQ(default_options("adam").eps, 1e-8);
  EXPECT_EQ(default_options("adam").weight_decay, 0);
  EXPECT_EQ(default_options("adamw").weight_decay, 1e-2);
  EXPECT_EQ(default_options("adamw").beta2, 0.999);
  EXPECT_EQ(default_options("adagrad").lr, 1e-2);
  EXPECT_EQ(default_options("adagrad").eps, 1e-10);
  for (const char* name : {"sgd", "adam", "adamw", "adagrad"}) {
    EXPECT_EQ(default_options(name).name, name);
    EXPECT_NO_THROW(validate(default_options(name)));
  }
}

// ---- bad calls ----

TEST(OptimizerCalls, AnUnknownNameIsAnsweredWithTheNearest) {
  const std::pair<const char*, const char*> cases[] = {
      {"adm", "'adam'"}, {"AdamW", "'adamw'"}, {"adagrd", "'adagrad'"}, {"sgdm", "'sgd'"}};
  for (const auto& [name, nearest] : cases) {
    try {
      default_options(name);
      ADD_FAILURE() << name;
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr(nearest));
    }
    EXPECT_THROW(Optimizer(OptimizerOptions{.name = name}, kPair), UsageError);
  }
}

TEST(OptimizerCalls, BadOptionsAreRefused) {
  const std::vector<std::function<void(OptimizerOptions&)>> bad_for_adam = {
      [](auto& o) { o.lr = -1e-3; },
      [](auto& o) { o.lr = NAN; },
      [](auto& o) { o.eps = -1; },
      [](auto& o) { o.beta1 = 1; },
      [](auto& o) { o.beta2 = -0.1; },
      [](auto& o) { o.weight_decay = INFINITY; },
      [](auto& o) { o.momentum = 0.9; },
      [](auto& o) { o.dampening = 0.1; },
      [](auto& o) { o.nesterov = true; },
      [](auto& o) { o.lr_decay = 0.1; },
      [](auto& o) { o.initial_accumulator = 0.1; },
  };
  for (const auto& spoil : bad_for_adam) {
    OptimizerOptions options = adam();
    EXPECT_NO_THROW(validate(options));
    spoil(options);
    EXPECT_THROW(validate(options), UsageError);
    EXPECT_THROW(Optimizer(options, kPair), UsageError);
  }
  EXPECT_THROW(validate({.name = "sgd", .nesterov = true}), UsageError);
  EXPECT_THROW(validate({.name = "sgd", .momentum = 0.9, .dampening = 0.1, .nesterov = true}), UsageError);
  EXPECT_THROW(validate({.name = "sgd", .momentum = 0.9, .dampening = NAN}), UsageError);
  EXPECT_NO_THROW(validate({.name = "sgd", .momentum = 0.9, .nesterov = true}));
}

TEST(OptimizerCalls, BadParametersAreRefused) {
  const auto make = [](const std::vector<OptimizerParameter>& parameters) { Optimizer(adam(), parameters); };
  EXPECT_THROW(make({{"", 1}}), UsageError);
  EXPECT_THROW(make({{"a", 1}, {"a", 1}}), UsageError);
  EXPECT_THROW(make({{"a", -1}}), UsageError);
  EXPECT_THROW(make({{"a", 1, DType::bfloat16}}), UsageError);
  EXPECT_NO_THROW(make({}));
}

TEST(OptimizerCalls, BadUpdatesAreRefusedAndChangeNothing) {
  Pair pair(adam());
  pair.run(0, 2);
  const StateSnapshot before = pair.save();
  EXPECT_EQ(pair.optimizer.find("second"), 1);
  EXPECT_EQ(pair.optimizer.find("third"), -1);
  std::vector<float> seven(7, 1);
  std::vector<float> six(6, 1);
  std::vector<double> double_seven(7, 1);
  EXPECT_THROW(pair.optimizer.update(-1, seven, seven), UsageError);
  EXPECT_THROW(pair.optimizer.update(2, seven, seven), UsageError);
  EXPECT_THROW(pair.optimizer.update(0, six, six), UsageError);
  EXPECT_THROW(pair.optimizer.update(0, seven, six), UsageError);
  EXPECT_THROW(pair.optimizer.update(0, double_seven, double_seven), UsageError);
  EXPECT_EQ(seven, std::vector<float>(7, 1));
  EXPECT_EQ(pair.save(), before);
}

}  // namespace
}  // namespace weft
