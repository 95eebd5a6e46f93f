// weft-torch: the verbs that compute a model. `weft` starts it; nobody needs to call it by name.
#include <malloc.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <limits>
#include <new>
#include <string>
#include <vector>

#include "torch_verbs.h"
#include "verbs.h"
#include "weft/error.h"

namespace {

struct Row {
  std::string_view name;
  int (*run)(const std::vector<std::string>& arguments);
};
// As kTorchVerbs has them.
constexpr std::array kRows{
    Row{"train", weft::cli::train},
    Row{"compare", weft::cli::compare},
    Row{"verify", weft::cli::verify},
    Row{"outline", weft::cli::outline},
};
static_assert(kRows.size() == weft::cli::kTorchVerbs.size());

int complain(std::string sentence, int status) {
  std::replace(sentence.begin(), sentence.end(), '\n', ' ');
  std::fprintf(stderr, "weft: %s\n", sentence.c_str());
  return status;
}

std::string names() {
  std::string list;
  for (const Row& row : kRows) list += (list.empty() ? "" : ", ") + std::string(row.name);
  return list;
}

// A step frees and takes the same large tensors again and again. glibc gives blocks of more than 32 MiB back
// to the kernel at once, which then clears their pages anew: a fifth of a step of the default gpt.
void keep_freed_memory() {
  constexpr int kAhead = 64 << 20;
  ::mallopt(M_MMAP_MAX, 0);
  ::mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  ::mallopt(M_TOP_PAD, kAhead);
}

}  // namespace

int main(int argc, char** argv) {
  keep_freed_memory();
  const std::string verb = argc > 1 ? argv[1] : "";
  const auto* const row =
      std::find_if(kRows.begin(), kRows.end(), [&](const Row& r) { return r.name == verb; });
  if (row == kRows.end())
    return complain("weft-torch has the verbs " + names() + " (weft train --help)", weft::cli::kUsage);
  try {
    return row->run({argv + 2, argv + argc});
  } catch (const CLI::CallForHelp&) {
    return weft::cli::kOk;
  } catch (const CLI::ParseError& e) {
    return complain(std::string(e.what()) + " (weft " + verb + " --help)", weft::cli::kUsage);
  } catch (const weft::UsageError& e) {
    return complain(e.what(), weft::cli::kUsage);
  } catch (const std::bad_alloc&) {
    return complain("there is not enough memory for this", weft::cli::kFailed);
  } catch (const std::exception& e) {
    return complain(e.what(), weft::cli::kFailed);
  }
}
