// Memory of messages. A piece belongs to everybody who shares it, may outlive the object that handed it out, and is
// handed out again when the last one has let go of it: a job whose steps are alike asks the system for as many as are
// live at a time, once. What two steps in a row did not need goes back to the system.
//
// Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace weft {

class MessageMemory {
 public:
  using Piece = std::shared_ptr<std::byte[]>;

  MessageMemory();
  MessageMemory(const MessageMemory&) = delete;
  MessageMemory& operator=(const MessageMemory&) = delete;

  Piece take(std::size_t bytes);  // not initialised; null: of no byte
  void begin_step();

  std::size_t live_bytes() const;
  std::size_t peak_bytes() const;  // that were live at a time, since begin_step()
  std::uint64_t fresh() const;     // pieces that came from the system, so far

 private:
  struct Store;
  const std::shared_ptr<Store> store_;
};

}  // namespace weft
