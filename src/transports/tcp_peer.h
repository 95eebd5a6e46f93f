// One connection: a reader that takes frames apart and a writer that puts them together. Two small state
// machines over non-blocking calls; asio only says when the socket is ready.
//
//   reader  header -> (payload) -> header ... A read fills the place where the payload belongs and, behind
//           it, a small staging buffer with whatever follows, so long payloads are read straight into place
//           and short frames come many at a time.
//   writer  batch = control frames, short messages, the header of at most one long message; then that
//           message's payload, from the sender's memory. What goes next is decided between batches: control
//           first, then class, priority, age.
//
// Nothing is allocated per message: queues keep their capacity, handlers live in slots of this object.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "transports/tcp_message.h"
#include "transports/tcp_socket.h"
#include "wire/frame.h"

namespace weft::tcp {

class Peer;

// What a connection tells its transport. control(), landing() and landed() may throw: the connection is then
// gone with that error.
class PeerEvents {
 public:
  virtual void control(Peer& peer, const wire::Frame& frame) = 0;  // a frame without payload
  // Where the payload of a data frame goes: that many bytes, or nothing to drop it.
  virtual std::span<std::byte> landing(Peer& peer, const wire::Frame& frame) = 0;
  virtual void landed(Peer& peer, const wire::Frame& frame) = 0;  // it is there, and its checksum is right
  virtual void goodbye(Peer& peer, const wire::Frame& frame, std::span<const std::byte> text) = 0;
  // No more can be read: `error`, or null where the connection ended (Peer::broken_by). The peer touches
  // nothing of its own after this call.
  virtual void gone(Peer& peer, std::exception_ptr error) = 0;
  // Its data, or its request where it asks. False: write() is called again when it may.
  virtual bool may_begin(const Outgoing& message) = 0;
  virtual void begun(Outgoing& message) = 0;  // before its first byte is written
  virtual void sent(Outgoing& message) = 0;   // its memory is no longer needed; the message may be freed

 protected:
  ~PeerEvents() = default;
};

// Memory for one asio handler at a time.
class HandlerSlot {
 public:
  void* take(std::size_t bytes) {
    if (used_ || bytes > sizeof(memory_)) return ::operator new(bytes);
    used_ = true;
    return memory_;
  }
  void give(void* piece) noexcept {
    if (piece == memory_)
      used_ = false;
    else
      ::operator delete(piece);
  }

 private:
  alignas(std::max_align_t) std::byte memory_[256];
  bool used_ = false;
};

template <class T>
class SlotAllocator {
 public:
  using value_type = T;
  explicit SlotAllocator(HandlerSlot& slot) : slot_(&slot) {}
  template <class U>
  SlotAllocator(const SlotAllocator<U>& other) : slot_(other.slot_) {}  // NOLINT(google-explicit-constructor)
  T* allocate(std::size_t n) { return static_cast<T*>(slot_->take(n * sizeof(T))); }
  void deallocate(T* piece, std::size_t) noexcept { slot_->give(piece); }
  template <class U>
  bool operator==(const SlotAllocator<U>& other) const {
    return slot_ == other.slot_;
  }

 private:
  template <class U>
  friend class SlotAllocator;
  HandlerSlot* slot_;
};

// A handler that takes its memory from a slot.
template <class F>
class InSlot {
 public:
  using allocator_type = SlotAllocator<void>;
  InSlot(HandlerSlot& slot, F f) : slot_(&slot), f_(std::move(f)) {}
  allocator_type get_allocator() const noexcept { return allocator_type(*slot_); }
  template <class... Args>
  void operator()(Args&&... args) {
    f_(std::forward<Args>(args)...);
  }

 private:
  HandlerSlot* slot_;
  F f_;
};

class Peer {
 public:
  struct Link {
    int rank = 0;           // at the other end
    wire::Expected expect;  // of its frames
    bool checksum = true;
    TrafficCounters* counters = nullptr;
    std::uint64_t* progress = nullptr;  // counted up when anything was moved
    int notsent_lowat = 0;
  };
  Peer(Socket socket, const Link& link, PeerEvents& events);
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  int rank() const { return link_.rank; }
  bool open() const { return open_; }
  Time heard() const { return heard_; }    // when bytes last came
  Time spoken() const { return spoken_; }  // when bytes were last written
  void excuse(Time silence) { heard_ += silence; }
  // The errno that ended the connection; 0: the other side closed it.
  int broken_by() const { return broken_by_; }

