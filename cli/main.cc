// weft: the command. Verbs are in files of their own; here is what they share: parsing, errors, exit status.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "base/names.h"
#include "torch_verbs.h"
#include "verbs.h"
#include "weft/error.h"

namespace {

using weft::cli::Invocation;
using weft::cli::kFailed;
using weft::cli::kUsage;

int complain(const std::string& sentence, int status) {
  std::fprintf(stderr, "weft: %s\n", sentence.c_str());
  return status;
}

// What stands behind "--" is another program's command line and is not looked at.
Invocation invocation(int argc, char** argv) {
  Invocation call;
  std::error_code missing;
  call.program = std::filesystem::read_symlink("/proc/self/exe", missing).string();
  if (missing) call.program = argv[0];
  call.arguments.assign(argv + 1, argv + argc);
  const auto dashes = std::find(call.arguments.begin(), call.arguments.end(), "--");
  if (dashes != call.arguments.end()) {
    call.command.assign(dashes + 1, call.arguments.end());
    call.arguments.erase(dashes, call.arguments.end());
  }
  return call;
}

// One line: CLI11 ends some of its sentences with a list over several.
std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

// What was printed must have arrived: a full disk behind `> table.txt` is a failure, not a short table.
int flushed(int status) {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return status;
  return complain("the output could not be written", status == 0 ? kFailed : status);
}

int run(const std::vector<std::pair<CLI::App*, weft::cli::Run>>& verbs, const Invocation& call) {
  for (const auto& [app, run_verb] : verbs) {
    if (!app->parsed()) continue;
    if (!call.command.empty() && app->get_name() != "launch") {
      return complain("`weft " + app->get_name() + "` takes nothing behind --", kUsage);
    }
    return run_verb(call);
  }
  return kUsage;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("weft moves gradients, rows and tokens between ranks, most urgent first.\n", "weft");
  app.set_version_flag("--version", "weft " WEFT_VERSION);
  app.require_subcommand(1);
  app.footer(
      "First steps:\n"
      "  weft doctor                                         what works on this machine, and how fast\n"
      "  weft bench allreduce --ranks 4 --link 1gbit,50us    four ranks as threads, over a slow link\n"
      "  weft train --ranks 4 --link 100mbit,50us            train a model on them (weft train --help)\n"
      "  weft compare --ranks 4 --link 100mbit,50us          the same under six schemes, in one table\n"
      "  weft launch -n 4 -- ./program                       four ranks as processes, over tcp");
  using weft::cli::Run;
  std::vector<std::pair<CLI::App*, Run>> verbs;
  const auto added = [&](Run run_verb) {
    verbs.emplace_back(app.get_subcommands({}).back(), std::move(run_verb));
  };
  added(weft::cli::add_info(app));
  added(weft::cli::add_doctor(app));
  added(weft::cli::add_bench(app));
  added(weft::cli::add_launch(app));
  added(weft::cli::add_plan(app));
  added(weft::cli::add_serve_bench(app));
  for (const weft::cli::TorchVerb& row : weft::cli::kTorchVerbs) added(weft::cli::add_torch_verb(app, row));

  const Invocation call = invocation(argc, argv);
  if (!call.arguments.empty() && !call.arguments.front().starts_with("-")) {
    std::vector<std::string> names;
    for (const auto& [verb, run_verb] : verbs) names.push_back(verb->get_name());
    if (std::find(names.begin(), names.end(), call.arguments.front()) == names.end()) {
      const std::vector<std::string_view> known(names.begin(), names.end());
      return complain(weft::unknown_name("verb", call.arguments.front(), known), kUsage);
    }
  }
  try {
    std::vector<std::string> reversed(call.arguments.rbegin(), call.arguments.rend());
    app.parse(reversed);
    return flushed(run(verbs, call));
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e);  // --help, --version
    return complain(one_line(e.what()) + " (weft --help)", kUsage);
  } catch (const weft::UsageError& e) {
    return complain(e.what(), kUsage);
  } catch (const std::bad_alloc&) {
    return complain("there is not enough memory for this", kFailed);
  } catch (const std::exception& e) {
    return complain(e.what(), kFailed);
  }
}
