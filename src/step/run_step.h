// The walker: goes through a rank's table, move by move. The only copy of a training step.
//
// A driver knows how to compute a piece and how to wait for a ticket. LibTorch's and the emulated one block
// their thread and never suspend; the simulated one awaits virtual time; one whose loop is the user's (hooks
// of Python) suspends at a piece and is resumed by whoever sees it end:
//
//   walker.walk(table);                                  // a driver that never suspends: to the end
//   walker.begin(table); ...; driver.piece_ended(); ...  // one that does: Walker::go_on() after each piece
//
// Every move leaves a span in the engine's trace: computing and waiting.
#pragma once

#include "base/executor.h"
#include "step/strategies.h"
#include "weft/task.h"

namespace weft {

class Driver : public TensorSource {
 public:
  // Gradients that become ready inside are told to Strategies::gradient_ready; after the last forward the
  // loss is told to loss_known.
  virtual Task<void> compute(Piece piece) = 0;
  virtual Task<void> wait(Ticket ticket) = 0;
  // A wait is over that began at `since`, for an exchange whose ticket this is: before what follows from it.
  virtual void waited(const Move& move, const Ticket& ticket, Time since) {
    static_cast<void>(move), static_cast<void>(ticket), static_cast<void>(since);
  }
};

// REQUIRES: all three live until the task is done.
Task<void> run_step(Driver* driver, Strategies* strategies, const Table* table);

// Runs steps on a thread of its own, apart from any engine's. Thread: one at a time.
class Walker {
 public:
  Walker(Driver& driver, Strategies& strategies);
  // To the table's end. Rethrows. REQUIRES: the driver does not suspend.
  void walk(const Table& table);

  // Up to the first piece at which the driver suspends (by awaiting gate()), or to the end.
  void begin(const Table& table);
  // From there to the next one, or to the end. Rethrows what ended the walk.
  void go_on();
  bool walking() const { return task_.valid(); }  // a table was begun and has not ended

  // Awaited by a driver inside of compute().
  class Gate {
   public:
    bool await_ready() const noexcept { return false; }
    void await_suspend(std::coroutine_handle<> waiter) noexcept { waiter_ = waiter; }
    void await_resume() const noexcept {}

   private:
    friend class Walker;
    std::coroutine_handle<> waiter_;
  };
  Gate& gate() { return gate_; }

 private:
  void check_end();

  Driver& driver_;
  Strategies& strategies_;
  Arena arena_;
  Executor executor_;
  Task<void> task_;
  Gate gate_;
};

// Ends everything in flight because of `cause`, here and on the peers, and returns when nothing uses the
// memory of the strategies' tensors any more. Blocks.
void abandon(Strategies& strategies, std::exception_ptr cause) noexcept;

}  // namespace weft
