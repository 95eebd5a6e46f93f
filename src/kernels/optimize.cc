// One loop over an element-wise rule, compiled as it is and for AVX2, which is taken where the processor has
// it (AVX-512 was no faster: the loop waits for memory, divisions and roots). src/CMakeLists.txt compiles
// this file without contraction into fused multiply-adds, so that both give the same bits, and without errno
// and traps, so that the compiler may use vectors. A choice inside a rule is a select, never a branch.
#include "kernels/optimize.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

namespace weft {

namespace {

template <class T>
struct PlainSgd {
  T lr, weight_decay;
  bool decays;

  explicit PlainSgd(const SgdStep& s)
      : lr(static_cast<T>(-s.lr)),
        weight_decay(static_cast<T>(s.weight_decay)),
        decays(s.weight_decay != 0) {}

  [[gnu::always_inline]] inline void operator()(T& w, T g) const {
    const T decayed = g + weight_decay * w;
    w += lr * (decays ? decayed : g);
  }
};

template <class T>
struct MomentumSgd {
  T lr, momentum, fresh, weight_decay;
  bool decays, first, nesterov;

  explicit MomentumSgd(const SgdStep& s)
      : lr(static_cast<T>(-s.lr)),
        momentum(static_cast<T>(s.momentum)),
        fresh(static_cast<T>(1 - s.dampening)),
        weight_decay(static_cast<T>(s.weight_decay)),
        decays(s.weight_decay != 0),
        first(s.first),
        nesterov(s.nesterov) {}

  [[gnu::always_inline]] inline void operator()(T& w, T gradient, T& buffer) const {
    const T decayed = gradient + weight_decay * w;
    const T g = decays ? decayed : gradient;
    const T next = buffer * momentum + fresh * g;
    const T b = first ? g : next;
    const T ahead = g + momentum * b;
    buffer = b;
    w += lr * (nesterov ? ahead : b);
  }
};

// kDecays: weight decay joins the gradient. kFromGradient: torch's lerp starts from the end that is nearer.
// (Selects instead of these two keep g++ 12 from using vectors where they have no blend, as in SSE2.)
template <class T, bool kDecays, bool kFromGradient>
struct Adam {
  T kept, weight_decay, weight1, beta2, weight2, correction2, eps, lr;

  explicit Adam(const AdamStep& s)
      : kept(static_cast<T>(s.decoupled ? 1 - s.lr * s.weight_decay : 1)),
        weight_decay(static_cast<T>(s.weight_decay)),
        weight1(static_cast<T>(1 - s.beta1) - T{kFromGradient}),
        beta2(static_cast<T>(s.beta2)),
        weight2(static_cast<T>(1 - s.beta2)),
        correction2(static_cast<T>(std::sqrt(1 - std::pow(s.beta2, static_cast<double>(s.step))))),
        eps(static_cast<T>(s.eps)),
        lr(static_cast<T>(-(s.lr / (1 - std::pow(s.beta1, static_cast<double>(s.step)))))) {}

  [[gnu::always_inline]] inline void operator()(T& value, T gradient, T& m, T& v) const {
    const T w = value * kept;
    const T g = kDecays ? gradient + weight_decay * w : gradient;
    m = (kFromGradient ? g : m) + weight1 * (g - m);
    v = v * beta2 + weight2 * g * g;
    value = w + lr * m / (std::sqrt(v) / correction2 + eps);
  }
};

template <class T>
struct Adagrad {
  T lr, eps, weight_decay;
  bool decays;

  explicit Adagrad(const AdagradStep& s)
      : lr(static_cast<T>(-(s.lr / (1 + static_cast<double>(s.step - 1) * s.lr_decay)))),
        eps(static_cast<T>(s.eps)),
        weight_decay(static_cast<T>(s.weight_decay)),
        decays(s.weight_decay != 0) {}

  [[gnu::always_inline]] inline void operator()(T& w, T gradient, T& sum) const {
    const T decayed = gradient + weight_decay * w;
    const T g = decays ? decayed : gradient;
    sum += g * g;
    w += lr * g / (std::sqrt(sum) + eps);
  }
};

// torch.optim.SparseAdam; decoupled weight decay before it.
template <class T>
struct RowAdam {
  T kept, weight1, weight2, eps, lr;

