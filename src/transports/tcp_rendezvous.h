// How a job forms:
//   Step 1  rank 0 listens at the rendezvous port; every other rank connects to it (as often as it takes, so
//           ranks start in any order), opens a listener of its own and says where
//   Step 2  when all are there, rank 0 sends everybody the table of places
//   Step 3  rank i connects to every rank between 0 and i, and is called by those above it
//   Step 4  each says "ready" to rank 0 when it has all its connections, and rank 0 says "go" to all:
//           nobody's heartbeat is missed while others still connect. Listeners and token file are gone from
//           here on
// A rank that leaves before step 2 may come back; later, or when the time is over, rank 0 tells all why the
// job cannot form.
#pragma once

#include <optional>
#include <vector>

#include "transports/tcp.h"
#include "transports/tcp_socket.h"

namespace weft::tcp {

struct Mesh {
  std::vector<std::optional<Socket>> sockets;  // by rank; none for the own
  HandshakeBytes bytes;
};

// Runs `io` until the job has formed. Throws as connect_tcp does, and leaves no handler behind in `io` either
// way.
Mesh form_mesh(asio::io_context& io, const TcpOptions& options);

}  // namespace weft::tcp
