// `mpi`: the ranks are processes that mpirun or srun started, and MPI moves the bytes. The way to RDMA.
//
// A message is a head: a 64-byte frame with its full identity, and the payload behind it if that is short.
// All heads have one tag; every rank listens for them with a few receives that take what comes from anybody,
// and matches them with the posted receives itself (transports/match_table.h). So neither groups nor slots
// nor steps need anything of MPI, and there may be any number of them. A long payload follows from the
// sender's memory to the receiver's under a tag that is its number among the long ones from that rank to this
// one: heads arrive in order, so both sides count alike. Numbers repeat after as many as MPI has tags (2^31
// in Open MPI, 32,767 at least): that many long messages from one rank to another must not be in flight at
// once.
//
//   Thread    All calls but wake() come from one thread at a time; the thread that opened the transport
//             destroys it (MPI_Finalize). A program that calls MPI itself does so beside that thread, so MPI
//             is asked for MPI_THREAD_MULTIPLE; one that has initialised MPI must have asked for it too.
//             Checksums and sinks of long payloads run on the worker pool.
//   Waiting   MPI cannot be slept on. wait() yields for 50 us after the last event, then sleeps 5, 10, .. 100
//             us between polls; after a long wait up to 1/64 of it, at most 2 ms; and 5 ms while nothing is
//             expected or under way. It sets the timer slack of its thread to 1 us.
//   Failures  MPI does not notice a peer that was killed: mpirun ends the job, and until then operations end
//             by their deadlines. A rank that closes with a reason tells its peers, and they stop with it.
//             MPI cannot take back a send: the memory of a cancelled one above `bounce_bytes` stays in its
//             hands until the process ends. (A receiver of memory that was changed too early sees a wrong
//             checksum.) Nor can it take back a receive whose payload is arriving: cancel() waits 2 s for the
//             rest. MPI would write what comes later into memory that its owner has back by then, so where
//             the rest does not come the job is ended (MPI_Abort), with a sentence that says so. After a
//             failure the destructor leaves out MPI_Finalize, which would wait for peers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "weft/transport.h"

namespace weft {

// Equal on all ranks; compared when the transport opens.
struct MpiOptions {
  std::uint64_t job = 0;  // 0: rank 0 draws one
  std::uint32_t epoch = 0;
  bool checksum = true;  // of payloads; frames are always checked
  std::size_t max_message = std::size_t{1} << 40;
  // The following affect speed only.
  // Payloads up to this are copied behind their frame; both fit an eager fragment.
  std::size_t bounce_bytes = 3968;
  std::size_t piece_limit = std::size_t{1} << 30;   // longest MPI message of a payload; at most 2^31 - 1
  std::size_t worker_bytes = std::size_t{1} << 20;  // payloads from here on are summed, checked and consumed
                                                    // on the worker pool (about 200 us)
};

// Called by all ranks of MPI_COMM_WORLD. Initialises MPI if nobody has, and then finalises it. Throws
// UsageError for options that differ between ranks or are out of range, where MPI does not grant
// MPI_THREAD_SERIALIZED, and where the program has initialised it with less than MPI_THREAD_MULTIPLE.
std::unique_ptr<Transport> open_mpi(const MpiOptions& options);

}  // namespace weft
