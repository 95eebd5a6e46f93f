#include "pipeline/message_memory.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "base/mutex.h"

namespace weft {

struct MessageMemory::Store {
  struct Free {
    std::unique_ptr<std::byte[]> memory;
    std::uint64_t step = 0;  // in which it was let go
  };
  mutable Mutex mutex;
  std::map<std::size_t, std::vector<Free>> free WEFT_GUARDED_BY(mutex);  // by size, the longest unused first
  std::uint64_t step WEFT_GUARDED_BY(mutex) = 0;
  std::size_t live WEFT_GUARDED_BY(mutex) = 0, peak WEFT_GUARDED_BY(mutex) = 0;
  std::uint64_t fresh WEFT_GUARDED_BY(mutex) = 0;
};

MessageMemory::MessageMemory() : store_(std::make_shared<Store>()) {}

MessageMemory::Piece MessageMemory::take(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  std::unique_ptr<std::byte[]> memory;
  {
    const Lock lock(store_->mutex);
    std::vector<Store::Free>& free = store_->free[bytes];
    if (!free.empty()) {
      memory = std::move(free.back().memory);
      free.pop_back();
    } else {
      ++store_->fresh;
    }
    store_->live += bytes;
    store_->peak = std::max(store_->peak, store_->live);
  }
  if (memory == nullptr) memory = std::make_unique_for_overwrite<std::byte[]>(bytes);
  return {memory.release(), [store = store_, bytes](std::byte* piece) {
            const Lock lock(store->mutex);
            store->live -= bytes;
            store->free[bytes].push_back({std::unique_ptr<std::byte[]>(piece), store->step});
          }};
}

void MessageMemory::begin_step() {
  const Lock lock(store_->mutex);
  ++store_->step;
  store_->peak = store_->live;
  for (auto& [bytes, free] : store_->free)
    std::erase_if(free, [step = store_->step](const Store::Free& piece) { return piece.step + 2 < step; });
}

std::size_t MessageMemory::live_bytes() const {
  const Lock lock(store_->mutex);
  return store_->live;
}

std::size_t MessageMemory::peak_bytes() const {
  const Lock lock(store_->mutex);
  return store_->peak;
}

std::uint64_t MessageMemory::fresh() const {
  const Lock lock(store_->mutex);
  return store_->fresh;
}

}  // namespace weft
