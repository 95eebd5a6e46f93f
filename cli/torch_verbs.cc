// Verbs that compute a model: they live in weft-torch, which lies beside this command. The command itself
// stays without torch, whose libraries take a second and 300 MB to load.
#include "torch_verbs.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "verbs.h"
#include "weft/error.h"

namespace weft::cli {

Run add_torch_verb(CLI::App& app, const TorchVerb& row) {
  CLI::App* verb = app.add_subcommand(std::string(row.name), std::string(row.summary));
  verb->set_help_flag();  // weft-torch has it, with all flags
  verb->prefix_command();
  return [](const Invocation& call) -> int {
    const std::filesystem::path program = std::filesystem::path(call.program).parent_path() / "weft-torch";
    if (access(program.c_str(), X_OK) != 0) {
      throw UsageError("`weft " + call.arguments.front() + "` computes with LibTorch, and '" +
                       program.string() +
                       "' is not there: `make build` builds it where a torch of 2.11 or newer is found "
                       "(WEFT_WITH_TORCH=ON says what is missing)");
    }
    std::vector<std::string> arguments = call.arguments;
    arguments.insert(arguments.begin(), program.string());
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    execv(argv[0], argv.data());
    throw Error(program.string() + " could not be started: " + std::strerror(errno));
  };
}

}  // namespace weft::cli
