#include "measure/interleave.h"

#include <exception>
#include <memory>
#include <thread>
#include <utility>

#include "base/mutex.h"

namespace weft {

namespace {

class Errors {
 public:
  void set(std::exception_ptr error) {
    const Lock lock(mutex_);
    if (!first_) first_ = std::move(error);
  }
  void rethrow() {
    const Lock lock(mutex_);
    if (first_) std::rethrow_exception(first_);
  }

 private:
  Mutex mutex_;
  std::exception_ptr first_ WEFT_GUARDED_BY(mutex_);
};

// One variant's world, on a thread of its own.
struct Runner {
  Runner(int ranks, const std::string& name, const RunVariant& work, Errors& errors)
      : lane(ranks), variant(name), thread([this, &work, &errors] {
          try {
            recorded = work(variant, lane);
          } catch (...) {
            errors.set(std::current_exception());
          }
          lane.close();
        }) {}
  ~Runner() {
    lane.close();
    if (thread.joinable()) thread.join();
  }
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;

  Lane lane;
  const std::string variant;
  Recorded recorded;
  std::thread thread;  // last: it uses the others
};

// One variant from beginning to end, alone; `runner` where it has opened already.
void run_alone(std::unique_ptr<Runner> runner, const Turns& turns, const Listener& listener, Errors& errors) {
  for (std::size_t r = 0; r < turns.ends.size(); ++r) {
    listener.turn({.number = r, .rounds = turns.ends.size(), .variant = runner->variant});
    runner->lane.run_until(turns.ends[r]);
  }
  runner->thread.join();
  errors.rethrow();
  listener.done(runner->variant, runner->recorded, false);
}

}  // namespace

void take_turns(const std::vector<std::string>& variants, int ranks, const Turns& turns,
                const RunVariant& work, const Listener& listener) {
  Errors errors;
  std::vector<std::unique_ptr<Runner>> runners;
  const auto open = [&](const std::string& variant) {
    auto runner = std::make_unique<Runner>(ranks, variant, work, errors);
    runner->lane.run_until(0);
    errors.rethrow();
    return runner;
  };
  bool side_by_side = true;
  for (const std::string& variant : variants) {  // one after another: making a model is work, too
    runners.push_back(open(variant));
    if (runners.size() == 1) side_by_side = listener.all_fit();
    if (!side_by_side) break;
  }
  if (!side_by_side) {
    run_alone(std::exchange(runners.front(), nullptr), turns, listener, errors);
    for (std::size_t i = 1; i < variants.size(); ++i) run_alone(open(variants[i]), turns, listener, errors);
    return;
  }
  for (std::size_t r = 0; r < turns.ends.size(); ++r) {
    for (std::size_t i = 0; i < runners.size(); ++i) {
      Runner& runner = *runners[(i + r) % runners.size()];
      listener.turn({.number = r, .rounds = turns.ends.size(), .variant = runner.variant});
      runner.lane.run_until(turns.ends[r]);
      const bool last = r + 1 == turns.ends.size();
      if (last) runner.thread.join();
      errors.rethrow();
      if (last) listener.done(runner.variant, runner.recorded, true);
    }
  }
}

}  // namespace weft
