#include "pipeline/message_set.h"

#include <charconv>

namespace weft {

namespace {

constexpr int kMost = 1 << 20;

// A number at the front, which is taken away.
std::optional<int> take_number(std::string_view& text) {
  int value = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || value < 0 || value > kMost) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(rest - text.data()));
  return value;
}

bool take(std::string_view& text, char mark) {
  if (!text.starts_with(mark)) return false;
  text.remove_prefix(1);
  return true;
}

}  // namespace

std::optional<MessageSet> MessageSet::parse(std::string_view text) {
  const std::optional<int> micro_batches = take_number(text);
  if (!micro_batches || *micro_batches < 1) return std::nullopt;
  MessageSet out(*micro_batches);
  while (!text.empty()) {
    if (!take(text, '/')) return std::nullopt;
    const std::optional<int> chunk = take_number(text);
    if (!chunk || !take(text, ':')) return std::nullopt;
    do {
      const std::optional<int> first = take_number(text);
      const std::optional<int> last = take(text, '-') ? take_number(text) : first;
      if (!first || !last || *first > *last || *last >= *micro_batches) return std::nullopt;
      for (int m = *first; m <= *last; ++m) out.add(*chunk, m);
    } while (take(text, '.'));
  }
  return out;
}

std::string MessageSet::text() const {
  std::string out = std::to_string(micro_batches_);
  int chunk = -1;
  for (auto at = messages_.begin(); at != messages_.end();) {
    out += at->first == chunk ? "." : "/" + std::to_string(at->first) + ":";
    chunk = at->first;
    const int first = at->second;
    int last = first;
    for (++at; at != messages_.end() && *at == std::pair(chunk, last + 1); ++at) ++last;
    out += std::to_string(first);
    if (last > first) out += "-" + std::to_string(last);
  }
  return out;
}

}  // namespace weft
