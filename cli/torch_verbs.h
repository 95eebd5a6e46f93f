// The verbs of weft-torch. Each reads its own arguments, so that its settings stand flat in a config file.
//
// A new one is a row here, its declaration, its row in torch_main.cc and its file.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

namespace weft::cli {

struct TorchVerb {
  std::string_view name, summary;
};
inline constexpr std::array kTorchVerbs{
    TorchVerb{"train", "train a language model on several ranks"},
    TorchVerb{"compare", "the same training under several schemes, side by side"},
    TorchVerb{"verify", "train beside a dense shadow: which layer compression hurts"},
    TorchVerb{"outline", "measure a model's blocks for emulated and simulated runs"},
};

// Each gives the exit status and throws CLI::ParseError, UsageError, Error.
int train(const std::vector<std::string>& arguments);
int compare(const std::vector<std::string>& arguments);
int verify(const std::vector<std::string>& arguments);
int outline(const std::vector<std::string>& arguments);

}  // namespace weft::cli
