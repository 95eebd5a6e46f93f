// Buckets that are sent whole are summed by the all-reduce that was asked for: "direct" adds in the order of
// the ranks, which values that round at every addition show.
#include <gtest/gtest.h>

#include <cmath>
#include <mutex>

#include "data_parallel/data_parallel.h"
#include "weft/random.h"
#include "weft/world.h"

namespace weft {
namespace {

constexpr int kRanks = 5;
constexpr std::int64_t kCount = 1003;

template <class T>
T value(int rank, std::size_t i) {
  Random random(3, static_cast<std::uint32_t>(rank), static_cast<std::uint32_t>(i));
  return static_cast<T>(std::exp(8 * random.uniform() - 4) - 1);
}

enum class Memory { own, given };

// How many elements of the average have other bits than additions in the order of the ranks give.
template <class T>
std::int64_t others(const std::string& algorithm, Memory memory) {
  std::mutex mutex;
  std::int64_t out = -1;
  run_ranks(kRanks, [&](World& world) {
    // A link without latency: left to itself it takes a ring.
    world.plan_by({.hop_seconds = 1e-15, .seconds_per_byte = 1e-9, .fold_seconds_per_byte = 0});
    DataParallelOptions o;
    o.scheme.name = "dense";
    o.scheme.all_reduce = algorithm;
    o.scheme.buckets.dense_below = 0;
    o.dtype = dtype_of<T>();
    o.divisor = 1;
    DataParallel parallel(world.engine(), world.comm(), {{"w", kCount, 0}}, o);
    std::vector<T> gradient(kCount), place(kCount), average(kCount);
    for (std::size_t i = 0; i < gradient.size(); ++i) gradient[i] = value<T>(world.rank(), i);
    if (memory == Memory::given) parallel.give_memory(0, std::span<T>(place));
    parallel.gradient_ready(0, std::span<const T>(gradient));
    parallel.step_end();
    for (const Ticket& ticket : parallel.tickets()) ticket.wait();
    ASSERT_TRUE(parallel.finish().committed);
    parallel.result_of(0, std::span<T>(average));
    std::int64_t different = 0;
    for (std::size_t i = 0; i < average.size(); ++i) {
      T sum = value<T>(0, i);
      for (int r = 1; r < kRanks; ++r) sum += value<T>(r, i);
      different += average[i] == sum ? 0 : 1;
    }
    const std::lock_guard lock(mutex);
    EXPECT_TRUE(out < 0 || out == different);
    out = different;
  });
  return out;
}

TEST(DenseOrder, IsThatOfTheAlgorithm) {
  for (const Memory memory : {Memory::own, Memory::given}) {
    EXPECT_EQ(others<float>("direct", memory), 0);
    EXPECT_EQ(others<double>("direct", memory), 0);
    EXPECT_GT(others<float>("auto", memory), 0);  // controls
    EXPECT_GT(others<double>("auto", memory), 0);
  }
}

}  // namespace
}  // namespace weft
