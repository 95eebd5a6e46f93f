// Lists of a table's rows and the values that travel for them. A list is sorted and has no id twice.
#pragma once

#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "weft/collective.h"
#include "weft/comm.h"
#include "weft/task.h"

namespace weft {

// Rows that travel in one exchange: who sends or gets which.
struct RowLists {
  std::vector<std::vector<std::int32_t>> of_rank;
  std::vector<std::int32_t> all;  // of some rank

  void unite();
  std::int64_t total() const;
};

// Ids of all ranks, each rank's list at once: a receiver has to know nothing of it.
Task<void> gather_ids(Comm comm, RowLists* lists, std::int64_t num_rows);

// Values that travel between all ranks: how many go where, and the memory of both ends.
template <class T>
struct Flow {
  std::vector<T> send, recv;
  std::vector<std::int64_t> send_counts, recv_counts;
  bool same = false;  // every rank gets all of `send`, which is there once: without send_counts

  void resize(int size) {
    same = false;
    send_counts.assign(static_cast<std::size_t>(size), 0);
    recv_counts.assign(static_cast<std::size_t>(size), 0);
  }
  static std::int64_t sum(const std::vector<std::int64_t>& counts) {
    return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  }
  void make_room() {
    if (!same) send.resize(static_cast<std::size_t>(sum(send_counts)));
    recv.resize(static_cast<std::size_t>(sum(recv_counts)));
  }
};

template <class T>
Task<void> exchange(Comm comm, Flow<T>* flow) {
  const std::span<const std::int64_t> counts =
      flow->same ? std::span<const std::int64_t>() : std::span<const std::int64_t>(flow->send_counts);
  const Parts send{Dense(std::span<T>(flow->send)), counts};
  const Parts recv{Dense(std::span<T>(flow->recv)), flow->recv_counts};
  co_await all_to_all_v(comm, send, recv);
}

}  // namespace weft
