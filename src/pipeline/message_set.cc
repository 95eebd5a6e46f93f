#include "pipeline/message_set.h"

#include <charconv>
#include <cstdint>

#include "weft/error.h"

namespace weft {

namespace {

constexpr int kMost = 1 << 20;
constexpr std::int64_t kMostMessages = 1 << 18;  // in all, as often as they are named

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
  std::int64_t named = 0;
  while (!text.empty()) {
    if (!take(text, '/')) return std::nullopt;
    const std::optional<int> chunk = take_number(text);
    if (!chunk || !take(text, ':')) return std::nullopt;
    do {
      const std::optional<int> first = take_number(text);
      const std::optional<int> last = take(text, '-') ? take_number(text) : first;
      if (!first || !last || *first > *last || *last >= *micro_batches) return std::nullopt;
      named += *last - *first + 1;
      if (named > kMostMessages) return std::nullopt;
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

void check_messages(const std::string& messages, int chunks, int micro_batches) {
  const std::optional<MessageSet> chosen = MessageSet::parse(messages);
  if (!chosen) return;
  if (chosen->micro_batches() != micro_batches)
    throw UsageError("backward-messages '" + messages + "' are of " +
                     std::to_string(chosen->micro_batches()) + " micro-batches, and a step has " +
                     std::to_string(micro_batches) +
                     ": a run that begins anew chooses them again (critical)");
  if (chosen->first_chunk() < 1 || chosen->last_chunk() >= chunks)
    throw UsageError("backward-messages '" + messages + "': chunks that send gradients back are 1 to " +
                     std::to_string(chunks - 1));
}

}  // namespace weft
