// `threads`: the ranks are threads of one process. The embedded default, and the transport that most tests
// use.
//
// A message up to the eager limit is copied and its send completes at once. A longer one lies where it is:
// the receiver reads the sender's span (one copy, or none when it folds) and only then does the send
// complete. With an eager limit of zero every send waits for its receive, which is how algorithms are shown
// to be free of hidden buffering.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "weft/arena.h"
#include "weft/transport.h"
#include "wire/frame.h"

namespace weft {

// Changes a message in flight, after its checksums were computed; false loses it. For tests of faults.
using Tamper = std::function<bool(int from, int to, wire::FrameBytes& frame, Buffer& payload)>;

struct ThreadsOptions {
  int ranks = 1;
  std::size_t eager_limit = 8192;  // bytes; a copy of this size costs less than a wake-up
  bool checksum_always = false;    // payloads too; inside a process only headers are checked otherwise
  std::uint64_t job = 1;
  std::size_t worker_bytes = std::size_t{1}
                             << 20;  // deliveries from here on run on the worker pool (about 200 us)
  Tamper tamper;                     // if set, every message is copied, whatever its size
};

class ThreadsWorld {
 public:
  explicit ThreadsWorld(ThreadsOptions options);
  ~ThreadsWorld();  // REQUIRES: nobody uses its transports any more
  ThreadsWorld(const ThreadsWorld&) = delete;
  ThreadsWorld& operator=(const ThreadsWorld&) = delete;

  Transport& transport(int rank);  // one thread at a time may use each

 private:
  struct Shared;
  std::unique_ptr<Shared> shared_;
};

}  // namespace weft
