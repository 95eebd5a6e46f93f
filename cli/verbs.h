// The verbs: one file each.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace weft::cli {

struct TorchVerb;

// Exit status of the command.
inline constexpr int kOk = 0;
inline constexpr int kFailed = 1;  // a run failed, or its result was wrong
inline constexpr int kUsage = 2;

// How the command was called, for verbs that start it again as ranks.
struct Invocation {
  std::string program;                 // this binary
  std::vector<std::string> arguments;  // as given, without argv[0]
  std::vector<std::string> command;    // what stands behind "--"
};

// What a verb does once the command line is known to be right; gives the exit status.
using Run = std::function<int(const Invocation&)>;

// Each adds its subcommand to `app` and says what to run if that is asked for.
Run add_info(CLI::App& app);
Run add_doctor(CLI::App& app);
Run add_bench(CLI::App& app);
Run add_launch(CLI::App& app);
Run add_plan(CLI::App& app);
Run add_serve_bench(CLI::App& app);
// The row of torch_verbs.h: started as weft-torch.
Run add_torch_verb(CLI::App& app, const TorchVerb& row);

}  // namespace weft::cli
