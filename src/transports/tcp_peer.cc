#include "transports/tcp_peer.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "weft/error.h"
#include "wire/crc32c.h"

namespace weft::tcp {

namespace {

constexpr std::size_t kReadPiece = 256 << 10;  // at a time, so that the checksum finds it in the cache
constexpr std::size_t kReadTurn = 2 << 20;     // then others get their turn
constexpr std::size_t kWritePiece = 1 << 20;
constexpr std::size_t kWriteTurn = 4 << 20;
constexpr std::size_t kChecksumPiece = 1 << 20;
constexpr std::size_t kBatch = 32 << 10;  // of control frames and short messages
constexpr std::size_t kShort = 8 << 10;   // a payload that is copied into the batch
constexpr std::size_t kLongestText = 1024;

void set_option(int fd, int level, int option, int value) {
  ::setsockopt(fd, level, option, &value, sizeof value);
}

[[noreturn]] void corrupt(int peer, const std::string& what) {
  throw TransportError(TransportError::Kind::corrupt, peer,
                       "frame from rank " + std::to_string(peer) + ": " + what);
}

}  // namespace

Peer::Peer(Socket socket, const Link& link, PeerEvents& events)
    : link_(link),
      events_(events),
      socket_(std::move(socket)),
      fd_(socket_.native_handle()),
      heard_(steady_now()),
      spoken_(heard_) {
  std::error_code ignored;
  socket_.non_blocking(true, ignored);
  ::fcntl(fd_, F_SETFD, FD_CLOEXEC);  // a program that this one starts must not hold the connection open
  set_option(fd_, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(fd_, IPPROTO_TCP, TCP_NOTSENT_LOWAT, link.notsent_lowat);
  batch_.reserve(kBatch + kShort + wire::kFrameBytes);
  control_.reserve(16 * wire::kFrameBytes);
}

void Peer::start() { arm_read(); }

void Peer::arm_read() {
  if (read_armed_ || !open_) return;
  read_armed_ = true;
  socket_.async_wait(Socket::wait_read, InSlot(read_slot_, [this](const std::error_code& error) {
                       read_armed_ = false;
                       if (!error && open_) read();
                     }));
}

void Peer::arm_write() {
  if (write_armed_ || !open_) return;
  write_armed_ = true;
  socket_.async_wait(Socket::wait_write, InSlot(write_slot_, [this](const std::error_code& error) {
                       write_armed_ = false;
                       if (!error && open_) write();
                     }));
}

// ---- reader ----

void Peer::read() {
  for (std::size_t turn = 0; turn < kReadTurn;) {
    std::array<iovec, 2> parts{};
    std::size_t count = 0;
    std::size_t direct = 0;
    if (staged_begin_ == staged_end_) staged_begin_ = staged_end_ = 0;
    if (state_ == Reading::payload && !target_.empty()) {
      direct = static_cast<std::size_t>(std::min<std::uint64_t>(target_.size() - done_, kReadPiece));
      parts[count++] = {target_.data() + done_, direct};
    }
    if (done_ + direct == frame_.length || direct == 0) {
      parts[count++] = {staging_.get() + staged_end_, kStaging - staged_end_};
    }
    const ssize_t n = ::readv(fd_, parts.data(), static_cast<int>(count));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (n <= 0) {
      // A write that failed has taken the reason from the kernel, and left it here.
      if (n < 0) broken_by_ = errno;
      return events_.gone(*this, nullptr);
    }
    const auto got = static_cast<std::size_t>(n);
    turn += got;
    heard_ = steady_now();
    link_.counters->wire_bytes_received += got;
    ++*link_.progress;
    if (deaf_) {
      target_ = {};
      staged_begin_ = staged_end_ = 0;
      continue;
    }
    try {
      const std::size_t placed = std::min(got, direct);
      staged_end_ += got - placed;
      if (placed > 0) took(target_.subspan(static_cast<std::size_t>(done_), placed));
      take_staged();
    } catch (...) {
      return events_.gone(*this, std::current_exception());
    }
    if (!open_) return;
  }
  arm_read();
}

// Bytes of the current payload (or text) that have just come, in their place or to be dropped.
void Peer::took(std::span<const std::byte> bytes) {
  if (link_.checksum) crc_ = wire::crc32c(bytes, crc_);
  done_ += bytes.size();
  if (done_ == frame_.length) finish_payload();
}

void Peer::take_staged() {
  while (open_ && !deaf_) {
    const std::span<std::byte> staged(staging_.get() + staged_begin_, staged_end_ - staged_begin_);
    if (state_ == Reading::header) {
      if (staged.size() < wire::kFrameBytes) break;
      take_header();
      continue;
    }
    if (staged.empty()) break;
    const std::span<std::byte> piece =
        staged.first(static_cast<std::size_t>(std::min<std::uint64_t>(staged.size(), frame_.length - done_)));
    staged_begin_ += piece.size();
    if (state_ == Reading::text)
      text_.insert(text_.end(), piece.begin(), piece.end());
    else if (!target_.empty())
      std::copy(piece.begin(), piece.end(), target_.begin() + static_cast<std::ptrdiff_t>(done_));
    took(piece);
  }
  if (staged_begin_ > 0 && kStaging - staged_end_ < wire::kFrameBytes) {  // room for the rest of a header
    std::memmove(staging_.get(), staging_.get() + staged_begin_, staged_end_ - staged_begin_);
    staged_end_ -= staged_begin_;
    staged_begin_ = 0;
  }
}

void Peer::take_header() {
  frame_ = wire::parse_frame(
      std::span<const std::byte, wire::kFrameBytes>(staging_.get() + staged_begin_, wire::kFrameBytes),
      rank());
  staged_begin_ += wire::kFrameBytes;
  wire::check_frame(frame_, link_.expect);
  done_ = 0;
  crc_ = 0;
  switch (frame_.kind) {
    case wire::FrameKind::data:
      target_ = events_.landing(*this, frame_);
      state_ = Reading::payload;
      break;
    case wire::FrameKind::goodbye:
      if (frame_.length > kLongestText)
        corrupt(rank(), "a goodbye of " + std::to_string(frame_.length) + " bytes");
      text_.clear();
      state_ = Reading::text;
      break;
    default:
      events_.control(*this, frame_);
      return;
  }
  if (frame_.length == 0) finish_payload();
}

void Peer::finish_payload() {
  const bool text = state_ == Reading::text;
  state_ = Reading::header;
  target_ = {};
  if (link_.checksum && crc_ != frame_.payload_crc) {
    corrupt(rank(), "payload checksum is " + std::to_string(crc_) + ", expected " +
                        std::to_string(frame_.payload_crc) + " (group " + std::to_string(frame_.id.group) +
                        " slot " + std::to_string(frame_.id.slot) + " step " +
                        std::to_string(frame_.id.step) + " hop " + std::to_string(frame_.id.hop) + ")");
  }
  if (text)
    events_.goodbye(*this, frame_, text_);
  else
    events_.landed(*this, frame_);
}

// ---- writer ----

void Peer::enqueue(Outgoing& message) {
  queue_.push_back(&message);
  std::push_heap(queue_.begin(), queue_.end(), Outgoing::goes_after);
}

bool Peer::dequeue(Outgoing& message) {
  const auto at = std::find(queue_.begin(), queue_.end(), &message);
  if (at == queue_.end()) return false;
  queue_.erase(at);
  std::make_heap(queue_.begin(), queue_.end(), Outgoing::goes_after);
  return true;
}

void Peer::say(const wire::Frame& frame) {
  if (said_last_) return;
  const wire::FrameBytes bytes = wire::encode_frame(frame);
  control_.insert(control_.end(), bytes.begin(), bytes.end());
}

void Peer::say_last(const wire::Frame& frame, std::string_view text) {
  if (std::exchange(said_last_, true)) return;
  wire::Frame goodbye = frame;
  const std::span<const std::byte> bytes = std::as_bytes(std::span(text.substr(0, kLongestText)));
  goodbye.length = bytes.size();
  if (link_.checksum) goodbye.payload_crc = wire::crc32c(bytes);
  const wire::FrameBytes head = wire::encode_frame(goodbye);
  last_words_.assign(head.begin(), head.end());
  last_words_.insert(last_words_.end(), bytes.begin(), bytes.end());
}

void Peer::append(const wire::Frame& frame) {
  const wire::FrameBytes bytes = wire::encode_frame(frame);
  batch_.insert(batch_.end(), bytes.begin(), bytes.end());
}

// A long payload is checksummed piece by piece, so that it does not hold up the rest of this rank.
bool Peer::checksummed(Outgoing& message) {
  if (!link_.checksum) return true;
  const std::size_t rest = message.payload.size() - message.crc_done;
  const std::size_t piece = std::min(rest, kChecksumPiece);
  message.crc = wire::crc32c(message.payload.subspan(message.crc_done, piece), message.crc);
  message.crc_done += piece;
  return piece == rest;
}

// What goes next, or null: nothing, or all of it gives way, or its checksum is not done. Where the first one
// gives way, somebody may wait for another.
Outgoing* Peer::choose() {
  const auto may_go = [this](const Outgoing* m) { return events_.may_begin(*m); };
  held_ = false;
  if (queue_.empty()) return nullptr;
  Outgoing* next = queue_.front();
  if (!may_go(next)) {
    next = nullptr;
    for (Outgoing* m : queue_) {
      if ((next == nullptr || Outgoing::goes_after(next, m)) && may_go(m)) next = m;
    }
    held_ = next == nullptr;
  }
  if (next == nullptr || next->state == Outgoing::State::asking) return next;
  return checksummed(*next) ? next : nullptr;
}

// Decides what goes next. False if there is nothing, or the next message is not ready.
bool Peer::load() {
  if (said_all()) return false;  // a grant may still come while this rank waits: nothing follows a goodbye
  batch_.clear();
  batch_done_ = 0;
  batch_.swap(control_);
  while (batch_.size() < kBatch) {
    Outgoing* const next = choose();
    if (next == nullptr) break;
    Outgoing& message = *next;
    if (next == queue_.front()) {
      std::pop_heap(queue_.begin(), queue_.end(), Outgoing::goes_after);
      queue_.pop_back();
    } else {
      dequeue(message);
    }
    if (message.state == Outgoing::State::asking) {
      message.state = Outgoing::State::requested;
      message.frame.kind = wire::FrameKind::request;
      append(message.frame);
      continue;
    }
    events_.begun(message);
    message.frame.kind = wire::FrameKind::data;
    message.frame.payload_crc = message.crc;
    append(message.frame);
    link_.counters->messages_sent += 1;
    link_.counters->payload_bytes_sent += message.payload.size();
    if (message.payload.size() > kShort) {
      body_ = &message;
      body_done_ = 0;
      return true;
    }
    batch_.insert(batch_.end(), message.payload.begin(), message.payload.end());
    events_.sent(message);
  }
  if (queue_.empty() && !last_words_.empty()) {
    batch_.insert(batch_.end(), last_words_.begin(), last_words_.end());
    last_words_.clear();
  }
  return !batch_.empty();
}

void Peer::write() {
  if (write_armed_) return;  // the kernel is full
  for (std::size_t turn = 0; open_ && !broken_;) {
    if (batch_done_ == batch_.size() && body_ == nullptr && !load()) {
      if (!queue_.empty() && !held_ && !said_all())
        arm_write();  // to go on with the checksum after the others had their turn
      return;
    }
    if (turn >= kWriteTurn) return arm_write();
    std::array<iovec, 2> parts{};
    std::size_t count = 0;
    if (batch_done_ < batch_.size())
      parts[count++] = {batch_.data() + batch_done_, batch_.size() - batch_done_};
    if (body_ != nullptr) {
      // iovec is not const because readv fills it; sendmsg does not.
      auto* from = const_cast<std::byte*>(body_->payload.data()) +
                   body_done_;  // NOLINT(cppcoreguidelines-pro-type-const-cast)
      parts[count++] = {from, std::min(body_->payload.size() - body_done_, kWritePiece)};
    }
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = count;
    const ssize_t n = ::sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return arm_write();
    if (n < 0) {  // whether that matters is for the reader to find out: a goodbye may lie there unread
      broken_ = true;
      broken_by_ = errno == EPIPE ? 0 : errno;
      return;
    }
    turn += static_cast<std::size_t>(n);
    spoken_ = steady_now();
    written_ += static_cast<std::uint64_t>(n);
    link_.counters->wire_bytes_sent += static_cast<std::uint64_t>(n);
    ++*link_.progress;
    advance(static_cast<std::size_t>(n));
  }
}

void Peer::advance(std::size_t written) {
  const std::size_t of_batch = std::min(written, batch_.size() - batch_done_);
  batch_done_ += of_batch;
  body_done_ += written - of_batch;
  if (body_ != nullptr && body_done_ == body_->payload.size()) {
    Outgoing& message = *std::exchange(body_, nullptr);
    body_done_ = 0;
    events_.sent(message);
  }
}

bool Peer::idle() const {
  if (batch_done_ != batch_.size() || body_ != nullptr) return false;
  return said_all() || (control_.empty() && last_words_.empty() && queue_.empty());
}

// Closing a connection whose kernel still has something to send makes a reset of the next heartbeat that
// comes in, and the other end loses what was on its way. So the last byte must have arrived.
bool Peer::flushed(Time patience) {
  if (!open_ || broken_ || given_up_) return true;
  const bool said = idle();
  if (said && !std::exchange(shut_, true)) ::shutdown(fd_, SHUT_WR);
  int unacknowledged = 0;
  if (::ioctl(fd_, SIOCOUTQ, &unacknowledged) != 0) return true;
  if (said && unacknowledged == 0) return true;
  const std::uint64_t on_its_way = std::min(written_, static_cast<std::uint64_t>(unacknowledged));
  const std::uint64_t taken = written_ - on_its_way;
  if (taken_at_ == Time{}) taken_at_ = heard_;
  if (taken > taken_) taken_at_ = steady_now();
  taken_ = std::max(taken_, taken);
  return steady_now() - taken_at_ > patience;
}

void Peer::close() {
  if (!std::exchange(open_, false)) return;
  std::error_code ignored;
  socket_.close(ignored);
}

}  // namespace weft::tcp
