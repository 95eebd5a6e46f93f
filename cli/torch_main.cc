// weft-torch: the verbs that compute a model. `weft` starts it; nobody needs to call it by name.
#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "torch_verbs.h"
#include "weft/error.h"

namespace {

struct Row {
  std::string_view name;
  int (*run)(const std::vector<std::string>& arguments);
};
// As kTorchVerbs has them.
constexpr std::array kRows{
    Row{"train", weft::cli::train},     Row{"compare", weft::cli::compare}, Row{"verify", weft::cli::verify},
    Row{"outline", weft::cli::outline}, Row{"serve", weft::cli::serve},
};
static_assert(kRows.size() == weft::cli::kTorchVerbs.size());

std::string names() {
  std::string list;
  for (const Row& row : kRows) list += (list.empty() ? "" : ", ") + std::string(row.name);
  return list;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string verb = argc > 1 ? argv[1] : "";
  return weft::cli::guarded(verb, [&] {
    const auto* const row =
        std::find_if(kRows.begin(), kRows.end(), [&](const Row& r) { return r.name == verb; });
    if (row == kRows.end())
      throw weft::UsageError("weft-torch has the verbs " + names() + " (weft train --help)");
    return row->run({argv + 2, argv + argc});
  });
}
