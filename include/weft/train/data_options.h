// Where the tokens of a training run come from.
#pragma once

#include <cstdint>
#include <string>

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

}  // namespace weft
