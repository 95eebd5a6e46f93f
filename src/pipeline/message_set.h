// Which of the messages that go back in a step travel as factors, where they were chosen one by one: as text, so that a
// run saves and compares them as it does its other options.
//
//   16/1:0-3.7/2:5   of 16 micro-batches 0 to 3 and 7 of what chunk 1 of the model sends back, and 5 of what chunk 2 does
//   16               none of 16
//
// A step of another number of micro-batches has none.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

namespace weft {

class MessageSet {
 public:
  explicit MessageSet(int micro_batches) : micro_batches_(micro_batches) {}
  // None: it is no such text.
  static std::optional<MessageSet> parse(std::string_view text);
  std::string text() const;

  // REQUIRES: 0 <= micro_batch < micro_batches().
  void add(int chunk, int micro_batch) { messages_.insert({chunk, micro_batch}); }
  void remove(int chunk, int micro_batch) { messages_.erase({chunk, micro_batch}); }
  bool has(int chunk, int micro_batch) const { return messages_.contains({chunk, micro_batch}); }
  int count() const { return static_cast<int>(messages_.size()); }
  int micro_batches() const { return micro_batches_; }
  const std::set<std::pair<int, int>>& messages() const { return messages_; }  // chunk, micro-batch
  int first_chunk() const { return messages_.empty() ? 1 : messages_.begin()->first; }
  int last_chunk() const { return messages_.empty() ? 1 : messages_.rbegin()->first; }
  friend bool operator==(const MessageSet&, const MessageSet&) = default;

 private:
  int micro_batches_;
  std::set<std::pair<int, int>> messages_;
};

// Throws UsageError of one sentence where a text that names messages one by one names some that a step of so many
// micro-batches over so many chunks of the model has not.
void check_messages(const std::string& messages, int chunks, int micro_batches);

}  // namespace weft
