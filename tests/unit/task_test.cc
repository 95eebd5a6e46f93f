// Task, when_all, Executor, timers: on one thread, without a transport.
#include "weft/task.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/executor.h"

namespace weft {
namespace {

// A point at which coroutines stop until somebody opens it.
class Gate {
 public:
  explicit Gate(Executor& executor) : executor_(executor) {}
  bool await_ready() const noexcept { return open_; }
  void await_suspend(std::coroutine_handle<> h) { waiting_.push_back(h); }
  void await_resume() const noexcept {}
  void open() {
    open_ = true;
    for (const std::coroutine_handle<> h : waiting_) executor_.ready(h);
    waiting_.clear();
  }

 private:
  Executor& executor_;
  bool open_ = false;
  std::vector<std::coroutine_handle<>> waiting_;
};

struct Rig {
  Arena arena;
  SteadyClock clock;
  Executor executor{arena, clock};
  template <class T>
  void run(Task<T>& task) {
    task.start(executor);
    while (executor.run()) continue;
  }
};

Task<int> immediate(int value) { co_return value; }

Task<std::int64_t> many_awaits(int times) {
  std::int64_t sum = 0;
  for (int i = 0; i < times; ++i) sum += co_await immediate(1);
  co_return sum;
}

TEST(Task, AMillionImmediateAwaitsDoNotGrowTheStack) {
  Rig rig;
  Task<std::int64_t> task = many_awaits(1'000'000);
  rig.run(task);
  ASSERT_TRUE(task.done());
  EXPECT_EQ(task.result(), 1'000'000);
}

Task<void> through(Gate& gate) { co_await gate; }
Task<int> many_suspensions(std::vector<std::unique_ptr<Gate>>& gates) {
  int passed = 0;
  for (auto& gate : gates) {
    co_await through(*gate);
    ++passed;
  }
  co_return passed;
}

TEST(Task, CompletionsThatComeLaterDoNotGrowTheStack) {
  Rig rig;
  std::vector<std::unique_ptr<Gate>> gates;
  for (int i = 0; i < 100'000; ++i) gates.push_back(std::make_unique<Gate>(rig.executor));
  Task<int> task = many_suspensions(gates);
  rig.run(task);
  EXPECT_FALSE(task.done());
  // All open before anything runs: each completion is ready at once when the next await begins.
  for (auto& gate : gates) gate->open();
  while (rig.executor.run()) continue;
  ASSERT_TRUE(task.done());
  EXPECT_EQ(task.result(), 100'000);
}

Task<int> fails() {
  throw std::runtime_error("inner");
  co_return 0;
}
Task<int> catches() {
  try {
    co_return co_await fails();
  } catch (const std::runtime_error& e) {
    if (std::string(e.what()) != "inner") throw;
  }
  co_return 7;
}

TEST(Task, ExceptionsReachTheAwaiter) {
  Rig rig;
  Task<int> caught = catches();
  rig.run(caught);
  EXPECT_EQ(caught.result(), 7);
  Task<int> thrown = fails();
  rig.run(thrown);
  EXPECT_THROW(thrown.result(), std::runtime_error);
}

Task<void> note_then_throw(Gate& gate, std::vector<std::string>& notes, std::string name, bool bad) {
  co_await gate;
  notes.push_back(name);
  if (bad) throw std::runtime_error(name);
}
Task<void> all_of(std::vector<Task<void>>& tasks) { co_await when_all(tasks); }

TEST(WhenAll, WaitsForAllChildrenAndRethrowsTheFirstInOrder) {
  Rig rig;
  Gate early(rig.executor);
  Gate late(rig.executor);
  std::vector<std::string> notes;
  std::vector<Task<void>> tasks;
  tasks.push_back(note_then_throw(late, notes, "first", true));
  tasks.push_back(note_then_throw(early, notes, "second", true));
  tasks.push_back(note_then_throw(late, notes, "third", false));
  Task<void> all = all_of(tasks);
  rig.run(all);
  early.open();
  while (rig.executor.run()) continue;
  EXPECT_FALSE(all.done()) << "must not end before its slowest child";
  late.open();
  while (rig.executor.run()) continue;
  ASSERT_TRUE(all.done());
  EXPECT_EQ(notes, (std::vector<std::string>{"second", "first", "third"}));
  try {
    all.result();
    FAIL() << "must rethrow";
  } catch (const std::runtime_error& e) {
    EXPECT_STREQ(e.what(), "first");
  }
}

TEST(WhenAll, OfNothingAndOfFinishedTasks) {
  Rig rig;
  std::vector<Task<void>> none;
  Task<void> empty = all_of(none);
  rig.run(empty);
  EXPECT_TRUE(empty.done());
  Gate open(rig.executor);
  open.open();
  std::vector<std::string> notes;
  std::vector<Task<void>> tasks;
  tasks.push_back(note_then_throw(open, notes, "a", false));
  Task<void> one = all_of(tasks);
  rig.run(one);
  EXPECT_TRUE(one.done());
}

struct WithArena {
  Arena* memory;
  Arena& arena() const { return *memory; }
};
// noinline: a compiler that sees a coroutine and its whole life may need no frame for it (clang does so).
[[gnu::noinline]] Task<int> framed(WithArena, int value) { co_return value; }
Task<int> unframed(int value) { co_return value; }

TEST(Task, FramesComeFromTheArenaAndGoBack) {
  Rig rig;
  const WithArena where{&rig.arena};
  for (int i = 0; i < 3; ++i) {
    Task<int> task = framed(where, i);
    EXPECT_GT(rig.arena.in_use(), 0u);
    rig.run(task);
    EXPECT_EQ(task.result(), i);
  }
  EXPECT_EQ(rig.arena.in_use(), 0u);
  EXPECT_EQ(rig.arena.fresh(), 1u) << "the second frame reuses the first one's memory";
  Task<int> task = unframed(1);  // control: nothing with an arena among the parameters
  EXPECT_EQ(rig.arena.in_use(), 0u);
  rig.run(task);
}

// The compiler canary. What g++ 12 gets wrong is forbidden (CONTRIBUTING.md); what is allowed must work in
// every preset: named aggregates, classes with constructors, one await a statement.
struct Named {
  std::string text;
  std::shared_ptr<int> counted;
};
Task<std::size_t> takes(Named options) {
  co_return options.text.size() + static_cast<std::size_t>(*options.counted);
}
Task<std::size_t> passes_named(std::shared_ptr<int> counted) {
  const Named options{.text = std::string(100, 'x'), .counted = counted};
  const std::size_t first = co_await takes(options);
  const std::size_t second = co_await takes(options);
  co_return first + second;
}

TEST(Canary, NamedAggregatesAreDestroyedOnce) {
  Rig rig;
  const auto counted = std::make_shared<int>(5);
  {
    Task<std::size_t> task = passes_named(counted);
    rig.run(task);
    EXPECT_EQ(task.result(), 210u);
  }
  EXPECT_EQ(counted.use_count(), 1);
}

struct Ring : Timer {
  explicit Ring(std::vector<int>& o, int n)
      : Timer([](Timer& t) {
          auto& self = static_cast<Ring&>(t);
          self.order.push_back(self.name);
        }),
        order(o),
        name(n) {}
  std::vector<int>& order;
  int name;
};

class StillClock final : public Clock {
 public:
  Time now() const override { return time; }
  Time time{0};
};

TEST(Executor, TimersFireInOrderAndCanBeRemoved) {
  Arena arena;
  StillClock clock;
  Executor executor(arena, clock);
  std::vector<int> order;
  std::array<std::unique_ptr<Ring>, 6> rings;
  for (int i = 0; i < 6; ++i) rings[static_cast<std::size_t>(i)] = std::make_unique<Ring>(order, i);
  executor.arm(*rings[0], 30ns);
  executor.arm(*rings[1], 10ns);
  executor.arm(*rings[2], 20ns);
  executor.arm(*rings[3], 10ns);
  executor.arm(*rings[4], 5ns);
  executor.arm(*rings[5], 40ns);
  executor.disarm(*rings[2]);
  rings[4].reset();  // destruction removes
  EXPECT_EQ(executor.next_timer(), 10ns);
  EXPECT_FALSE(executor.run());
  clock.time = 35ns;
  EXPECT_TRUE(executor.run());
  EXPECT_EQ(order, (std::vector<int>{1, 3, 0}));
  EXPECT_EQ(executor.next_timer(), 40ns);
}

// Told when it goes.
struct Canary {
  explicit Canary(std::atomic<bool>& flag) : gone(&flag) {}
  Canary(const Canary&) = default;
  ~Canary() { *gone = true; }
  std::atomic<bool>* gone;
};

TEST(Executor, OutlivesWhoeverIsStillInsidePost) {
  Arena arena;
  const SteadyClock clock;
  auto executor = std::make_unique<Executor>(arena, clock);
  std::atomic<bool> gone{false}, went_too_early{false};
  auto canary = std::make_shared<Canary>(gone);
  executor->set_wake([canary, &gone, &went_too_early] {
    std::this_thread::sleep_for(50ms);  // the work has run by now, and its owner has gone on
    went_too_early = gone.load();
  });
  canary.reset();
  Remote work;
  work.run = [](Remote&) {};
  std::thread poster([&, posts_to = executor.get()] { posts_to->post(work); });
  while (!executor->run()) std::this_thread::yield();
  executor.reset();
  EXPECT_TRUE(gone);  // control: the wake is gone with its executor
  poster.join();
  EXPECT_FALSE(went_too_early);
}

TEST(Buffer, MayOutliveItsArena) {
  auto arena = std::make_unique<Arena>();
  Buffer kept(*arena, 1000), moved;
  {
    const Buffer given_back(*arena, 5000);
    EXPECT_EQ(arena->in_use(), 6000u);
  }
  EXPECT_EQ(arena->in_use(), 1000u);
  std::fill_n(kept.data(), kept.size(), std::byte{7});
  arena.reset();
  moved = std::move(kept);
  EXPECT_EQ(moved.size(), 1000u);
  for (const std::byte b : moved.span()) ASSERT_EQ(b, std::byte{7});
}  // ASan sees an arena that went with its owner, and one that never goes

TEST(Arena, SizeClassesHoldWhatTheyPromise) {
  Arena arena;
  std::vector<std::pair<void*, std::size_t>> pieces;
  for (std::size_t bytes : {1ul, 63ul, 64ul, 65ul, 80ul, 81ul, 127ul, 128ul, 129ul, 1000ul, 4096ul, 5000ul,
                            1ul << 20, (1ul << 20) + 1}) {
    void* piece = arena.allocate(bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(piece) % 64, 0u);
    std::fill_n(static_cast<char*>(piece), bytes, 'x');  // ASan sees a class that is too small
    pieces.emplace_back(piece, bytes);
  }
  for (auto [piece, bytes] : pieces) arena.deallocate(piece, bytes);
  EXPECT_EQ(arena.in_use(), 0u);
  const std::uint64_t before = arena.fresh();
  for (auto& [piece, bytes] : pieces) piece = arena.allocate(bytes);
  EXPECT_EQ(arena.fresh(), before) << "everything is reused";
  for (auto [piece, bytes] : pieces) arena.deallocate(piece, bytes);
}

}  // namespace
}  // namespace weft
