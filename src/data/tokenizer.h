// Text into words. A word is a run of letters, digits and bytes beyond ASCII (UTF-8 stays whole), with
// apostrophes and hyphens inside it; any other character that is not white space is a token of its own. Case
// is kept. No byte but white space is lost.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace weft {

// The first token at or after `at` (which moves behind it); empty at the end of the text.
std::string_view next_token(std::string_view text, std::size_t& at);
std::vector<std::string_view> tokens_of(std::string_view text);

}  // namespace weft
