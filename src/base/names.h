// What to say about a name that is not in a table.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace weft {

// Insertions, deletions, replacements and swaps of neighbours from one to the other, case ignored.
int edit_distance(std::string_view a, std::string_view b);
// The known name nearest to `name` (the first of equals), or an empty one where none is near: more than a
// third of the letters, and more than two, would have to change.
std::string_view nearest_name(std::string_view name, std::span<const std::string_view> known);
// "unknown model 'gtp': did you mean 'gpt'? There are gpt, lm"
std::string unknown_name(std::string_view kind, std::string_view name,
                         std::span<const std::string_view> known);

}  // namespace weft
