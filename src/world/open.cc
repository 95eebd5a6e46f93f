// From a launcher's variables and the configuration to a connected transport.
#include "world/open.h"

#include "weft/error.h"

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
  throw UsageError("this weft was built without the " + name + " transport; install " + needs +
                   " and build again");
}

std::unique_ptr<Transport> open_tcp(const Config& config, const Placement& place) {
#if WEFT_HAVE_TCP
  TcpOptions options;
  options.rank = place.rank;
  options.size = place.size;
  if (!config.address.empty())
    options.master_addr = config.address;
  else if (!place.master_address.empty())
    options.master_addr = place.master_address;
  const int master_port = place.master_port != 0 ? place.master_port : kDefaultMasterPort;
  if (config.port == 0 && master_port == 65535)
    throw UsageError("MASTER_PORT is 65535, and weft meets at the port behind it: set WEFT_PORT");
  options.port = static_cast<std::uint16_t>(config.port != 0 ? config.port : master_port + 1);
  if (!config.job.empty())
    options.job = config.job;
  else if (!place.job.empty())
    options.job = place.job;
  options.token = config.token.reveal();
  options.bind = config.bind;
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

// A process that MPI did not start, or that another MPI started, is a world of its own: without this check a
// job would train as many models as it has ranks.
std::unique_ptr<Transport> open_mpi_world(const Placement& place) {
#if WEFT_HAVE_MPI
  std::unique_ptr<Transport> transport = open_mpi({});
  const bool launched = place.launcher != Placement::Launcher::none;
  if (launched && (transport->size() != place.size || transport->rank() != place.rank)) {
    throw UsageError("the launcher (" + std::string(name_of(place.launcher)) + ") says rank " +
                     std::to_string(place.rank) + " of " + std::to_string(place.size) +
                     ", but MPI says rank " + std::to_string(transport->rank()) + " of " +
                     std::to_string(transport->size()) +
                     ": start it with the mpirun of the MPI that weft was built with, or set "
                     "WEFT_TRANSPORT=tcp");
  }
  return transport;
#else
  static_cast<void>(place);
  not_built("mpi", "MPI");
#endif
}

}  // namespace

std::string chosen_transport(const Config& config, const Placement& place) {
  if (config.transport != "auto") return config.transport;
  switch (place.launcher) {
    case Placement::Launcher::none:
      return "threads";
    case Placement::Launcher::open_mpi:
    case Placement::Launcher::pmi:
      return "mpi";
    case Placement::Launcher::plain:
    case Placement::Launcher::slurm:
      return "tcp";
  }
  return "threads";
}

std::unique_ptr<Transport> open_transport(const Config& config, const Placement& place) {
  const std::string transport = chosen_transport(config, place);
  if (transport == "tcp") return open_tcp(config, place);
  if (transport == "mpi") return open_mpi_world(place);
  if (place.size > 1) throw UsageError("WEFT_TRANSPORT=threads: ranks that are processes need tcp or mpi");
  return nullptr;
}

}  // namespace weft
