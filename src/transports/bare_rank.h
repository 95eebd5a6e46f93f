// One operation on one rank without an engine: what tests and the overhead benchmark compare the engine with.
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <thread>
#include <utility>

#include "transports/endpoint.h"
#include "transports/operation.h"
#include "weft/comm.h"
#include "weft/pollable.h"
#include "weft/task.h"

namespace weft {

class BareRank final : public Pollable {
 public:
  explicit BareRank(Transport& transport, WorkerPool* pool = nullptr)
      : transport_(transport), executor_(arena_, transport.clock()), endpoint_(transport, executor_, pool) {
    executor_.set_wake([&transport] { transport.wake(); });
  }

  Endpoint& endpoint() { return endpoint_; }
  Operation& operation() { return operation_; }
  Comm comm() { return Comm(endpoint_.world()).bound(operation_); }

  // `make` is called once and must give the task; both live until the task is done.
  void start(std::function<Task<void>(Comm)> make, std::uint32_t slot = 0, std::uint32_t step = 0) {
    make_ = std::move(make);
    operation_ = Operation{};
    operation_.executor = &executor_;
    operation_.pool = endpoint_.pool();
    operation_.slot = slot;
    operation_.step = step;
    operation_.started = executor_.now();
    task_ = make_(comm());
    task_.start(executor_);
  }
  bool done() const { return !task_.valid() || task_.done(); }
  void rethrow() { task_.result(); }

  bool poll() noexcept override {
    bool any = transport_.poll();
    if (transport_.failure() && !operation_.failure) operation_.fail(transport_.failure());
    while (executor_.run()) any = true;
    return any;
  }
  Time next_deadline() const override { return std::min(transport_.next_event(), executor_.next_timer()); }

  // Real transports only: drives the task on the calling thread until it is done.
  void run() {
    while (!done()) {
      if (!poll() && !done()) transport_.wait(next_deadline());
    }
    rethrow();
  }

 private:
  Transport& transport_;
  Arena arena_;
  Executor executor_;
  Endpoint endpoint_;
  Operation operation_;
  std::function<Task<void>(Comm)> make_;
  Task<void> task_;
};

}  // namespace weft
