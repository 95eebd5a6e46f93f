// weft doctor: what works on this machine, how fast, and what to do about the rest. Bounded to about ten
// seconds.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <array>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "base/statistics.h"
#include "launcher.h"
#include "measure/text.h"
#include "process.h"
#include "verbs.h"
#include "weft/error.h"
#include "weft/world.h"
#include "wire/crc32c.h"

namespace weft::cli {

namespace {

using Json = nlohmann::ordered_json;

struct Row {
  std::string what;
  std::string value;
  bool ok = true;
  std::string advice;  // where it is not ok, or could be better
  double number = 0;   // the figure behind `value`, if there is one
  std::string unit;    // seconds, bytes_per_second; empty: none
};

double best_seconds(int rounds, const std::function<void()>& work) {
  const SteadyClock clock;
  double best = 1e9;
  for (int i = 0; i < rounds; ++i) {
    const Time start = clock.now();
    work();
    best = std::min(best, seconds(clock.now() - start));
  }
  return best;
}

Row rate_row(const std::string& what, double bytes_per_second, double enough, const std::string& advice) {
  const bool ok = bytes_per_second >= enough;
  return {what, rate_text(bytes_per_second), ok, ok ? "" : advice, bytes_per_second, "bytes_per_second"};
}

Row latency_row(const std::string& what, double one_way, double enough, const std::string& advice) {
  const bool ok = one_way <= enough;
  return {what, seconds_text(one_way) + " one way", ok, ok ? "" : advice, one_way, "seconds"};
}

Row cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(0, sizeof(set), &set);
  const int usable = CPU_COUNT(&set);
  const auto all = static_cast<int>(std::thread::hardware_concurrency());
  Row row{"cores",
          std::to_string(usable) + " of " + std::to_string(all) + " usable",
          usable >= 2,
          "",
          static_cast<double>(usable),
          ""};
  if (usable < 2)
    row.advice =
        "ranks that compute will wait for each other: give this process more cores (taskset, container "
        "limits)";
  else if (usable < 8)
    row.advice = "more than " + std::to_string(usable) +
                 " ranks take turns here: times of computation are oversubscribed";
  return row;
}

Row memory_copy() {
  constexpr std::size_t kBytes = std::size_t{64} << 20;
  std::vector<char> from(kBytes, 1), to(kBytes, 2);
  const double took = best_seconds(5, [&] { std::memcpy(to.data(), from.data(), kBytes); });
  return rate_row("memory copy", kBytes / took, 1e9,
                  "another program uses the memory, or this machine is slow: expect slow reductions");
}

Row checksum() {
  std::vector<std::byte> data(std::size_t{16} << 20, std::byte{7});
  volatile std::uint32_t sink = 0;
  const double took = best_seconds(5, [&] { sink = wire::crc32c(data); });
  const std::string how = wire::crc32c_is_hardware() ? " (by instruction)" : " (by table)";
  Row row = rate_row("CRC32C", static_cast<double>(data.size()) / took, 1e9,
                     "this processor has no CRC instruction: tcp and mpi are slower for it");
  row.value += how;
  return row;
}

// A listening socket of this process on loopback, and one connected to it.
struct SocketPair {
  int sender = -1, receiver = -1;
  SocketPair() {
    const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    auto* any = reinterpret_cast<sockaddr*>(&address);
    if (bind(listener, any, length) != 0 || listen(listener, 1) != 0 ||
        getsockname(listener, any, &length) != 0) {
      close(listener);
      throw Error("no socket could listen on 127.0.0.1");
    }
    sender = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const bool connected = connect(sender, any, length) == 0;
    if (connected) receiver = accept(listener, nullptr, nullptr);
    close(listener);
    if (!connected || receiver < 0) throw Error("127.0.0.1 cannot be connected to");
  }
  ~SocketPair() {
    close(sender);
    close(receiver);
  }
  SocketPair(const SocketPair&) = delete;
  SocketPair& operator=(const SocketPair&) = delete;
};

Row loopback() {
  constexpr double kSeconds = 0.5;
  try {
    const SocketPair sockets;
    std::thread sender([&] {
      const std::vector<char> block(256 << 10, 1);
      while (::send(sockets.sender, block.data(), block.size(), MSG_NOSIGNAL) > 0) continue;
    });
    std::vector<char> block(256 << 10);
    const SteadyClock clock;
    const Time start = clock.now();
    double bytes = 0;
    while (seconds(clock.now() - start) < kSeconds) {
      const ssize_t got = ::recv(sockets.receiver, block.data(), block.size(), 0);
      if (got <= 0) break;
      bytes += static_cast<double>(got);
    }
    const double took = seconds(clock.now() - start);
    shutdown(sockets.receiver, SHUT_RDWR);
    shutdown(sockets.sender, SHUT_RDWR);
    sender.join();
    return rate_row("loopback tcp", bytes / took, 2e8,
                    "loopback is slow here: ranks as threads (weft bench without --transport) avoid it");
  } catch (const Error& e) {
    return {"loopback tcp", "does not work", false,
            std::string(e.what()) + "; is the interface lo up? (ip link set lo up)"};
  }
}

// Median seconds of one direction of a 4-byte message between ranks 0 and 1.
Task<void> ping_pong(Comm comm, int rounds, double& one_way) {
  std::array<std::byte, 4> message{};
  const int peer = 1 - comm.rank();
  std::vector<double> times;
  for (int round = 0; round < rounds; ++round) {
    const auto hop = static_cast<std::uint32_t>(2 * round);
    const Time start = comm.now();
    if (comm.rank() == 0) {
      Transfer pong = comm.recv(peer, hop + 1, message);
      Transfer ping = comm.send(peer, hop, std::span<std::byte>(message));
      co_await ping;
      co_await pong;
    } else {
      Transfer ping = comm.recv(peer, hop, message);
      co_await ping;
      Transfer pong = comm.send(peer, hop + 1, std::span<std::byte>(message));
      co_await pong;
    }
    times.push_back(seconds(comm.now() - start) / 2);
  }
  one_way = median(times);
}

double ping_pong(World& world) {
  double one_way = 0;
  SubmitOptions options;
  options.name = "ping-pong";
  options.traffic = TrafficClass::blocking;
  options.timeout = 5s;
  world.run(options, [&one_way](Comm comm) { return ping_pong(comm, 500, one_way); });
  return one_way;
}

Row threads_ping_pong() {
  double one_way = 0;
  run_ranks(2, [&one_way](World& world) {
    const double mine = ping_pong(world);
    if (world.rank() == 0) one_way = mine;
  });
  return latency_row("ping-pong, threads", one_way, 200e-6,
                     "the machine is busy, or its cores are asleep: measure again when it is idle");
}

// `weft doctor --ping-pong`, which prints the seconds, as two ranks of a launcher.
Row launched_ping_pong(const std::string& what, std::vector<std::string> launcher, const std::string& program,
                       const std::string& advice) {
  launcher.insert(launcher.end(), {program, "doctor", "--ping-pong"});
  const Finished run = run_program(launcher, 6s);
  double one_way = 0;
  if (run.status != 0 || std::sscanf(run.output.c_str(), "%lf", &one_way) != 1) {
    std::string first = run.errors.substr(0, run.errors.find('\n'));
    if (run.timed_out) first = "it did not end within 6 s";
    return {what, "does not work", false, advice + " (" + first + ")"};
  }
  return latency_row(what, one_way, 500e-6, "the machine is busy: measure again when it is idle");
}

Row tcp_ping_pong(const std::string& program) {
  if (WEFT_HAVE_TCP == 0) {
    return {"tcp", "not built", true,
            "ranks as processes need it: apt-get install libasio-dev libssl-dev, build again"};
  }
  // This binary's own launcher prefixes lines; the benchmark form of it leaves rank 0 alone.
  return launched_ping_pong("ping-pong, tcp", {program, "launch", "--rank0", "-n", "2", "--"}, program,
                            "two processes could not meet on 127.0.0.1");
}

std::vector<Row> mpi_rows(const std::string& program) {
  const std::string path = find_program("mpirun");
  if (path.empty()) {
    return {{"mpirun", "not installed", WEFT_HAVE_MPI == 0,
             "only the mpi transport needs it: apt-get install openmpi-bin libopenmpi-dev"}};
  }
  std::vector<Row> rows{{"mpirun", path}};
  if (WEFT_HAVE_MPI == 0)
    rows.push_back(
        {"mpi", "not built", true, "apt-get install libopenmpi-dev, and build again, if you want it"});
  else
    rows.push_back(launched_ping_pong("ping-pong, mpi", mpirun(2), program, "two ranks under mpirun failed"));
  return rows;
}

Row netlab() {
  if (geteuid() != 0)
    return {"netlab", "needs root", true, "slow networks as namespaces: run tools/netlab with sudo"};
  const pid_t child = fork();
  if (child == 0) _exit(unshare(CLONE_NEWNET) == 0 ? 0 : 1);
  int status = 1;
  waitpid(child, &status, 0);
  if (status != 0)
    return {"netlab", "no namespaces", true,
            "this container may not make network namespaces (it lacks CAP_SYS_ADMIN)"};
  for (const char* tool : {"ip", "tc"}) {
    if (find_program(tool).empty())
      return {"netlab", std::string(tool) + " is missing", true, "apt-get install iproute2"};
  }
  return {"netlab", "possible"};
}

Row files() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  const bool ok = limit.rlim_cur >= 1024;
  return {"open files", std::to_string(limit.rlim_cur), ok,
          ok ? "" : "large jobs over tcp need a descriptor per peer: ulimit -n 4096"};
}

