// WEFT_FIGURES: the figures of a link as text, in the variable or in a file.
#pragma once

#include <optional>
#include <string>

#include "weft/world.h"

namespace weft {

// Rank 0's. An empty text: there are none, and none are kept.
class KeptFigures {
 public:
  // Throws UsageError where the text, or that of the file that it names, is none of figures.
  explicit KeptFigures(const std::string& text);

  const LinkCost* known() const { return known_ ? &*known_ : nullptr; }
  // Into the file, where there is one and it had none.
  void keep(const LinkCost& figures) const;

 private:
  std::string file_;
  std::optional<LinkCost> known_;
};

}  // namespace weft
