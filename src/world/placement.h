// Which rank of how many this process is, from the variables that launchers set.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace weft {

struct JoinOptions;

struct Placement {
  enum class Launcher { none, plain, open_mpi, pmi, slurm };  // plain: torchrun, `weft launch`, or by hand
  Launcher launcher = Launcher::none;
  int rank = 0;
  int size = 1;
  std::string master_address;  // empty where the launcher does not say
  int master_port = 0;
  std::string job;  // by which the launcher tells its jobs apart; empty where it does not
};

using Lookup = std::function<const char*(const char*)>;

// Open MPI, PMI (MPICH and others), then RANK and WORLD_SIZE, then Slurm. Throws UsageError for half-set or
// senseless values.
Placement detect_placement(const Lookup& lookup);
Placement detect_placement();  // of this process
// The caller's, where it gives one.
Placement placement_of(const JoinOptions& options);
std::string_view name_of(Placement::Launcher launcher);

// The same for processes of one host that share its network (and so for those of a container), another one
// for others.
std::uint64_t host_identity();

}  // namespace weft
