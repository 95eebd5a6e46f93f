// join_world: from a launcher's variables to a running engine.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "base/worker_pool.h"
#include "transports/threads.h"
#include "weft/error.h"
#include "weft/world.h"
#include "world/open.h"
#include "world/running_world.h"

namespace weft {

namespace {

// What a launcher's process owns: transport, pool, and the engine on them.
class JoinedWorld final : public World {
 public:
  explicit JoinedWorld(const JoinOptions& options) : config_(options.config) {
    transport_ = open_transport(config_, placement_of(options));
    if (transport_ == nullptr) threads_ = std::make_unique<ThreadsWorld>(ThreadsOptions{});
    pool_ = std::make_unique<WorkerPool>(std::max(1, config_.workers));
    RunningWorld::Parts parts;
    parts.config = &config_;
    parts.pool = pool_.get();
    parts.trace = options.trace;
    parts.priority = options.priority;
    parts.host = host_identity();
    if (options.decorate) decorated_ = options.decorate(carrier());
    running_ = std::make_unique<RunningWorld>(decorated_ != nullptr ? *decorated_ : carrier(), parts);
    try {
      running_->start();
    } catch (...) {
      running_->engine().abandon(std::current_exception());
      throw;
    }
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

std::unique_ptr<World> join_world(const JoinOptions& options) {
  return std::make_unique<JoinedWorld>(options);
}
std::unique_ptr<World> join_world(const Config& config, const Decorate& decorate) {
  JoinOptions options;
  options.config = config;
  options.decorate = decorate;
  return join_world(options);
}
std::unique_ptr<World> join_world() { return join_world(Config::from_environment()); }

}  // namespace weft
