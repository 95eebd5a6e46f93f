// What measure_kernels() gives: a figure for every kernel, in about the time that it promises.
#include "workload/measure_kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "base/thread_time.h"
#include "instrumented.h"
#include "weft/error.h"

namespace weft {
namespace {

// Those that are no cost: not a positive, finite number of seconds, or more than a microsecond a unit.
std::string wrong(const KernelCosts& costs) {
  std::string names;
  for_each_cost(costs, [&](const char* name, double seconds) {
    if (!(std::isfinite(seconds) && seconds > 0 && seconds < 1e-6)) names += std::string(" ") + name;
  });
  return names;
}

TEST(MeasureKernels, EveryFigureIsPositiveAndFinite) {
  const double before = thread_seconds();
  const KernelCosts costs = measure_kernels();
  const double taken = thread_seconds() - before;
  std::printf("measured in %.2f s of processor time; nanoseconds of one:\n", taken);
  for_each_cost(costs, [](const char* name, double s) { std::printf("  %-32s %7.3f\n", name, s * 1e9); });
  if (kInstrumented) GTEST_SKIP() << "times mean nothing here";
  EXPECT_EQ(wrong(costs), "");
  EXPECT_LT(taken, 1.0);  // 0.3 s where nobody else computes
  // Control: figures that nobody measured.
  EXPECT_NE(wrong(KernelCosts{}), "");
}

TEST(MeasureKernels, NoFigureIsForgotten) {
  KernelCosts costs;
  std::size_t figures = 0;
  for_each_cost(costs, [&](const char*, double& seconds) {
    seconds = 1;
    ++figures;
  });
  EXPECT_EQ(figures * sizeof(double), sizeof(KernelCosts));
  const KernelCosts twice = scaled(costs, 2);
  for_each_cost(twice, [](const char* name, double seconds) { EXPECT_EQ(seconds, 2) << name; });
}

TEST(MeasureKernels, RefusesWhatCannotBeMeasured) {
  EXPECT_THROW(measure_kernels({.elements = 100}), UsageError);
  EXPECT_THROW(measure_kernels({.density = 0}), UsageError);
  EXPECT_THROW(measure_kernels({.density = 2}), UsageError);
  EXPECT_THROW(measure_kernels({.repetitions = 0}), UsageError);
  EXPECT_NO_THROW(measure_kernels({.elements = 5000, .density = 1, .repetitions = 1}));
}

}  // namespace
}  // namespace weft
