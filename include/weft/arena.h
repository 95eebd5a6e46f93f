// Memory for messages, transfer records and coroutine frames. Freed pieces are kept in lists by size class
// and handed out again, so that a running job asks the system for memory only while it warms up (`fresh()`
// counts those requests).
//
// Thread-safe: a frame may be made by the submitting thread and freed by the communication thread. One per
// engine.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

namespace weft {

namespace detail {

// An arena's memory: lives until its arena is gone and every piece was given back.
class Pieces {
 public:
  Pieces() = default;
  Pieces(const Pieces&) = delete;
  Pieces& operator=(const Pieces&) = delete;

  void* allocate(std::size_t bytes);
  void deallocate(void* piece, std::size_t bytes) noexcept;  // may be the end of this object
  void leave() noexcept { let_go(kArena); }                  // its arena's last call

  // Requests that reached the system.
  std::uint64_t fresh() const { return fresh_.load(std::memory_order_relaxed); }
  // Bytes handed out now. REQUIRES: the arena is there.
  std::uint64_t in_use() const { return held_.load(std::memory_order_relaxed) - kArena; }

 private:
  static constexpr std::uint64_t kArena = std::uint64_t{1} << 63;
  ~Pieces();
  void let_go(std::uint64_t share) noexcept;

  // Four classes per doubling from 64 bytes on: at most a quarter of a piece is wasted.
  static constexpr std::size_t kSmallest = 64;
  static constexpr int kClasses = 4 * 40;
  static int class_of(std::size_t bytes);
  static std::size_t class_bytes(int size_class);

  struct Free {
    Free* next;
  };
  struct alignas(64) List {
    std::atomic_flag lock = ATOMIC_FLAG_INIT;
    Free* head = nullptr;
  };
  std::array<List, kClasses> lists_;
  std::atomic<std::uint64_t> fresh_{0};
  std::atomic<std::uint64_t> held_{kArena};  // bytes of pieces, and the arena's own share
};

}  // namespace detail

class Arena {
 public:
  Arena() : pieces_(new detail::Pieces) {}
  ~Arena() { pieces_->leave(); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  void* allocate(std::size_t bytes) { return pieces_->allocate(bytes); }
  // REQUIRES: this arena is there; a Buffer gives back without it.
  void deallocate(void* piece, std::size_t bytes) noexcept { pieces_->deallocate(piece, bytes); }

  std::uint64_t fresh() const { return pieces_->fresh(); }    // requests that reached the system
  std::uint64_t in_use() const { return pieces_->in_use(); }  // bytes handed out now

 private:
  friend class Buffer;
  detail::Pieces* const pieces_;
};

// Bytes from an arena, returned to it on destruction. 64-byte aligned. May outlive its arena, as what a
// receive has kept outlives the engine.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Arena& arena, std::size_t bytes)
      : origin_(arena.pieces_),
        data_(bytes ? static_cast<std::byte*>(arena.allocate(bytes)) : nullptr),
        size_(bytes) {}
  Buffer(Buffer&& other) noexcept
      : origin_(other.origin_),
        data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(origin_, other.origin_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~Buffer() {
    if (data_ != nullptr) origin_->deallocate(data_, size_);
  }

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  std::span<std::byte> span() const { return {data_, size_}; }
  template <class T>
  std::span<T> as() const {
    return {reinterpret_cast<T*>(data_), size_ / sizeof(T)};
  }

 private:
  detail::Pieces* origin_ = nullptr;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace weft
