// The transport of a process that a launcher started.
#pragma once

#include <memory>
#include <string>

#include "weft/config.h"
#include "weft/transport.h"
#include "world/placement.h"

namespace weft {

// "threads", "tcp" or "mpi": what the configuration asks for, or what suits the launcher.
std::string chosen_transport(const Config& config, const Placement& place);
// Connects to all ranks. Null for "threads": a process alone. Throws UsageError, TransportError or
// TimeoutError.
std::unique_ptr<Transport> open_transport(const Config& config, const Placement& place);

}  // namespace weft
