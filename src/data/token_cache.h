// A text as numbers, remembered between runs in a folder: one file for each (text, kind of vocabulary, size),
// named by the hash of all three. Any process may write it at any time (it appears whole, by rename); a file
// that is not what it should be is made again; a folder that cannot be written only costs the time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "data/text.h"
#include "data/vocabulary.h"

namespace weft {

struct EncodedText {
  Vocabulary vocabulary;
  std::vector<std::int32_t> tokens;
};

struct VocabularyOptions {
  // affects results
  bool bytes = false;
  std::int64_t limit = 24'000;  // of words
  // affects speed only
  std::string cache;  // a folder; empty: none
};

EncodedText encode(const Text& text, const VocabularyOptions& options);

// $XDG_CACHE_HOME/weft, else ~/.cache/weft, else none.
std::string default_cache_folder();
// The file of a text in the folder.
std::string cache_file(const Text& text, const VocabularyOptions& options);

}  // namespace weft
