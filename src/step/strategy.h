// A strategy: one way of exchanging some of a model's tensors in a training step. Data parallelism is one;
// embedding tables, experts and pipelines are others. Any number of them, on groups of their own, share a
// step (strategies.h).
//
// A strategy never waits and computes no model. It is told what happened and hands back tickets; what follows
// from a message alone is a chain on the engine. Calls that only one system knows (the dispatch of an expert
// layer, say) stand on its own class, not here.
//
// A step of a strategy:
//   1  events: step_begin, batch_known, gradient_ready, computed; and starts at their places in the table
//   2  step_end: backward is over, whatever gradient did not come is zero
//   3  tickets, each awaited where the table says
//   4  when all of them are done: verdict; stage, and one commit of the registry of state for all strategies,
//      or a roll-back, the same on all ranks of the world; close
//
// Thread: one at a time, that of the driver.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "step/move.h"
#include "step/plan.h"
#include "step/weaver.h"
#include "weft/comm.h"
#include "weft/engine.h"
#include "weft/error.h"

namespace weft {

// Of a batch, as soon as it is known: before the step that trains on it where data is prefetched.
struct BatchInfo {
  // Rows that are looked up in a table, of this rank, of all micro-batches one after the other.
  struct Lookup {
    std::string_view table;  // name of the parameter
    std::span<const std::int64_t> ids;
    bool reads = true;  // false, on all ranks: the rows were read in another way, only their gradients come
  };
  std::int64_t tokens = 0;  // that count in the loss, of this rank
  std::span<const Lookup> lookups = {};
};

enum class BadKind : std::uint8_t { infinity = 1, nan = 2 };

struct StepResult {
  using Kind = BadKind;
  struct Bad {
    int parameter = 0;  // of the strategy; of the model, where it comes from the list of strategies
    int rank = 0;       // in the world
    Kind kind = Kind::nan;
  };
  bool committed = false;
  std::int64_t step = 0;  // that was, or would have been, committed: from 0
  std::vector<Bad> bad;   // the same on all ranks of the group; empty also where only the sum overflows
  std::string text;       // empty, or one sentence that names parameters and ranks
};

// Gives the memory of a tensor to an exchange that starts at its place.
class TensorSource {
 public:
  virtual ~TensorSource() = default;
  virtual Dense tensor(const TensorName& name) {
    throw UsageError("there is no tensor '" + name.name + "' to exchange");
  }
};

class Strategy {
 public:
  Strategy() = default;
  virtual ~Strategy() = default;
  Strategy(const Strategy&) = delete;
  Strategy& operator=(const Strategy&) = delete;

  // ---- the plan; the same from step to step, unless said otherwise ----
  virtual std::string_view name() const = 0;
  virtual const Comm& group() const = 0;
  virtual std::uint32_t num_slots() const = 0;  // that it takes in its group, from the first one on
  virtual std::vector<PlanRow> rows() const = 0;
  virtual std::vector<Exchange> exchanges() const = 0;
  virtual void weave(Weaver& weaver) const = 0;
  // Parameters whose gradients it takes and whose results it has; their places here are its own numbers.
  virtual std::vector<std::string> gradients() const { return {}; }
  // Where the ranks of the group have rows and exchanges of their own (the ends of a pipe): a hash of what they
  // must agree on, which is compared in place of these.
  virtual std::optional<std::uint64_t> compared() const { return std::nullopt; }
  // Why no parameter may be updated before all exchanges of the step have ended; empty: they may.
  virtual std::string why_updates_wait() const { return {}; }
  // Each rank has results of its own (shards), so that its verdict and its squares are of them alone. Else
  // all ranks of the group have the same.
  virtual bool has_shards() const { return false; }

  // ---- events ----
  virtual void step_begin() {}
  virtual void batch_known(const BatchInfo& batch) { static_cast<void>(batch); }
  virtual void gradient_ready(int parameter, std::span<const float> gradient);
  virtual void gradient_ready(int parameter, std::span<const double> gradient);
  virtual void computed(const Piece& piece) { static_cast<void>(piece); }
  virtual void step_end() {}
  // Gradients are held back from here on, until it starts. Gives the seconds after which that, and it, are
  // expected to be over; 0: not known.
  virtual double announced(int exchange, const When& when) {
    static_cast<void>(exchange), static_cast<void>(when);
    return 0;
  }
  // At its place in the table.
  virtual void start(int exchange, const When& when, TensorSource& tensors);

  // Of that step and micro-batch; not valid where there is nothing to wait for.
  virtual Ticket ticket(int exchange, const When& when) const = 0;
  // Of work that is no exchange, or one of a micro-batch, and reads or writes somebody's memory: what is done
  // with it waits for these, too.
  virtual std::vector<Ticket> work() const { return {}; }

  // ---- results ----
  // REQUIRES: the exchanges that write the parameter's gradient are done.
  virtual void result_of(int parameter, std::span<float> out) const;
  virtual void result_of(int parameter, std::span<double> out) const;
  virtual bool used(int parameter) const {
    static_cast<void>(parameter);
    return true;
  }
  // What its group says of the step. REQUIRES: step_end() was called, every ticket is done. Rethrows the
  // first error of a ticket; nothing is committed then.
  virtual StepResult verdict() = 0;
  // The squared length of its results. REQUIRES: a verdict that lets the step be committed.
  virtual double squares() const { return 0; }
  // What a commit takes beside what operations have staged.
  virtual void stage() {}
  // The step is over: its state was committed, or rolled back. `scale`: of its gradients in updates.
  virtual void close(bool committed, double scale) = 0;
};

}  // namespace weft
