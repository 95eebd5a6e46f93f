// `shaped`: slow links in wall time, around a transport whose ranks are threads of one process. The bytes
// still move through memory; when they may is decided by the link model that `sim` runs in virtual time
// (link_model.h), so ports, nodes and sharing are the same in both.
//
// A send enters the model when it is posted and is held here. When its last byte has arrived at the peer,
// the very same record goes to the inner transport, which moves it at once; receives go there straight away.
// Nothing is copied and no thread is added. The price: a send completes when it has arrived, one latency
// after its last byte has left the port.
//
// Sleeping     A rank wakes only for arrivals of its own sends, at predicted times. Traffic of others can
//              only delay them, so a prediction is never too late, and one that was too early costs one look
//              at the model.
// Late waking  A thread that sleeps until t goes on some 60 us later, and much later on a busy machine. The
//              links do not wait for it: the model's time goes on from ideal times, and a rank that woke up
//              late lives behind the clock by that much. What it sends in reaction is entered in its own
//              time, at most catch_up back. So a series of messages keeps the rate of the link, and wall
//              time is that of the model or what the machine needs, whichever is longer. The limit of this:
//              a time that starts when a rank hears of something and ends when it hears of something else
//              may read up to catch_up short.
//
// Giving way  What has not begun to leave its port waits there for urgent traffic of its rank (give_way).
//
// First in, first out per flow is kept (flow_order.h): sharing in quanta lets a short message arrive before
// a long one.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <queue>
#include <vector>

#include "base/mutex.h"
#include "transports/decorator.h"
#include "transports/flow_order.h"
#include "transports/link_model.h"
#include "transports/records.h"

namespace weft {

// What the ranks of one process share: the model of their links. Any thread.
class ShapedNetwork {
 public:
  // `catch_up` bounds how far back a rank that woke up late may enter a send.
  explicit ShapedNetwork(const LinkOptions& options,
                         Time catch_up = 500us);  // throws UsageError as LinkModel does
  ShapedNetwork(const ShapedNetwork&) = delete;
  ShapedNetwork& operator=(const ShapedNetwork&) = delete;

  const LinkOptions& options() const { return options_; }
  Time catch_up() const { return catch_up_; }

 private:
  friend class ShapedTransport;
  // A send that is on the model's wires.
  struct Held : FlowNode {
    SendRecord* record = nullptr;  // null: unused
    std::uint32_t transfer = 0;
    std::uint64_t number = 0;  // tells apart the uses of this object
    bool arrived = false;      // guarded by the network's mutex
    bool taken = false;        // by its rank, which knows now that it has arrived
    Time ideal{};              // when it arrived
  };
  struct Prediction {
    Time at;
    Held* held;
    std::uint64_t number;
    // The earliest is the largest.
    friend bool operator<(const Prediction& a, const Prediction& b) { return a.at > b.at; }
  };
  struct Rank {
    std::vector<Held*> arrived;                   // to be handed over by this rank
    std::priority_queue<Prediction> predictions;  // of what this rank has on the wires
    // Ideal time of the newest message that was handed over to this rank.
    std::atomic<std::int64_t> last_arrival{-1};
  };

  // All with times of the transports' clock.
  // Gives the earliest time at which it can arrive. It begins at `begins` or later.
  Time add(int from, Held& held, Time at, Time now, Time begins);
  // What has not begun of this rank's less urgent sends begins at `until`, or when somebody waits for it.
  // Gives the earliest time at which one that may begin now can arrive.
  Time give_way(int from, Time until, Time now);
  void cancel(int from, Held& held);
  // Appends what has arrived of this rank's sends. Gives the earliest time at which more of them can.
  Time take_arrived(int from, Time now, std::vector<Held*>& out);
  void advance(Time now) WEFT_REQUIRES(mutex_);
  Time model_time(Time t) const { return t == kNever ? kNever : std::max(t - epoch_, Time{0}); }
  Rank& rank_at(int rank) { return *ranks_[static_cast<std::size_t>(rank)]; }

  LinkOptions options_;
  Time catch_up_;
  Time epoch_;  // the model's clock starts at zero
  Mutex mutex_;
  LinkModel model_ WEFT_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<std::pair<int, Held*>> in_flight_ WEFT_GUARDED_BY(mutex_);  // by transfer; who holds it
};

class ShapedTransport final : public Decorator {
 public:
  // REQUIRES: both outlive it; `inner` runs on the machine's clock (weft/clock.h, SteadyClock).
  ShapedTransport(Transport& inner, ShapedNetwork& network);
  ~ShapedTransport() override;  // REQUIRES: no record is left

  std::string_view name() const override { return "shaped"; }
  using Decorator::post;  // receives go straight through
  void post(SendRecord& send) noexcept override;
  void cancel(TransferRecord& record) noexcept override;
  void give_way(Time until) noexcept override;
  bool poll() noexcept override;
  Time next_event() const override;
  void wait(Time until) noexcept override;
  void close(const std::string& reason) noexcept override;

 private:
  using Held = ShapedNetwork::Held;
  Time hand_over_arrived(Time now);
  Held* hand_over(Held& held);
  void release(Held& held);
  void keep_own_time(Time now, bool any, Time cause);

  ShapedNetwork& network_;
  std::deque<Held> pool_;
  std::vector<Held*> unused_;
  std::vector<Held*> ready_;  // to be handed over; null where it was cancelled
  FlowOrder order_;
  Time due_ = kNever;  // nothing that is held here arrives before
  Time gives_way_until_{0};
  bool closed_ = false;

  // This rank's own time is the clock less lag_; while it is idle, its own time stands still.
  Time lag_{0};
  bool idle_ = false;
  Time idle_since_{0};
  Time last_handed_over_{0};  // ideal time
};

}  // namespace weft
