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

class Arena {
 public:
  Arena() = default;
  ~Arena();  // REQUIRES: everything taken was given back
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  void* allocate(std::size_t bytes);
  void deallocate(void* piece, std::size_t bytes) noexcept;

  std::uint64_t fresh() const {
    return fresh_.load(std::memory_order_relaxed);
  }  // requests that reached the system
  std::uint64_t in_use() const { return in_use_.load(std::memory_order_relaxed); }  // bytes handed out now

 private:
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
  std::atomic<std::uint64_t> in_use_{0};
};

// Bytes from an arena, returned to it on destruction. 64-byte aligned.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Arena& arena, std::size_t bytes)
      : arena_(&arena),
        data_(bytes ? static_cast<std::byte*>(arena.allocate(bytes)) : nullptr),
        size_(bytes) {}
  Buffer(Buffer&& other) noexcept
      : arena_(other.arena_),
        data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(arena_, other.arena_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~Buffer() {
    if (data_ != nullptr) arena_->deallocate(data_, size_);
  }

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  std::span<std::byte> span() const { return {data_, size_}; }
  template <class T>
  std::span<T> as() const {
    return {reinterpret_cast<T*>(data_), size_ / sizeof(T)};
  }

 private:
  Arena* arena_ = nullptr;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace weft
