#include "data/vocabulary.h"

#include <algorithm>
#include <utility>

#include "data/tokenizer.h"

namespace weft {

Vocabulary::Vocabulary(std::vector<std::string> words, bool bytes) : words_(std::move(words)), bytes_(bytes) {
  if (bytes_) return;
  numbers_.reserve(words_.size());
  for (std::size_t i = 1; i < words_.size(); ++i) numbers_.emplace(words_[i], static_cast<std::int32_t>(i));
}

Vocabulary Vocabulary::of_words(std::string_view text, std::int64_t limit) {
  std::unordered_map<std::string_view, std::int64_t> counts;
  for (std::size_t at = 0;;) {
    const std::string_view token = next_token(text, at);
    if (token.empty()) break;
    ++counts[token];
  }
  std::vector<std::pair<std::string_view, std::int64_t>> order(counts.begin(), counts.end());
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return a.second != b.second ? a.second > b.second : a.first < b.first;
  });
  if (static_cast<std::int64_t>(order.size()) > limit - 1) order.resize(static_cast<std::size_t>(limit - 1));
  std::vector<std::string> words = {"<unk>"};
  words.reserve(order.size() + 1);
  for (const auto& [word, count] : order) words.emplace_back(word);
  return Vocabulary(std::move(words), false);
}

Vocabulary Vocabulary::of_bytes() {
  std::vector<std::string> words;
  words.reserve(256);
  for (int byte = 0; byte < 256; ++byte) words.emplace_back(1, static_cast<char>(byte));
  return Vocabulary(std::move(words), true);
}

std::vector<std::int32_t> Vocabulary::encode(std::string_view text) const {
  std::vector<std::int32_t> out;
  if (bytes_) {
    out.reserve(text.size());
    for (const char c : text) out.push_back(static_cast<unsigned char>(c));
    return out;
  }
  for (std::size_t at = 0;;) {
    const std::string_view token = next_token(text, at);
    if (token.empty()) return out;
    const auto found = numbers_.find(token);
    out.push_back(found == numbers_.end() ? kUnknown : found->second);
  }
}

}  // namespace weft