  explicit RowAdam(const AdamStep& s)
      : kept(static_cast<T>(s.decoupled ? 1 - s.lr * s.weight_decay : 1)),
        weight1(static_cast<T>(1 - s.beta1)),
        weight2(static_cast<T>(1 - s.beta2)),
        eps(static_cast<T>(s.eps)),
        lr(static_cast<T>(-(s.lr * std::sqrt(1 - std::pow(s.beta2, static_cast<double>(s.step))) /
                            (1 - std::pow(s.beta1, static_cast<double>(s.step)))))) {}

  [[gnu::always_inline]] inline void operator()(T& value, T g, T& m, T& v) const {
    m += (g - m) * weight1;
    v += (g * g - v) * weight2;
    value = value * kept + lr * (m / (std::sqrt(v) + eps));
  }
};

struct Velocity {
  float momentum;
  [[gnu::always_inline]] inline void operator()(float& next, float gradient, const float& velocity) const {
    next = momentum * velocity + gradient;
  }
};

template <class T>
double squares(std::span<const T> values) {
  constexpr std::size_t kLanes = 8;
  std::array<double, kLanes> lanes{};
  std::size_t i = 0;
  for (; i + kLanes <= values.size(); i += kLanes) {
    for (std::size_t l = 0; l < kLanes; ++l) {
      const auto v = static_cast<double>(values[i + l]);
      lanes[l] += v * v;
    }
  }
  for (std::size_t l = 0; i < values.size(); ++i, ++l) {
    const auto v = static_cast<double>(values[i]);
    lanes[l] += v * v;
  }
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

template <class Rule, class T, class... State>
[[gnu::always_inline]] inline void loop(const Rule& given, std::size_t n, T* __restrict value,
                                        const T* __restrict gradient, State* __restrict... state) {
  const Rule rule = given;  // of its own, so that no store can change it
  for (std::size_t i = 0; i < n; ++i) rule(value[i], gradient[i], state[i]...);
}

template <class Rule, class T, class... State>
void plain(const Rule& rule, std::size_t n, T* value, const T* gradient, State*... state) {
  loop(rule, n, value, gradient, state...);
}

#if defined(__x86_64__)
template <class Rule, class T, class... State>
[[gnu::target("avx2")]] void avx2(const Rule& rule, std::size_t n, T* value, const T* gradient,
                                  State*... state) {
  loop(rule, n, value, gradient, state...);
}
#endif

template <class Rule, class T, class... State>
void update(const Rule& rule, std::span<T> value, std::span<const T> gradient, State*... state) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2"))
    return avx2(rule, value.size(), value.data(), gradient.data(), state...);
#endif
  return plain(rule, value.size(), value.data(), gradient.data(), state...);
}

template <class Rule, class T, class... State>
[[gnu::always_inline]] inline void loop_rows(const Rule& rule, const TableRows& rows, T* value,
                                             const T* gradient, State*... state) {
  for (const std::int32_t id : rows.ids) {
    const std::size_t at = static_cast<std::size_t>(id) * rows.width;
    loop(rule, rows.width, value + at, gradient, (state + at)...);
    gradient += rows.width;
  }
}

#if defined(__x86_64__)
template <class Rule, class T, class... State>
[[gnu::target("avx2")]] void rows_avx2(const Rule& rule, const TableRows& rows, T* value, const T* gradient,
                                       State*... state) {
  loop_rows(rule, rows, value, gradient, state...);
}
#endif

template <class Rule, class T, class... State>
void update_rows(const Rule& rule, const TableRows& rows, T* value, const T* gradient, State*... state) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return rows_avx2(rule, rows, value, gradient, state...);
#endif
  return loop_rows(rule, rows, value, gradient, state...);
}

template <class T>
void sgd(std::span<T> value, std::span<const T> gradient, std::span<T> buffer, const SgdStep& step) {
  if (step.momentum == 0)
    update(PlainSgd<T>(step), value, gradient);
  else
    update(MomentumSgd<T>(step), value, gradient, buffer.data());
}

template <class T>
void adam(std::span<T> value, std::span<const T> gradient, T* exp_avg, T* exp_avg_sq, const AdamStep& step) {
  const bool decays = step.weight_decay != 0 && !step.decoupled;
  const bool from_gradient = static_cast<T>(1 - step.beta1) >= T{0.5};
  if (decays && from_gradient)
    update(Adam<T, true, true>(step), value, gradient, exp_avg, exp_avg_sq);
  else if (decays)
    update(Adam<T, true, false>(step), value, gradient, exp_avg, exp_avg_sq);
  else if (from_gradient)
    update(Adam<T, false, true>(step), value, gradient, exp_avg, exp_avg_sq);
  else
    update(Adam<T, false, false>(step), value, gradient, exp_avg, exp_avg_sq);
}

}  // namespace

