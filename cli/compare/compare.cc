// weft compare: the same training under several variants.
#include "compare/compare.h"

#include "measure/memory.h"
#include "torch_verbs.h"
#include "verbs.h"

namespace weft::cli {

int run_comparison(const CompareCommand& command, Models models) {
  const ComparisonOptions& options = command.options;
  for (const Variant& variant : options.variants) {
    if (options.computation.emulated() && !variant.chooses_tables)
      check_named_outline(options.computation, command.named_model, variant.options, options.ranks);
  }
  Comparison comparison(options, std::move(models));
  comparison.measure();
  comparison.show();
  return kOk;
}

std::optional<int> compare_without_torch(const std::vector<std::string>& arguments) {
  const CompareCommand command = read_compare(arguments, detect_placement());
  const Computation& computation = command.options.computation;
  if (!computation.emulated() || !has_outline(command.options.folder, computation.outline))
    return std::nullopt;
  keep_freed_memory();
  return run_comparison(command, {});
}

}  // namespace weft::cli