int print(const std::vector<Row>& rows, bool json) {
  bool all = true;
  for (const Row& row : rows) {
    all = all && row.ok;
    if (json) {
      Json object = {{"what", row.what}, {"value", row.value}, {"ok", row.ok}, {"advice", row.advice}};
      if (!row.unit.empty()) object[row.unit] = row.number;
      std::puts(object.dump().c_str());
      continue;
    }
    std::string line = padded(row.what, -22) + padded(row.value, -30) + (row.ok ? "ok" : "PROBLEM");
    if (!row.advice.empty()) line += "  " + row.advice;
    std::puts(line.c_str());
  }
  if (!json)
    std::puts(all ? "\nEverything that this weft was built for works here."
                  : "\nSomething needs care: see PROBLEM above.");
  return all ? kOk : kFailed;
}

int doctor(bool json, bool ping_pong_only, const Invocation& call) {
  if (ping_pong_only) {
    const std::unique_ptr<World> world = join_world();
    if (world->size() != 2) throw UsageError("doctor --ping-pong is a part of doctor, for two ranks");
    const double one_way = ping_pong(*world);
    if (world->rank() == 0) std::printf("%.9f\n", one_way);
    world->barrier();
    return kOk;
  }
  Progress progress(!json);
  progress.show("measuring ...");
  std::vector<Row> rows{
      cores(), memory_copy(), checksum(), threads_ping_pong(), loopback(), tcp_ping_pong(call.program)};
  for (const Row& row : mpi_rows(call.program)) rows.push_back(row);
  rows.push_back(netlab());
  rows.push_back(files());
  progress.clear();
  return print(rows, json);
}

}  // namespace

Run add_doctor(CLI::App& app) {
  CLI::App* verb =
      app.add_subcommand("doctor", "what works on this machine and how fast; what to do about the rest");
  struct Flags {
    bool json = false, ping_pong = false;
  };
  const auto flags = std::make_shared<Flags>();
  verb->add_flag("--json", flags->json, "one object a line");
  verb->add_flag("--ping-pong", flags->ping_pong)->group("");  // what it starts as ranks
  verb->footer("Takes a few seconds. Exit status 1 if something needs care.");
  return [flags](const Invocation& call) { return doctor(flags->json, flags->ping_pong, call); };
}

}  // namespace weft::cli
