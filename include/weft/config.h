// Every knob of weft, in one place. A knob has a field here, a WEFT_* variable, a default and a unit; `weft
// info` prints the table. A program may fill a Config by hand, or take from_environment() and change fields.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "weft/clock.h"

namespace weft {

// A secret that no stream, log or saved configuration can print by accident.
class Secret {
 public:
  Secret() = default;
  explicit Secret(std::string value) : value_(std::move(value)) {}
  bool set() const { return !value_.empty(); }
  const std::string& reveal() const { return value_; }

 private:
  std::string value_;
};

struct Config {
  // Where this process is
  std::string transport = "auto";  // WEFT_TRANSPORT: auto, threads, tcp, mpi
  std::string address;             // WEFT_ADDR: rank 0's address; empty: MASTER_ADDR, else 127.0.0.1
  int port = 0;                    // WEFT_PORT: of the rendezvous; 0: MASTER_PORT + 1
  std::string bind;                // WEFT_BIND: address or interface to listen at; empty: by MASTER_ADDR
  std::string job;                 // WEFT_JOB: the same on all ranks; empty: the launcher's id of the job
  Secret token;                    // WEFT_TOKEN: shared secret; needed off loopback

  // Affects results
  // WEFT_FIGURES: what algorithms are chosen by, and the order of additions with them, as text_of() of
  // weft/world.h writes it; or a file with it, which rank 0 writes where it is missing. Empty: measured.
  std::string figures;

  // Affects speed only
  std::size_t eager_limit = 8192;       // WEFT_EAGER_LIMIT (threads) and
  std::size_t tcp_eager_limit = 65536;  // WEFT_TCP_EAGER_LIMIT: longer messages wait for their receive
  std::size_t tcp_credit = 4u << 20;    // WEFT_TCP_CREDIT: unexpected bytes that a peer may have under way
  // WEFT_TCP_UNSENT: bytes that the kernel may hold unsent (TCP_NOTSENT_LOWAT).
  std::size_t tcp_unsent = 128u << 10;
  std::size_t micro_op_bytes = 0;  // WEFT_MICRO_OP_BYTES; 0: from the measured link
  Time micro_op_time = 2ms;        // WEFT_MICRO_OP_TIME: length of a micro-op at the measured bandwidth
  std::size_t window_bytes = 0;    // WEFT_WINDOW_BYTES; 0: by micro-ops, see weft/engine.h
  Time hold_limit = 50ms;          // WEFT_HOLD_LIMIT
  Time stall_limit = 10ms;         // WEFT_STALL_LIMIT
  int workers = 0;  // WEFT_WORKERS: threads for long computations, per process; 0: one, but a core each for
                    // ranks as threads
  std::string checksum = "remote";  // WEFT_CHECKSUM: remote, always

  // Failures
  Time operation_timeout = 60s;  // WEFT_TIMEOUT: without progress
  Time time_limit = kNever;      // WEFT_TIME_LIMIT: of an operation, whatever progress it makes
  Time connect_timeout = 30s;    // WEFT_CONNECT_TIMEOUT
  Time heartbeat = 200ms;        // WEFT_HEARTBEAT
  Time dead_after = 10s;         // WEFT_DEAD_AFTER: a silent peer is lost

  std::string log = "warning";  // WEFT_LOG: debug, info, warning, error, off

  // `lookup` gives the value of a variable or null; std::getenv in programs. Throws UsageError naming the
  // variable, also for a WEFT_* variable that does not exist (`names`, all set variables, is searched for
  // such).
  static Config from_environment(const std::function<const char*(const char*)>& lookup,
                                 const std::vector<std::string>& names = {});
  static Config from_environment();
};

struct KnobRow {
  std::string variable;
  std::string value;  // of this config; a secret is "set" or "not set"
  std::string fallback;
  std::string unit;
  std::string meaning;
};
std::vector<KnobRow> describe(const Config& config);

}  // namespace weft
