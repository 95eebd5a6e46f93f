// Verbs that compute a model: they live in weft-torch, which lies beside this command. The command itself
// stays without torch, whose libraries take a second and 300 MB to load.
#include "torch_verbs.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <new>

#include "verbs.h"
#include "weft/error.h"

namespace weft::cli {

namespace {

int complain(std::string sentence, int status) {
  std::replace(sentence.begin(), sentence.end(), '\n', ' ');
  std::fprintf(stderr, "weft: %s\n", sentence.c_str());
  return status;
}

[[noreturn]] void hand_over(const Invocation& call) {
  const std::filesystem::path program = std::filesystem::path(call.program).parent_path() / "weft-torch";
  if (access(program.c_str(), X_OK) != 0) {
    const std::string& verb = call.arguments.front();
    const bool by_outline = verb == "train" || verb == "compare";
    throw UsageError("`weft " + verb + "` computes with LibTorch, and '" + program.string() +
                     "' is not there: `make build` builds it where a torch of 2.11 or newer is found "
                     "(WEFT_WITH_TORCH=ON says what is missing)" +
                     (by_outline ? "; --compute emulated --outline FILE needs none" : ""));
  }
  std::vector<std::string> arguments = call.arguments;
  arguments.insert(arguments.begin(), program.string());
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  execv(argv[0], argv.data());
  throw Error(program.string() + " could not be started: " + std::strerror(errno));
}

}  // namespace

int guarded(const std::string& verb, const std::function<int()>& run) {
  try {
    return run();
  } catch (const CLI::CallForHelp&) {
    return kOk;
  } catch (const CLI::ParseError& e) {
    return complain(std::string(e.what()) + " (weft " + verb + " --help)", kUsage);
  } catch (const UsageError& e) {
    return complain(e.what(), kUsage);
  } catch (const std::bad_alloc&) {
    return complain("there is not enough memory for this", kFailed);
  } catch (const std::exception& e) {
    return complain(e.what(), kFailed);
  }
}

Run add_torch_verb(CLI::App& app, const TorchVerb& row) {
  CLI::App* verb = app.add_subcommand(std::string(row.name), std::string(row.summary));
  verb->set_help_flag();  // the verb's own flags have it
  verb->prefix_command();
  return [row](const Invocation& call) -> int {
    const std::vector<std::string> arguments(call.arguments.begin() + 1, call.arguments.end());
    return guarded(std::string(row.name), [&]() -> int {
      if (row.without_torch != nullptr) {
        if (const std::optional<int> status = row.without_torch(arguments)) return *status;
      }
      hand_over(call);
    });
  };
}

}  // namespace weft::cli
