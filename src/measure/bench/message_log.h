// The messages of one operation as one rank posted them, to be sent again without anything that was computed
// between them: how long the wire alone takes.
//
//   MessageLog log;
//   engine.submit(..., [&](Comm comm) { return log.record(comm, [&](Comm c) { return all_reduce(c, data); });
//   }); engine.submit(..., [&](Comm comm) { return replay(comm, log); });   // the same on all ranks
//
// A message goes out (a receive is posted) again when every receive that was done before it in the recording
// is done again. So messages that a program had under way at once are under way at once, and what had to wait
// for something waits for it. (A receive that was done by chance, because a peer was early, is waited for
// too.)
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "transports/operation.h"
#include "weft/comm.h"
#include "weft/task.h"

namespace weft {

class MessageLog {
 public:
  struct Posted {
    bool send = false;
    int peer = 0;
    std::uint32_t hop = 0;
    std::size_t bytes = 0;             // of a receive: no more than these
    std::vector<std::uint32_t> after;  // receives, by their number, that were done since the last one
  };

  // Runs what `make` returns and notes what it posts. It uses the world's group only.
  Task<void> record(Comm comm, std::function<Task<void>(Comm)> make);

  const std::vector<Posted>& posted() const { return posted_; }
  std::uint32_t receives() const { return receives_; }
  std::size_t longest() const;  // payload that was sent

 private:
  class Listener;
  void note(const TransferRecord& record, bool send, std::size_t bytes);

  std::vector<Posted> posted_;
  // Receives that were not done when last looked at.
  std::vector<std::pair<const Wait*, std::uint32_t>> open_;
  std::uint32_t receives_ = 0;
};

// REQUIRES: `payload` has log.longest() bytes and lives, as the log does, until it is done.
Task<void> replay(Comm comm, const MessageLog& log, std::span<const std::byte> payload);

}  // namespace weft
