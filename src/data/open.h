// Data by name: from what a user writes to a source of tokens.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/source.h"

namespace weft {

struct DataOptions {
  // affects results
  // "auto" (the text at `path`; without a path the installed text, and where there is none synthetic tokens),
  // "text", "megatron" or "synthetic"
  std::string kind = "auto";
  std::string path;                  // of a text (file or folder), or a Megatron prefix
  std::string vocabulary = "words";  // of a text: "words" or "bytes"
  // Words of a text at most, or of synthetic tokens; of Megatron data its tokenizer's, 0: as many as are
  // found.
  std::int64_t words = 24'000;
  std::int64_t synthetic_tokens = 10'000'000;
  std::uint64_t seed = 1;  // of synthetic tokens
  // affects speed only
  std::string cache = "default";  // folder for encoded texts; "default": the user's; empty: none
};

struct OpenedData {
  std::shared_ptr<const DataSource> source;  // may be shared between ranks that are threads
  std::string note;                          // empty, or one line that the user must be told
  std::vector<std::string> words;            // by id, where they are known
};

// Throws UsageError: an unknown kind (with the nearest), or data that cannot be read.
OpenedData open_data(const DataOptions& options);

}  // namespace weft
