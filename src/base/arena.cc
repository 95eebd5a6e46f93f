#include "weft/arena.h"

#include <bit>
#include <new>
#include <thread>

namespace weft::detail {

namespace {

constexpr std::align_val_t kAlignment{64};

class SpinLock {
 public:
  explicit SpinLock(std::atomic_flag& flag) : flag_(flag) {
    while (flag_.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
  }
  ~SpinLock() { flag_.clear(std::memory_order_release); }
  SpinLock(const SpinLock&) = delete;
  SpinLock& operator=(const SpinLock&) = delete;

 private:
  std::atomic_flag& flag_;
};

}  // namespace

int Pieces::class_of(std::size_t bytes) {
  if (bytes <= kSmallest) return 0;
  // With top = floor(log2(bytes - 1)), the class is the quarter of [2^top, 2^(top+1)) that bytes - 1 falls
  // in, plus one.
  const std::size_t last = bytes - 1;
  const int top = static_cast<int>(std::bit_width(last)) - 1;
  const int quarter = static_cast<int>((last >> (top - 2)) & 3);
  return (top - 6) * 4 + quarter + 1;
}

std::size_t Pieces::class_bytes(int size_class) {
  if (size_class == 0) return kSmallest;
  const int top = (size_class - 1) / 4 + 6;
  const std::size_t quarter = static_cast<std::size_t>((size_class - 1) % 4 + 1);
  return (std::size_t{1} << top) + (quarter << (top - 2));
}

void* Pieces::allocate(std::size_t bytes) {
  const int size_class = class_of(bytes);
  if (size_class >= kClasses) throw std::bad_alloc();
  held_.fetch_add(bytes, std::memory_order_relaxed);
  List& list = lists_[static_cast<std::size_t>(size_class)];
  {
    const SpinLock hold(list.lock);
    if (list.head != nullptr) return std::exchange(list.head, list.head->next);
  }
  fresh_.fetch_add(1, std::memory_order_relaxed);
  return ::operator new(class_bytes(size_class), kAlignment);
}

void Pieces::deallocate(void* piece, std::size_t bytes) noexcept {
  {
    List& list = lists_[static_cast<std::size_t>(class_of(bytes))];
    const SpinLock hold(list.lock);
    list.head = new (piece) Free{list.head};
  }
  let_go(bytes);
}

// Whoever lets go last ends it.
void Pieces::let_go(std::uint64_t share) noexcept {
  if (held_.fetch_sub(share, std::memory_order_acq_rel) == share) delete this;
}

Pieces::~Pieces() {
  for (List& list : lists_) {
    while (list.head != nullptr) {
      Free* next = list.head->next;
      ::operator delete(list.head, kAlignment);
      list.head = next;
    }
  }
}

}  // namespace weft::detail
