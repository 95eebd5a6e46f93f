#include "embedding/formula.h"

#include <algorithm>

#include "collectives/registry.h"
#include "kernels/rows.h"

namespace weft {

namespace {

class Counter {
 public:
  Counter(const TableBatch& batch, const LinkCost& link)
      : batch_(batch),
        link_(link),
        size_(static_cast<int>(batch.lists.size())),
        row_bytes_(batch.columns * batch.value_bytes),
        updated_(batch.lists) {
    for (auto& list : updated_) std::erase(list, static_cast<std::int32_t>(batch.padding));
    out_.ports.resize(batch.lists.size());
  }

  TableTraffic of_dense(std::string_view all_reduce) {
    reduce(batch_.rows * batch_.columns, all_reduce);
    return std::move(out_);
  }
  TableTraffic of_hybrid(const TableLayout& layout, TableGather gather) {
    if (gather == TableGather::tokens) {
      for (int k = 0; k < size_; ++k)
        to_all(k, TablePhase::gradients, 8 + (8 + row_bytes_) * batch_.tokens[at(k)]);
      return std::move(out_);
    }
    for (int k = 0; k < size_; ++k) to_all(k, TablePhase::ids, 4 * length(batch_.lists[at(k)]));
    if (layout.cut() == TableCut::none) {
      gathered(gather);
    } else if (layout.dealt()) {
      dealt(layout);
    } else {
      cut_by_columns(layout);
    }
    return std::move(out_);
  }

 private:
  static std::size_t at(int rank) { return static_cast<std::size_t>(rank); }
  static std::int64_t length(const std::vector<std::int32_t>& list) {
    return static_cast<std::int64_t>(list.size());
  }

  void move(int from, int to, TablePhase phase, std::int64_t bytes) {
    if (from == to) return;
    out_.ports[at(from)].sent[static_cast<std::size_t>(phase)] += bytes;
    out_.ports[at(to)].received[static_cast<std::size_t>(phase)] += bytes;
  }
  void to_all(int from, TablePhase phase, std::int64_t bytes) {
    for (int r = 0; r < size_; ++r) move(from, r, phase, bytes);
  }

  void reduce(std::int64_t elements, std::string_view algorithm) {
    if (elements == 0) return;
    const Shape shape{.size = size_,
                      .count = elements,
                      .element_bytes = static_cast<std::size_t>(batch_.value_bytes),
                      .node_size = link_.node_size(size_)};
    const Algorithm& row = pick(Family::all_reduce, algorithm, shape, link_);
    const auto bytes = static_cast<std::int64_t>(row.bytes(shape));
    for (TableTraffic::Port& port : out_.ports) {
      port.sent[static_cast<std::size_t>(TablePhase::gradients)] += bytes;
      port.received[static_cast<std::size_t>(TablePhase::gradients)] += bytes;
    }
  }

  void gathered(TableGather gather) {
    std::vector<std::int32_t> shared;
    if (gather == TableGather::shared && size_ > 2) {
      shared = updated_[0];
      for (const auto& list : updated_) shared = ids_at(shared, split_ids(shared, list).in);
    }
    for (int k = 0; k < size_; ++k)
      to_all(k, TablePhase::gradients, (length(updated_[at(k)]) - length(shared)) * row_bytes_);
    const std::int64_t elements = length(shared) * batch_.columns;
    reduce(elements, "auto");
    // Whatever the algorithm: blocks of equal length, and no rank outside of a power of two.
    const bool even = elements % size_ == 0 && (size_ & (size_ - 1)) == 0;
    out_.exact = shared.empty() || even;
  }

  void dealt(const TableLayout& layout) {
    const std::vector<std::span<const std::int32_t>> lists(updated_.begin(), updated_.end());
    const std::vector<std::int32_t> all = union_of(lists);
    const auto by_owner = [&](const std::vector<std::int32_t>& list) {
      std::vector<std::int64_t> bytes(batch_.lists.size());
      for (const std::int32_t row : list) bytes[at(layout.owner(row))] += row_bytes_;
      return bytes;
    };
    for (int k = 0; k < size_; ++k) {
      const std::vector<std::int64_t> pushed = by_owner(updated_[at(k)]),
                                      pulled = by_owner(batch_.lists[at(k)]);
      for (int owner = 0; owner < size_; ++owner) {
        move(k, owner, TablePhase::gradients, pushed[at(owner)]);
        if (!layout.replicated()) move(owner, k, TablePhase::rows, pulled[at(owner)]);
      }
    }
    if (!layout.replicated()) return;
    const std::vector<std::int64_t> updated = by_owner(all);
    for (int owner = 0; owner < size_; ++owner) to_all(owner, TablePhase::values, updated[at(owner)]);
  }

  void cut_by_columns(const TableLayout& layout) {
    for (int k = 0; k < size_; ++k) {
      for (int r = 0; r < size_; ++r) {
        const std::int64_t slice = layout.columns(r).count * batch_.value_bytes;
        move(r, k, TablePhase::rows, length(batch_.lists[at(k)]) * slice);
        move(k, r, TablePhase::gradients, length(updated_[at(k)]) * slice);
      }
    }
  }

  const TableBatch& batch_;
  LinkCost link_;
  int size_;
  std::int64_t row_bytes_;
  std::vector<std::vector<std::int32_t>> updated_;  // lists without padding
  TableTraffic out_;
};

}  // namespace

std::int64_t TableTraffic::busiest() const {
  std::int64_t most = 0;
  for (const Port& port : ports) most = std::max({most, port.all_sent(), port.all_received()});
  return most;
}

TableTraffic table_traffic(const TableLayout& layout, TableGather gather, const TableBatch& batch,
                           const LinkCost& link) {
  return Counter(batch, link).of_hybrid(layout, gather);
}

TableTraffic table_traffic(const TableWay& way, const TableBatch& batch, const LinkCost& link) {
  if (way.kind == TableWay::Kind::dense) return Counter(batch, link).of_dense(way.all_reduce);
  const auto size = static_cast<int>(batch.lists.size());
  const int owners = (size + way.ranks_per_owner - 1) / way.ranks_per_owner;
  return table_traffic(TableLayout(way.cut, batch.rows, batch.columns, size, owners), way.gather, batch,
                       link);
}

}  // namespace weft
