// The verbs of weft-torch. Each reads its own arguments, so that its settings stand flat in a config file.
// Some calls of them need no model that computes: the command itself, without torch, does those.
//
// A new one is a row here, its declaration, its row in torch_main.cc and its file.
#pragma once

#include <array>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace weft::cli {

// Each gives the exit status, or none where the call needs torch. They throw CLI::ParseError, UsageError,
// Error.
std::optional<int> train_without_torch(const std::vector<std::string>& arguments);
std::optional<int> compare_without_torch(const std::vector<std::string>& arguments);
std::optional<int> outline_without_torch(const std::vector<std::string>& arguments);

struct TorchVerb {
  std::string_view name, summary;
  // Null: every call needs it.
  std::optional<int> (*without_torch)(const std::vector<std::string>& arguments);
};
inline constexpr std::array kTorchVerbs{
    TorchVerb{"train", "train a language model on several ranks", train_without_torch},
    TorchVerb{"compare", "the same training under several schemes, side by side", compare_without_torch},
    TorchVerb{"verify", "train beside a dense shadow: which layer compression hurts", nullptr},
    TorchVerb{"outline", "measure a model's blocks for emulated and simulated runs", outline_without_torch},
    TorchVerb{"serve", "answer prompts with a trained model, on several ranks", nullptr},
};

// In weft-torch. Each gives the exit status and throws CLI::ParseError, UsageError, Error.
int train(const std::vector<std::string>& arguments);
int compare(const std::vector<std::string>& arguments);
int verify(const std::vector<std::string>& arguments);
int outline(const std::vector<std::string>& arguments);
int serve(const std::vector<std::string>& arguments);

// The exit status of `run`, or of the sentence on stderr that its exception is.
int guarded(const std::string& verb, const std::function<int()>& run);

}  // namespace weft::cli
