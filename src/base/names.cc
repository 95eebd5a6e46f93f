#include "base/names.h"

#include <algorithm>
#include <cstddef>
#include <vector>

namespace weft {

namespace {

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

}  // namespace

int edit_distance(std::string_view a, std::string_view b) {
  // distance[i][j] between the first i letters of a and the first j of b; rows i-2, i-1 and i are kept.
  std::vector<int> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) last[j] = static_cast<int>(j);
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = static_cast<int>(i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const char x = lower(a[i - 1]), y = lower(b[j - 1]);
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (x == y ? 0 : 1)});
      if (i > 1 && j > 1 && x == lower(b[j - 2]) && y == lower(a[i - 2])) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
    before.swap(last);
    last.swap(row);
  }
  return last[b.size()];
}

std::string_view nearest_name(std::string_view name, std::span<const std::string_view> known) {
  std::string_view nearest;
  int smallest = std::max(2, static_cast<int>(name.size() / 3)) + 1;
  for (const std::string_view candidate : known) {
    const int distance = edit_distance(name, candidate);
    if (distance < smallest && distance < static_cast<int>(std::max(name.size(), candidate.size()))) {
      smallest = distance;
      nearest = candidate;
    }
  }
  return nearest;
}

std::string unknown_name(std::string_view kind, std::string_view name,
                         std::span<const std::string_view> known) {
  std::string text = "unknown " + std::string(kind) + " '" + std::string(name) + "'";
  const std::string_view nearest = nearest_name(name, known);
  text += nearest.empty() ? ". " : ": did you mean '" + std::string(nearest) + "'? ";
  text += "There are ";
  for (std::size_t i = 0; i < known.size(); ++i) text += (i == 0 ? "" : ", ") + std::string(known[i]);
  return text;
}

}  // namespace weft
