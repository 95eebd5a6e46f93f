#include "embedding/row_lists.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>

#include "kernels/rows.h"
#include "weft/error.h"

namespace weft {

void RowLists::unite() {
  const std::vector<std::span<const std::int32_t>> lists(of_rank.begin(), of_rank.end());
  all = union_of(lists);
}

std::int64_t RowLists::total() const {
  std::int64_t sum = 0;
  for (const auto& list : of_rank) sum += static_cast<std::int64_t>(list.size());
  return sum;
}

Task<void> gather_ids(Comm comm, RowLists* lists, std::int64_t num_rows) {
  const int size = comm.size();
  const auto at = [](int rank) { return static_cast<std::size_t>(rank); };
  const std::vector<std::int32_t>& mine = lists->of_rank[at(comm.rank())];
  const std::span<const std::byte> bytes = std::as_bytes(std::span(mine));
  const std::size_t limit = static_cast<std::size_t>(num_rows) * sizeof(std::int32_t);
  std::vector<Transfer> receives, sends;
  for (int gap = 1; gap < size; ++gap) {
    receives.push_back(comm.recv_any(comm.before(gap), 0, limit));
    sends.push_back(comm.send(comm.after(gap), 0, bytes));
  }
  for (int gap = 1; gap < size; ++gap) {
    Transfer& received = receives[at(gap - 1)];
    co_await received;
    const Buffer buffer = received.take();
    std::vector<std::int32_t>& list = lists->of_rank[at(comm.before(gap))];
    list.resize(buffer.size() / sizeof(std::int32_t));
    if (!list.empty()) std::memcpy(list.data(), buffer.data(), list.size() * sizeof(std::int32_t));
    const bool sorted = std::ranges::adjacent_find(list, std::greater_equal{}) == list.end();
    const bool inside = list.empty() || (list.front() >= 0 && list.back() < num_rows);
    if (buffer.size() % sizeof(std::int32_t) != 0 || !sorted || !inside) {
      const int peer = comm.world_rank(comm.before(gap));
      throw TransportError(TransportError::Kind::mismatch, peer,
                           "rank " + std::to_string(peer) + " sent ids that are no list of rows");
    }
  }
  for (Transfer& sent : sends) co_await sent;
  auto unite = [lists, &comm] {
    lists->unite();
    return comm.kernels().unite_index * static_cast<double>(lists->total());
  };
  co_await comm.compute(unite);
}

}  // namespace weft
