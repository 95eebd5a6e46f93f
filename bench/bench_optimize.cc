// Fused optimizer updates and low-rank products beside plain loops that compute the same, interleaved; one
// thread. `plain_ms` is the median of the loop, `of_plain` the kernel's median over it, `gbytes_per_second`
// what the kernel reads and writes of its arrays. 20 M elements unless WEFT_BENCH_LENGTH says otherwise;
// matrices are those of the default gpt: its table and a layer's longest.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "kernels/low_rank.h"
#include "kernels/optimize.h"
#include "kernels/scalar_low_rank.h"

namespace weft {
namespace {

using Floats = std::vector<float>;

std::size_t length() {
  const char* told = std::getenv("WEFT_BENCH_LENGTH");
  return told != nullptr ? static_cast<std::size_t>(std::atoll(told)) : 20'000'000;
}

template <class F>
double seconds(F f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> times) {
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  return times[times.size() / 2];
}

Floats waves(std::size_t count, float phase) {
  Floats out(count);
  for (std::size_t i = 0; i < count; ++i)
    out[i] = 0.01F * std::sin(phase + 0.37F * static_cast<float>(i % 1021));
  return out;
}

// `bytes` are what the kernel moves in one call.
void beside(benchmark::State& state, double bytes, const std::function<void()>& kernel,
            const std::function<void()>& plain) {
  std::vector<double> kernels, plains;
  kernel();
  plain();  // both are warm
  for (auto _ : state) {
    plains.push_back(seconds(plain));
    kernels.push_back(seconds(kernel));
    state.SetIterationTime(kernels.back());
  }
  state.counters["plain_ms"] = 1e3 * median(plains);
  state.counters["of_plain"] = median(kernels) / median(plains);
  state.counters["gbytes_per_second"] = 1e-9 * bytes / median(kernels);
}

// The arrays of an update; the plain loop has its own, so that both see the same history.
struct Arrays {
  Floats gradient = waves(length(), 1), value = waves(length(), 2), first = Floats(length()),
         second = Floats(length());
};

void plain_sgd(Arrays& a, float lr, float momentum) {
  for (std::size_t i = 0; i < a.value.size(); ++i) {
    a.first[i] = momentum * a.first[i] + a.gradient[i];
    a.value[i] -= lr * a.first[i];
  }
}

void plain_adam(Arrays& a, const AdamStep& s) {
  const auto n = static_cast<double>(s.step);
  const auto lr = static_cast<float>(s.lr / (1 - std::pow(s.beta1, n)));
  const auto correction = static_cast<float>(std::sqrt(1 - std::pow(s.beta2, n)));
  const auto beta1 = static_cast<float>(s.beta1), beta2 = static_cast<float>(s.beta2);
  const auto eps = static_cast<float>(s.eps), kept = static_cast<float>(1 - s.lr * s.weight_decay);
  for (std::size_t i = 0; i < a.value.size(); ++i) {
    const float g = a.gradient[i];
    a.first[i] += (1 - beta1) * (g - a.first[i]);
    a.second[i] = beta2 * a.second[i] + (1 - beta2) * g * g;
    a.value[i] = kept * a.value[i] - lr * a.first[i] / (std::sqrt(a.second[i]) / correction + eps);
  }
}

void plain_adagrad(Arrays& a, float lr, float eps) {
  for (std::size_t i = 0; i < a.value.size(); ++i) {
    a.first[i] += a.gradient[i] * a.gradient[i];
    a.value[i] -= lr * a.gradient[i] / (std::sqrt(a.first[i]) + eps);
  }
}

void optimizer(benchmark::State& state, const std::string& name) {
  Arrays ours, theirs;
  const double one = 4.0 * static_cast<double>(length());  // an array, read or written once
  if (name == "sgd_momentum") {
    const SgdStep step{.lr = 1e-3, .momentum = 0.9};
    return beside(
        state, 5 * one, [&] { sgd_update(ours.value, ours.gradient, ours.first, step); },
        [&] { plain_sgd(theirs, 1e-3F, 0.9F); });
  }
  if (name == "adamw") {
    const AdamStep step{.weight_decay = 0.01, .decoupled = true, .step = 3};
    return beside(
        state, 7 * one, [&] { adam_update(ours.value, ours.gradient, ours.first, ours.second, step); },
        [&] { plain_adam(theirs, step); });
  }
  if (name == "adagrad") {
    const AdagradStep step;
    return beside(
        state, 5 * one, [&] { adagrad_update(ours.value, ours.gradient, ours.first, step); },
        [&] { plain_adagrad(theirs, 1e-2F, 1e-10F); });
  }
  // velocity: of momentum correction
  beside(
      state, 3 * one, [&] { accumulate_velocity(0.9F, ours.first, ours.gradient, ours.second); },
      [&] {
        for (std::size_t i = 0; i < theirs.second.size(); ++i)
          theirs.second[i] = 0.9F * theirs.first[i] + theirs.gradient[i];
      });
}

struct Factors {
  Floats m, p, q, y;
  explicit Factors(const MatrixShape& s)
      : m(waves(static_cast<std::size_t>(s.rows * s.columns), 1)),
        p(waves(static_cast<std::size_t>(s.rows * s.rank), 2)),
        q(waves(static_cast<std::size_t>(s.columns * s.rank), 3)),
        y(m.size()) {}
};

void low_rank(benchmark::State& state, const std::string& name, const MatrixShape& s) {
  Factors ours(s), theirs(s);
  const double matrix = 4.0 * static_cast<double>(s.rows * s.columns);
  if (name == "multiply") {
    return beside(
        state, matrix, [&] { multiply(s, ours.m, ours.q, ours.p); },
        [&] { scalar::multiply(s, theirs.m, theirs.q, theirs.p); });
  }
  if (name == "multiply_transposed") {
    return beside(
        state, matrix, [&] { multiply_transposed(s, ours.m, ours.p, ours.q); },
        [&] { scalar::multiply_transposed(s, theirs.m, theirs.p, theirs.q); });
  }
  beside(
      state, 3 * matrix, [&] { reconstruct(s, ours.p, ours.q, 4, ours.y, ours.m); },
      [&] { scalar::reconstruct(s, theirs.p, theirs.q, 4, theirs.y, theirs.m); });
}

template <class F>
void add(const std::string& name, F run) {
  benchmark::RegisterBenchmark(name.c_str(), run)
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond)
      ->Iterations(11);
}

void register_all() {
  for (const std::string name : {"sgd_momentum", "adamw", "adagrad", "velocity"})
    add("optimize/" + name, [name](benchmark::State& state) { optimizer(state, name); });
  for (const MatrixShape& s : {MatrixShape{24000, 384, 4}, MatrixShape{1536, 384, 4}}) {
    for (const std::string name : {"multiply", "multiply_transposed", "reconstruct"}) {
      const std::string shape = std::to_string(s.rows) + "x" + std::to_string(s.columns);
      add("low_rank/" + name + "/" + shape, [name, s](benchmark::State& state) { low_rank(state, name, s); });
    }
  }
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  weft::register_all();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
