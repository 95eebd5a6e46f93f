// Words and their numbers. Number 0 is <unk>, the others run from the most frequent word on (equally frequent
// ones in the order of their bytes), so that small numbers are frequent. Of bytes: the 256 of them as they
// are.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace weft {

class Vocabulary {
 public:
  static constexpr std::int32_t kUnknown = 0;

  // The `limit` - 1 most frequent words of the text and <unk>. REQUIRES: limit >= 2.
  static Vocabulary of_words(std::string_view text, std::int64_t limit);
  static Vocabulary of_bytes();
  // As words() gave them.
  explicit Vocabulary(std::vector<std::string> words, bool bytes);

  std::int64_t size() const { return static_cast<std::int64_t>(words_.size()); }
  bool bytes() const { return bytes_; }
  const std::vector<std::string>& words() const { return words_; }
  std::vector<std::int32_t> encode(std::string_view text) const;

 private:
  std::vector<std::string> words_;                              // by number
  std::unordered_map<std::string_view, std::int32_t> numbers_;  // views of words_
  bool bytes_;

 public:
  Vocabulary(Vocabulary&&) = default;  // moves the vector: the views stay good
  Vocabulary& operator=(Vocabulary&&) = default;
};

}  // namespace weft
