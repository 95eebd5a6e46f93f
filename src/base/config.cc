#include "weft/config.h"

#include <cstdlib>
#include <cstring>

#include "base/units.h"
#include "weft/error.h"

extern char**
    environ;  // NOLINT(readability-redundant-declaration): POSIX leaves the declaration to the program

namespace weft {

namespace {

struct Knob {
  const char* variable;
  const char* unit;
  const char* meaning;
  std::function<void(Config&, std::string_view)> set;
  std::function<std::string(const Config&)> get;
};

Knob text(const char* variable, std::string Config::* field, const char* meaning) {
  return {variable, "text", meaning, [field](Config& c, std::string_view v) { c.*field = std::string(v); },
          [field](const Config& c) { return (c.*field).empty() ? "(none)" : c.*field; }};
}

Knob choice(const char* variable, std::string Config::* field, const std::vector<std::string>& choices,
            const char* meaning) {
  return {variable, "choice", meaning,
          [=](Config& c, std::string_view v) {
            std::string list;
            for (const std::string& allowed : choices) {
              if (v == allowed) {
                c.*field = allowed;
                return;
              }
              list += (list.empty() ? "" : ", ") + allowed;
            }
            throw UsageError("'" + std::string(v) + "' is none of: " + list);
          },
          [field](const Config& c) { return c.*field; }};
}

Knob bytes(const char* variable, std::size_t Config::* field, const char* meaning) {
  return {variable, "bytes", meaning, [field](Config& c, std::string_view v) { c.*field = parse_bytes(v); },
          [field](const Config& c) { return bytes_text(c.*field); }};
}

Knob duration(const char* variable, Time Config::* field, const char* meaning) {
  return {variable, "time", meaning,
          [field](Config& c, std::string_view v) {
            const Time t = parse_duration(v);
            if (t <= Time{0}) throw UsageError("'" + std::string(v) + "' must be longer than nothing");
            c.*field = t;
          },
          [field](const Config& c) { return duration_text(c.*field); }};
}

Knob number(const char* variable, int Config::* field, long long low, long long high, const char* meaning) {
  return {variable, "number", meaning,
          [=](Config& c, std::string_view v) { c.*field = static_cast<int>(parse_integer(v, low, high)); },
          [field](const Config& c) { return std::to_string(c.*field); }};
}

std::vector<Knob> knobs() {
  return {
      choice("WEFT_TRANSPORT", &Config::transport, {"auto", "threads", "tcp", "mpi"},
             "what carries the bytes; auto: mpi under mpirun, tcp where RANK is set, threads otherwise"),
      text("WEFT_ADDR", &Config::address, "address of rank 0; default MASTER_ADDR, else 127.0.0.1"),
      number("WEFT_PORT", &Config::port, 0, 65535, "port of the rendezvous; 0: MASTER_PORT + 1"),
      text("WEFT_BIND", &Config::bind,
           "tcp: address or interface of this host to listen at; default: where peers can reach it"),
      text("WEFT_JOB", &Config::job,
           "name of the job, the same on all ranks; default the launcher's (SLURM_JOB_ID ...)"),
      {"WEFT_TOKEN", "secret", "shared secret of the job's ranks; required off loopback",
       [](Config& c, std::string_view v) { c.token = Secret(std::string(v)); },
       [](const Config& c) { return std::string(c.token.set() ? "set" : "not set"); }},
      text("WEFT_FIGURES", &Config::figures,
           "figures of the link by which algorithms are chosen (bits follow from it), or a file that keeps "
           "them; rank 0's count; default: measured"),
      bytes("WEFT_EAGER_LIMIT", &Config::eager_limit,
            "threads: longer messages wait for their receive; 0: all do"),
      bytes("WEFT_TCP_EAGER_LIMIT", &Config::tcp_eager_limit, "tcp: longer messages wait for their receive"),
      bytes("WEFT_TCP_CREDIT", &Config::tcp_credit, "tcp: unexpected bytes that a peer may have under way"),
      bytes("WEFT_TCP_UNSENT", &Config::tcp_unsent, "tcp: bytes that the kernel may hold unsent"),
      bytes("WEFT_MICRO_OP_BYTES", &Config::micro_op_bytes,
            "longest piece of a gradient message; 0: by time"),
      duration("WEFT_MICRO_OP_TIME", &Config::micro_op_time,
               "length of a micro-op at the measured bandwidth"),
      bytes("WEFT_WINDOW_BYTES", &Config::window_bytes,
            "non-blocking bytes in the transport at a time; 0: 2 micro-ops, 16 where nothing is urgent"),
      duration("WEFT_HOLD_LIMIT", &Config::hold_limit,
               "gradient traffic is held back for blocking traffic at most so long, or four times as long as "
               "that is predicted to take"),
      duration("WEFT_STALL_LIMIT", &Config::stall_limit,
               "a message without a receiver gives its place back after this"),
      number("WEFT_WORKERS", &Config::workers, 0, 1024,
             "threads for long computations, per process; 0: one, but one per core where ranks are threads"),
      choice("WEFT_CHECKSUM", &Config::checksum, {"remote", "always"},
             "payload checksums: between processes, or always"),
      duration("WEFT_TIMEOUT", &Config::operation_timeout,
               "an operation that makes no progress on any rank fails after this"),
      duration("WEFT_TIME_LIMIT", &Config::time_limit,
               "an operation fails after this, whatever progress it makes"),
      duration("WEFT_CONNECT_TIMEOUT", &Config::connect_timeout, "deadline for all ranks to be there"),
      duration("WEFT_HEARTBEAT", &Config::heartbeat, "tcp: sign of life when idle"),
      duration("WEFT_DEAD_AFTER", &Config::dead_after, "tcp: a silent peer is lost after this"),
      choice("WEFT_LOG", &Config::log, {"debug", "info", "warning", "error", "off"}, "what is logged"),
  };
}

}  // namespace

Config Config::from_environment(const std::function<const char*(const char*)>& lookup,
                                const std::vector<std::string>& names) {
  // Set by tools around weft, not knobs: where `netlab` wants the byte counts, what tests are told.
  static const std::vector<std::string> others = {"WEFT_NETLAB_REPORT", "WEFT_NETLAB_RUN", "WEFT_TEST_GRID",
                                                  "WEFT_SOAK", "WEFT_SOAK_ROUND"};
  Config config;
  const std::vector<Knob> table = knobs();
  for (const Knob& knob : table) {
    const char* value = lookup(knob.variable);
    if (value == nullptr) continue;
    try {
      knob.set(config, value);
    } catch (const UsageError& e) {
      throw UsageError(std::string(knob.variable) + ": " + e.what());
    }
  }
  for (const std::string& name : names) {
    if (name.rfind("WEFT_", 0) != 0) continue;
    bool known = false;
    for (const Knob& knob : table) known |= name == knob.variable;
    for (const std::string& other : others) known |= name == other;
    if (!known) throw UsageError(name + " is no variable of weft; `weft info` lists them");
  }
  return config;
}

Config Config::from_environment() {
  std::vector<std::string> names;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const char* equals = std::strchr(*entry, '=');
    if (equals != nullptr) names.emplace_back(*entry, static_cast<std::size_t>(equals - *entry));
  }
  return from_environment([](const char* name) { return std::getenv(name); }, names);
}

std::vector<KnobRow> describe(const Config& config) {
  std::vector<KnobRow> rows;
  const Config fallback;
  for (const Knob& knob : knobs()) {
    rows.push_back({knob.variable, knob.get(config), knob.get(fallback), knob.unit, knob.meaning});
  }
  return rows;
}

}  // namespace weft