  void start();  // begins to read
  // Reads what is there. The only place from which PeerEvents are called, but for begun() and sent().
  void read();
  // Where the rest of the payload that is being read goes: nowhere.
  void drop_payload() { target_ = {}; }
  // From now on everything that comes is dropped unseen.
  void stop_listening() { deaf_ = true; }

  void enqueue(Outgoing& message);
  bool gives_way() const { return held_; }  // the next message may not begin yet
  bool dequeue(Outgoing& message);          // false if it is being written
  void clear_queue() { queue_.clear(); }
  void say(const wire::Frame& frame);
  // After everything that is queued; nothing can be said later.
  void say_last(const wire::Frame& frame, std::string_view text);
  // Writes what the kernel takes.
  void write();
  Outgoing* body() const { return body_; }                         // the long message that is being written
  Outgoing* take_body() { return std::exchange(body_, nullptr); }  // REQUIRES: closed
  bool idle() const;                                               // nothing waits to be written
  // After say_last(): nothing is left to be written, and the other end has it all. Or it has taken nothing
  // for `patience`, counted from when it was last heard.
  bool flushed(Time patience);
  void give_up() { given_up_ = true; }  // it will not answer: flushed() does not wait for it
  void close();

  // The transport's books about this peer.
  std::size_t credit_left = 0;  // of what this rank may send unasked
  std::size_t held = 0;         // of what the peer has sent unasked and not got back
  std::size_t owed = 0;         // part of `held` that it is to get back
  std::size_t requests = 0;     // that wait here for a receive
  bool left = false;            // said goodbye
  bool dirty = false;           // has something to write
  Incoming* reading = nullptr;  // whose payload is being read

 private:
  static constexpr std::size_t kStaging = 32 << 10;
  enum class Reading : std::uint8_t { header, payload, text };

  void arm_read();
  void arm_write();
  void take_staged();
  void take_header();
  void took(std::span<const std::byte> bytes);
  void finish_payload();
  bool load();
  bool checksummed(Outgoing& message);
  Outgoing* choose();
  void advance(std::size_t written);
  void append(const wire::Frame& frame);
  bool said_all() const { return said_last_ && last_words_.empty(); }

  Link link_;
  PeerEvents& events_;
  Socket socket_;
  int fd_;
  bool open_ = true;
  bool deaf_ = false;
  Time heard_;
  Time spoken_;

  HandlerSlot read_slot_;
  bool read_armed_ = false;
  std::unique_ptr<std::byte[]> staging_ = std::make_unique<std::byte[]>(kStaging);
  std::size_t staged_begin_ = 0;
  std::size_t staged_end_ = 0;
  Reading state_ = Reading::header;
  wire::Frame frame_;
  std::span<std::byte> target_;  // of the whole payload; empty: it is dropped
  std::uint64_t done_ = 0;       // bytes of the payload that are there
  std::uint32_t crc_ = 0;
  std::vector<std::byte> text_;

  HandlerSlot write_slot_;
  bool write_armed_ = false;
  bool broken_ = false;  // writing failed; what can still be read decides why
  int broken_by_ = 0;
  std::vector<Outgoing*> queue_;  // a heap
  std::vector<std::byte> control_;
  std::vector<std::byte> last_words_;
  bool held_ = false;
  bool said_last_ = false;
  bool given_up_ = false;
  bool shut_ = false;          // for writing
  std::uint64_t written_ = 0;  // to the kernel
  std::uint64_t taken_ = 0;    // by the other end, when flushed() last looked
  Time taken_at_{};            // when that had grown last
  std::vector<std::byte> batch_;
  std::size_t batch_done_ = 0;
  Outgoing* body_ = nullptr;
  std::size_t body_done_ = 0;
};

}  // namespace weft::tcp
