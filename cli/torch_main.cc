// weft-torch: the verbs that compute a model. `weft` starts it; nobody needs to call it by name.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "torch_verbs.h"
#include "verbs.h"
#include "weft/error.h"

namespace {

int complain(std::string sentence, int status) {
  std::replace(sentence.begin(), sentence.end(), '\n', ' ');
  std::fprintf(stderr, "weft: %s\n", sentence.c_str());
  return status;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string verb = argc > 1 ? argv[1] : "";
  if (verb != "train")
    return complain("weft-torch has the verb train (weft train --help)", weft::cli::kUsage);
  try {
    return weft::cli::train({argv + 2, argv + argc});
  } catch (const CLI::CallForHelp&) {
    return weft::cli::kOk;
  } catch (const CLI::ParseError& e) {
    return complain(std::string(e.what()) + " (weft train --help)", weft::cli::kUsage);
  } catch (const weft::UsageError& e) {
    return complain(e.what(), weft::cli::kUsage);
  } catch (const std::exception& e) {
    return complain(e.what(), weft::cli::kFailed);
  }
}
