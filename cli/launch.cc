// weft launch: ranks as processes on this host.
#include <CLI/CLI.hpp>
#include <memory>

#include "launcher.h"
#include "verbs.h"
#include "weft/error.h"

namespace weft::cli {

Run add_launch(CLI::App& app) {
  CLI::App* verb = app.add_subcommand("launch", "start ranks as processes on this host, over tcp");
  const auto options = std::make_shared<LaunchOptions>();
  verb->add_option("-n,--ranks", options->ranks, "number of ranks")->required()->check(CLI::Range(1, 4096));
  verb->add_option("--port", options->port,
                   "MASTER_PORT; the ranks meet at the next one (default: free ones)")
      ->check(CLI::Range(1, 65534));
  verb->add_option("--restarts", options->restarts,
                   "after a failure start all ranks again, so many times (weft train --resume auto)")
      ->check(CLI::Range(0, 1000));
  verb->add_flag("--verbose", options->verbose, "say what is started and how each rank ends");
  verb->add_flag("--rank0{false}", options->prefix)->group("");  // only rank 0 writes to stdout, unprefixed
  verb->footer(
      "The command follows --. Its ranks find RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and "
      "WEFT_TOKEN in their\n"
      "environment. When one fails the others are ended (after 1 s SIGTERM, after 3 s SIGKILL); its exit "
      "status is "
      "that of this command.\n"
      "Example: weft launch -n 4 -- ./program --its-option");
  return [options](const Invocation& call) {
    if (call.command.empty())
      throw UsageError("launch: the command is missing; write `weft launch -n 4 -- command`");
    options->command = call.command;
    return launch(*options);
  };
}

}  // namespace weft::cli
