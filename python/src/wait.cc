#include "wait.h"

#include <pybind11/pybind11.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <thread>
#include <utility>

#include "base/mutex.h"

namespace weft::python {

namespace py = pybind11;

namespace {

constexpr std::chrono::milliseconds kSlice{50};

// Set once, by any thread; waited for by one that holds the interpreter's lock.
class Signal {
 public:
  void set() {
    const Lock lock(mutex_);
    set_ = true;
    changed_.notify_all();
  }
  void wait() {
    while (!wait_slice()) {
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
  }

 private:
  bool wait_slice() {
    const py::gil_scoped_release released;
    const auto end = std::chrono::steady_clock::now() + kSlice;
    const Lock lock(mutex_);
    while (!set_ && lock.wait_until(changed_, end) == std::cv_status::no_timeout) continue;
    return set_;
  }

  Mutex mutex_;
  std::condition_variable changed_;
  bool set_ WEFT_GUARDED_BY(mutex_) = false;
};

// To await a ticket is to say that somebody waits for it, as Ticket::wait() does: held traffic starts.
Task<void> await_quietly(Comm, Ticket ticket) {
  try {
    co_await ticket;
  } catch (const std::exception&) {  // is the ticket's own
  }
}

}  // namespace

void wait(Engine& engine, const Ticket& ticket) {
  if (ticket.done()) return;
  const auto signal = std::make_shared<Signal>();
  ticket.then([signal] { signal->set(); });
  // Its end is the ticket's, which has a deadline.
  const SubmitOptions options{.name = "wait", .local = true, .timeout = kNever};
  engine.submit(engine.world(), options, [ticket](Comm comm) { return await_quietly(comm, ticket); });
  signal->wait();
}

void run_interruptibly(std::function<void()> work) {
  struct Shared {
    Signal done;
    std::exception_ptr error;
  };
  const auto shared = std::make_shared<Shared>();
  std::thread([shared, mine = std::move(work)]() mutable {
    try {
      mine();
    } catch (...) {
      shared->error = std::current_exception();
    }
    mine = nullptr;
    shared->done.set();
  }).detach();
  shared->done.wait();
  if (shared->error) std::rethrow_exception(shared->error);
}

}  // namespace weft::python
