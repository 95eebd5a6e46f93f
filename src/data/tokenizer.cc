#include "data/tokenizer.h"

namespace weft {

namespace {

bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r') || c == '\0'; }
bool in_word(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
         static_cast<unsigned char>(c) >= 0x80;
}
bool joins(char c) { return c == '\'' || c == '-'; }

}  // namespace

std::string_view next_token(std::string_view text, std::size_t& at) {
  while (at < text.size() && is_space(text[at])) ++at;
  const std::size_t begin = at;
  if (at == text.size()) return {};
  if (!in_word(text[at++])) return text.substr(begin, 1);
  while (at < text.size() &&
         (in_word(text[at]) || (joins(text[at]) && at + 1 < text.size() && in_word(text[at + 1])))) {
    ++at;
  }
  return text.substr(begin, at - begin);
}

std::vector<std::string_view> tokens_of(std::string_view text) {
  std::vector<std::string_view> out;
  for (std::size_t at = 0;;) {
    const std::string_view token = next_token(text, at);
    if (token.empty()) return out;
    out.push_back(token);
  }
}

}  // namespace weft
