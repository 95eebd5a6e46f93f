// Rows that change hands between two steps: of tensors whose first dimension is dealt to ranks (experts),
// what a rank will hold and does not have comes from one that has it, through the transport. The rules are
// those of every change of layout (rows.h), and registry.load() reads from here as it does from a
// checkpoint.
//
//   Relayout move(rows, options);                        // all ranks, with rows in the same order
//   engine.submit(world, ..., [&](Comm comm) { return Relayout::exchange(comm, &move); }).wait();
//   ... rows of the new layout take the place of the old ones ...
//   registry.load(move, {.owners = ..., .only = ...});
//
//   Step 1  Each rank knows the rows of all others: its own, with the part and the peers that the layout
//           gives that rank. So everybody knows who reads what from whom, and nothing is sent to find out
//   Step 2  Of several ranks that have the same, a reader takes itself, else the nearest: the least rank xor
//           its own, which is on its node where nodes are alike
//   Step 3  One all-to-all of those ranges
//
// Bytes that come to a rank: of rows that move, all of the indices that it will hold and did not; of sums,
// its part of every summand that is another rank's. What divides a sum is the same in both layouts: nothing is
// multiplied.
//
// Until it is loaded nothing has changed: a rank that dies on the way leaves the others as they were.
//
// Thread: one at a time; exchange() is of the engine's.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "state/registry.h"
#include "weft/comm.h"
#include "weft/task.h"

namespace weft {

// What a rank holds of the first dimension, and with whom.
struct HeldPart {
  std::int64_t first = 0, count = 0;
  Peers peers;
};

struct RelayoutOptions {
  int rank = 0, size = 1;                          // of the world
  std::function<HeldPart(int rank)> from, to;      // of every rank: the two layouts
  std::function<bool(const StateRow& row)> zeros;  // of a sum: nobody has any; null: somebody may
};

class Relayout final : public StateSource {
 public:
  // `rows`: of this rank, of the rules sum and moves; their values are copied. Throws UsageError for others.
  Relayout(const std::vector<LiveRow>& rows, RelayoutOptions options);

  // REQUIRES: it lives until the task is done.
  static Task<void> exchange(Comm comm, Relayout* me);

  std::span<const Saved> rows() const override { return rows_; }
  // REQUIRES: exchanged.
  void read(std::size_t row, std::size_t first, std::span<std::byte> into) const override;
  std::string where() const override { return "parts that change hands"; }

  // Payload for each rank and from each, as planned; and what has left this one.
  std::span<const std::int64_t> to() const { return to_; }
  std::span<const std::int64_t> from() const { return from_; }
  std::uint64_t sent_bytes() const { return sent_bytes_; }
  std::int64_t most_bytes() const { return most_bytes_; }  // that come to a rank: of that which gets most

 private:
  struct Mine {
    StateRow row;
    std::vector<std::byte> bytes;  // empty: zeros
    bool zeros = false;            // on all ranks
    std::size_t index_bytes = 0;   // of an index of the first dimension
  };
  struct Read {  // of a rank's part, in indices
    int source = 0;
    std::int64_t first = 0, count = 0;
  };
  std::vector<int> holders_for(int reader) const;
  std::vector<Read> reads_of(LayoutRule rule, int reader) const;
  void plan_rows();
  void plan_sends();
  void plan_receives();

  RelayoutOptions options_;
  std::int64_t length_ = 0;  // of the first dimension
  std::vector<Mine> mine_;
  std::vector<Saved> rows_;   // of those who have what this rank will hold, the nearest first
  std::vector<int> sources_;  // of them: rows_ has as many rows of each as there are of this one
  std::vector<std::int64_t> to_, from_;
  std::vector<std::byte> sent_, received_;
  std::map<std::pair<std::size_t, std::size_t>, std::size_t> places_;  // of (row, first byte) in received_
  std::uint64_t sent_bytes_ = 0;
  std::int64_t most_bytes_ = 0;
};

}  // namespace weft
