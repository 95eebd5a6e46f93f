// Data by name: from what a user writes to a source of tokens.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/source.h"
#include "weft/train/data_options.h"

namespace weft {

struct OpenedData {
  std::shared_ptr<const DataSource> source;  // may be shared between ranks that are threads
  std::string note;                          // empty, or one line that the user must be told
  std::vector<std::string> words;            // by id, where they are known
};

// Throws UsageError: an unknown kind (with the nearest), or data that cannot be read.
OpenedData open_data(const DataOptions& options);

}  // namespace weft
