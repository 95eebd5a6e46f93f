// join_world: from a launcher's variables to a running engine.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "base/worker_pool.h"
#include "transports/threads.h"
#include "weft/error.h"
#include "weft/world.h"
#include "world/placement.h"
#include "world/running_world.h"

#if WEFT_HAVE_TCP
#include "transports/tcp.h"
#endif
#if WEFT_HAVE_MPI
#include "transports/mpi.h"
#endif

namespace weft {

namespace {

constexpr int kDefaultMasterPort = 29500;  // torchrun's

[[noreturn]] [[maybe_unused]] void not_built(const std::string& name, const std::string& needs) {
  throw UsageError("this weft was built without the " + name + " transport; install " + needs + " and build again");
}

std::unique_ptr<Transport> open_tcp(const Config& config, const Placement& place) {
#if WEFT_HAVE_TCP
  TcpOptions options;
  options.rank = place.rank;
  options.size = place.size;
  if (!config.address.empty()) options.master_addr = config.address;
  else if (!place.master_address.empty()) options.master_addr = place.master_address;
  const int master_port = place.master_port != 0 ? place.master_port : kDefaultMasterPort;
  options.port = static_cast<std::uint16_t>(config.port != 0 ? config.port : master_port + 1);
  options.job = config.job;
  options.token = config.token.reveal();
  options.eager_limit = config.tcp_eager_limit;
  options.credit = config.tcp_credit;
  options.notsent_lowat = static_cast<int>(config.tcp_unsent);
  options.connect_timeout = config.connect_timeout;
  options.heartbeat = config.heartbeat;
  options.dead_after = config.dead_after;
  return connect_tcp(options);
#else
  static_cast<void>(config);
  static_cast<void>(place);
  not_built("tcp", "asio and OpenSSL");
#endif
}

std::unique_ptr<Transport> open_mpi_world() {
#if WEFT_HAVE_MPI
  return open_mpi({});
#else
  not_built("mpi", "MPI");
#endif
}

std::string chosen_transport(const Config& config, const Placement& place) {
  if (config.transport != "auto") return config.transport;
  switch (place.launcher) {
    case Placement::Launcher::none: return "threads";
    case Placement::Launcher::open_mpi:
    case Placement::Launcher::pmi: return "mpi";
    case Placement::Launcher::plain:
    case Placement::Launcher::slurm: return "tcp";
  }
  return "threads";
}

// What a launcher's process owns: transport, pool, and the engine on them.
class JoinedWorld final : public World {
 public:
  explicit JoinedWorld(const JoinOptions& options) : config_(options.config) {
    const Placement place = detect_placement();
    const std::string transport = chosen_transport(config_, place);
    if (transport == "tcp") {
      transport_ = open_tcp(config_, place);
    } else if (transport == "mpi") {
      transport_ = open_mpi_world();
    } else {
      if (place.size > 1) throw UsageError("WEFT_TRANSPORT=threads: ranks that are processes need tcp or mpi");
      ThreadsOptions alone;
      threads_ = std::make_unique<ThreadsWorld>(alone);
    }
    if (config_.workers > 0) pool_ = std::make_unique<WorkerPool>(config_.workers);
    RunningWorld::Parts parts;
    parts.config = &config_;
    parts.pool = pool_.get();
    parts.trace = options.trace;
    parts.priority = options.priority;
    if (options.decorate) decorated_ = options.decorate(carrier());
    running_ = std::make_unique<RunningWorld>(decorated_ != nullptr ? *decorated_ : carrier(), parts);
  }
  ~JoinedWorld() override {
    running_.reset();
    report();
  }

  Engine& engine() override { return running_->engine(); }
  std::string_view transport() const override { return running_->transport(); }

 private:
  Transport& carrier() { return transport_ != nullptr ? *transport_ : threads_->transport(0); }
  // tools/netlab compares these with the counters of the links. A process that joins twice adds up.
  void report() {
    constexpr const char* kForm = "{\"rank\": %d, \"sent_bytes\": %llu, \"received_bytes\": %llu}\n";
    const char* path = std::getenv("WEFT_NETLAB_REPORT");
    if (path == nullptr) return;
    int rank = 0;
    unsigned long long sent = 0, received = 0;
    if (std::FILE* before = std::fopen(path, "r")) {
      if (std::fscanf(before, kForm, &rank, &sent, &received) != 3) sent = received = 0;
      std::fclose(before);
    }
    std::FILE* file = std::fopen(path, "w");
    if (file == nullptr) return;
    const TrafficCounters c = carrier().counters();
    std::fprintf(file, kForm, carrier().rank(), sent + c.wire_bytes_sent, received + c.wire_bytes_received);
    std::fclose(file);
  }

  Config config_;
  std::unique_ptr<ThreadsWorld> threads_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Transport> decorated_;
  std::unique_ptr<WorkerPool> pool_;
  std::unique_ptr<RunningWorld> running_;
};

}  // namespace

std::unique_ptr<World> join_world(const JoinOptions& options) { return std::make_unique<JoinedWorld>(options); }
std::unique_ptr<World> join_world(const Config& config, const Decorate& decorate) {
  JoinOptions options;
  options.config = config;
  options.decorate = decorate;
  return join_world(options);
}
std::unique_ptr<World> join_world() { return join_world(Config::from_environment()); }

}  // namespace weft
