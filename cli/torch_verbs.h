// The verbs of weft-torch. Each reads its own arguments, so that its settings stand flat in a config file.
#pragma once

#include <string>
#include <vector>

namespace weft::cli {

// Gives the exit status. Throws CLI::ParseError, UsageError, Error.
int train(const std::vector<std::string>& arguments);

}  // namespace weft::cli
