#include "world/placement.h"

#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <fstream>

#include "base/identity.h"
#include "base/units.h"
#include "weft/error.h"
#include "weft/world.h"

namespace weft {

namespace {

struct Names {
  Placement::Launcher launcher;
  const char* rank;
  const char* size;
};

// In this order: an MPI job that a batch system started has both sets, and MPI's own is the right one.
constexpr std::array<Names, 4> kLaunchers{{
    {Placement::Launcher::open_mpi, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
    {Placement::Launcher::pmi, "PMI_RANK", "PMI_SIZE"},
    {Placement::Launcher::plain, "RANK", "WORLD_SIZE"},
    {Placement::Launcher::slurm, "SLURM_PROCID", "SLURM_NTASKS"},
}};

int number(const char* name, const char* text, long long low, long long high) {
  try {
    return static_cast<int>(parse_integer(text, low, high));
  } catch (const UsageError& e) {
    throw UsageError(std::string(name) + ": " + e.what());
  }
}

// The first host of a Slurm list: "node[03-07,12],gpu1" -> "node03".
std::string first_host(const std::string& list) {
  const std::size_t bracket = list.find('[');
  const std::size_t comma = list.find(',');
  if (bracket == std::string::npos || comma < bracket) return list.substr(0, comma);
  const std::size_t end = list.find_first_of("-,]", bracket);
  return list.substr(0, bracket) + list.substr(bracket + 1, end - bracket - 1);
}

// Only what all ranks of one start have and those of another start have not.
std::string job_of(Placement::Launcher launcher, const Lookup& lookup) {
  const auto said = [&](const char* name) {
    const char* value = lookup(name);
    // torchrun's run has this name where nobody gave it one.
    const bool nothing = value == nullptr || *value == 0 || std::string_view(value) == "none";
    return nothing ? std::string() : std::string(name) + "=" + value;
  };
  const auto first = [&](const char* name, const char* otherwise) {
    const std::string one = said(name);
    return one.empty() ? said(otherwise) : one;
  };
  switch (launcher) {
    case Placement::Launcher::open_mpi:
      return first("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid");
    case Placement::Launcher::pmi:
      return first("PMI_JOBID", "SLURM_JOB_ID");
    case Placement::Launcher::plain:  // ranks by hand may be steps of their own, so Slurm's step is left out
      return first("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID");
    case Placement::Launcher::slurm:
      return said("SLURM_JOB_ID") + said("SLURM_STEP_ID");
    case Placement::Launcher::none:
      return "";
  }
  return "";
}

}  // namespace

Placement detect_placement(const Lookup& lookup) {
  Placement place;
  for (const Names& names : kLaunchers) {
    const char* rank = lookup(names.rank);
    const char* size = lookup(names.size);
    if (rank == nullptr && size == nullptr) continue;
    if (rank == nullptr || size == nullptr) {
      if (names.launcher != Placement::Launcher::plain) continue;
      throw UsageError(std::string(rank == nullptr ? names.size : names.rank) + " is set but " +
                       (rank == nullptr ? names.rank : names.size) + " is not; a launcher sets both");
    }
    place.launcher = names.launcher;
    place.size = number(names.size, size, 1, 1'000'000);
    place.rank = number(names.rank, rank, 0, place.size - 1);
    break;
  }
  if (const char* address = lookup("MASTER_ADDR")) place.master_address = address;
  if (const char* port = lookup("MASTER_PORT")) place.master_port = number("MASTER_PORT", port, 1, 65535);
  if (place.launcher == Placement::Launcher::slurm && place.master_address.empty()) {
    if (const char* nodes = lookup("SLURM_JOB_NODELIST")) place.master_address = first_host(nodes);
  }
  place.job = job_of(place.launcher, lookup);
  return place;
}

Placement detect_placement() {
  return detect_placement([](const char* name) { return std::getenv(name); });
}

Placement placement_of(const JoinOptions& options) {
  if (options.size == 0) return detect_placement();
  Placement out;
  out.launcher = Placement::Launcher::plain;
  out.rank = options.rank;
  out.size = options.size;
  return out;
}

std::uint64_t host_identity() {
  std::string text;
  std::ifstream boot("/proc/sys/kernel/random/boot_id");
  std::getline(boot, text);
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) == 0) text += name.data();
  struct stat network{};
  if (stat("/proc/self/ns/net", &network) == 0) text += "," + std::to_string(network.st_ino);
  std::uint64_t hash = 1;
  for (const char c : text) hash = mix(hash ^ static_cast<unsigned char>(c));
  return hash;
}

std::string_view name_of(Placement::Launcher launcher) {
  constexpr std::array<std::string_view, 5> names{"none", "environment", "Open MPI", "PMI", "Slurm"};
  return names[static_cast<std::size_t>(launcher)];
}

}  // namespace weft