void sgd_update(std::span<float> value, std::span<const float> gradient, std::span<float> buffer,
                const SgdStep& step) {
  sgd(value, gradient, buffer, step);
}
void sgd_update(std::span<double> value, std::span<const double> gradient, std::span<double> buffer,
                const SgdStep& step) {
  sgd(value, gradient, buffer, step);
}

void adam_update(std::span<float> value, std::span<const float> gradient, std::span<float> exp_avg,
                 std::span<float> exp_avg_sq, const AdamStep& step) {
  adam(value, gradient, exp_avg.data(), exp_avg_sq.data(), step);
}
void adam_update(std::span<double> value, std::span<const double> gradient, std::span<double> exp_avg,
                 std::span<double> exp_avg_sq, const AdamStep& step) {
  adam(value, gradient, exp_avg.data(), exp_avg_sq.data(), step);
}

void adagrad_update(std::span<float> value, std::span<const float> gradient, std::span<float> sum,
                    const AdagradStep& step) {
  update(Adagrad<float>(step), value, gradient, sum.data());
}
void adagrad_update(std::span<double> value, std::span<const double> gradient, std::span<double> sum,
                    const AdagradStep& step) {
  update(Adagrad<double>(step), value, gradient, sum.data());
}

void sgd_rows(std::span<float> value, std::span<const float> gradient, const TableRows& rows,
              const SgdStep& step) {
  update_rows(PlainSgd<float>(step), rows, value.data(), gradient.data());
}
void adam_rows(std::span<float> value, std::span<const float> gradient, std::span<float> exp_avg,
               std::span<float> exp_avg_sq, const TableRows& rows, const AdamStep& step) {
  update_rows(RowAdam<float>(step), rows, value.data(), gradient.data(), exp_avg.data(), exp_avg_sq.data());
}
void adagrad_rows(std::span<float> value, std::span<const float> gradient, std::span<float> sum,
                  const TableRows& rows, const AdagradStep& step) {
  update_rows(Adagrad<float>(step), rows, value.data(), gradient.data(), sum.data());
}

void sgd_rows(std::span<double> value, std::span<const double> gradient, const TableRows& rows,
              const SgdStep& step) {
  update_rows(PlainSgd<double>(step), rows, value.data(), gradient.data());
}
void adam_rows(std::span<double> value, std::span<const double> gradient, std::span<double> exp_avg,
               std::span<double> exp_avg_sq, const TableRows& rows, const AdamStep& step) {
  update_rows(RowAdam<double>(step), rows, value.data(), gradient.data(), exp_avg.data(), exp_avg_sq.data());
}
void adagrad_rows(std::span<double> value, std::span<const double> gradient, std::span<double> sum,
                  const TableRows& rows, const AdagradStep& step) {
  update_rows(Adagrad<double>(step), rows, value.data(), gradient.data(), sum.data());
}

void accumulate_velocity(float momentum, std::span<const float> velocity, std::span<const float> gradient,
                         std::span<float> next) {
  if (velocity.empty())
    std::copy(gradient.begin(), gradient.end(), next.begin());
  else
    update(Velocity{momentum}, next, gradient, velocity.data());
}

double sum_of_squares(std::span<const float> values) { return squares(values); }
double sum_of_squares(std::span<const double> values) { return squares(values); }

}  // namespace weft
