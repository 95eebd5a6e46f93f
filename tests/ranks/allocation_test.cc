// A running job asks the system for no memory per message. This binary counts every call of operator new.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <vector>

#include "weft/weft.h"

namespace {
std::atomic<std::uint64_t> allocations{0};
}

// NOLINTBEGIN(misc-new-delete-overloads): all forms that the library uses
void* operator new(std::size_t bytes) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* p = std::malloc(bytes)) return p;
  throw std::bad_alloc();
}
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  const auto a = static_cast<std::size_t>(alignment);
  if (void* p = std::aligned_alloc(a, (bytes + a - 1) / a * a)) return p;
  throw std::bad_alloc();
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }
// NOLINTEND(misc-new-delete-overloads)

namespace weft {
namespace {

struct Counted {
  std::uint64_t allocations = 0;
  std::uint64_t messages = 0;
};

// Many ring all-reduces of many micro-ops: the first half warms up, the second is counted.
Counted count(std::size_t eager_limit) {
  constexpr int kOperations = 60;
  RunOptions options;
  options.config.eager_limit = eager_limit;
  options.config.micro_op_bytes = 1024;
  Counted counted;
  run_ranks(3, options, [&](World& world) {
    std::vector<float> gradient(30'000);
    std::uint64_t before = 0;
    std::uint64_t sent = 0;
    for (int i = 0; i < 2 * kOperations; ++i) {
      if (i == kOperations) {
        sent = world.traffic().messages_sent;
        world.barrier();
        before = allocations.load();
      }
      world.all_reduce(std::span(gradient), {.algorithm = "ring"});
    }
    world.barrier();
    if (world.rank() == 0) {
      counted.allocations = allocations.load() - before;
      counted.messages = 3 * (world.traffic().messages_sent - sent);
    }
    world.barrier();
  });
  return counted;
}

TEST(Allocation, NothingPerMessageInSteadyState) {
  for (const std::size_t eager_limit : {std::size_t{0}, std::size_t{8192}}) {
    const Counted counted = count(eager_limit);
    EXPECT_GT(counted.messages, 20'000u);
    // A list that grows once more than it ever had to is no allocation per message.
    EXPECT_LT(counted.allocations, 200u) << counted.messages << " messages, eager limit " << eager_limit;
  }
}

TEST(Allocation, ControlTheCounterCounts) {
  const std::uint64_t before = allocations.load();
  std::vector<std::unique_ptr<int>> many;
  for (int i = 0; i < 1000; ++i) many.push_back(std::make_unique<int>(i));
  EXPECT_GE(allocations.load() - before, 1000u);
}

}  // namespace
}  // namespace weft
