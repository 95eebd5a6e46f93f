// tcp: ranks are processes, each with a connection to every other. Rendezvous at rank 0, mutual proof of a
// shared secret on every connection, heartbeats, credits for unexpected messages. docs/wire_format.md has the
// bytes.
//
// Nothing of asio is in this header. The transport has no thread of its own: poll() and wait() do everything.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "weft/clock.h"
#include "weft/transport.h"

namespace weft {

struct TcpOptions {
  // Affects results: must agree on all ranks, and a connection between two that disagree is refused.
  int rank = 0;
  int size = 1;
  std::string master_addr = "127.0.0.1";  // where rank 0 runs: a name or a number
  std::uint16_t port = 29501;             // rank 0 listens here until the job has formed
  std::string job = "weft";
  std::uint32_t epoch = 0;
  // Secret, at least 32 characters. Empty only on loopback: rank 0 then leaves a random one in a file that
  // its user alone can read, under token_dir, until the job has formed. Never printed.
  std::string token;
  std::size_t eager_limit = 64 << 10;      // longer messages wait for their receive
  std::size_t credit = 4 << 20;            // bytes of unexpected messages that one peer may have here
  std::uint64_t max_message = 1ull << 40;  // a longer frame is an error
  bool checksum = true;                    // of payloads; headers always have one
  Time heartbeat = 200ms;                  // something is sent to every peer at least this often
  Time dead_after = 10s;                   // a peer that is silent for so long is lost

  // Affects speed and place only.
  std::string token_dir;  // empty: /tmp/weft-<uid>
  std::string bind;       // address or interface to listen at. Empty: see tcp_addresses.h. Never a wildcard
  Time connect_timeout = 60s;
  int notsent_lowat = 128 << 10;       // bytes that the kernel may hold unsent: these cannot be overtaken
  std::size_t worker_bytes = 1 << 20;  // a consumer of more than that runs on the worker pool
};

// Blocks until every rank is connected to every other. Throws UsageError (options, port in use, no token off
// loopback), TransportError(refused: another token, job, epoch or options, or the rank is taken), or
// TimeoutError that names the ranks that did not come.
std::unique_ptr<Transport> connect_tcp(const TcpOptions& options);

}  // namespace weft
