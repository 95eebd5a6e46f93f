#include "embedding/row_sum.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "weft/error.h"

namespace weft {

namespace {

std::size_t at(int rank) { return static_cast<std::size_t>(rank); }

// Hops of what follows an all-to-all or an all-gather in the same operation.
Comm behind(const Comm& comm, int collectives) {
  return comm.hops_from(static_cast<std::uint32_t>(collectives * comm.size()));
}

Columns columns_of(const TableLayout& layout, int rank, std::int64_t columns) {
  const BlockRange c = layout.columns(rank);
  return {static_cast<std::size_t>(columns), static_cast<std::size_t>(c.first),
          static_cast<std::size_t>(c.count)};
}

template <class T>
double copy_seconds(const Comm& comm, const std::vector<T>& copied) {
  return comm.kernels().copy_byte * static_cast<double>(copied.size() * sizeof(T));
}

// What is in all of the lists; takes it out of them.
std::vector<std::int32_t> take_shared(std::vector<std::vector<std::int32_t>>& lists) {
  std::vector<std::int32_t> shared = lists[0];
  for (const auto& list : lists) shared = ids_at(shared, split_ids(shared, list).in);
  if (shared.empty()) return shared;
  for (auto& list : lists) list = ids_at(list, split_ids(list, shared).out);
  return shared;
}

}  // namespace

template <class T>
double RowSum<T>::pack(const Comm& comm, const RowSumRules& rules, const Gradient& gradient) {
  bad_ = -1;
  shared_.clear();
  if (rules.gather == TableGather::tokens) return pack_tokens(comm, gradient, rules.columns);
  return pack_rows(comm, rules, gradient);
}

// Step 1
template <class T>
double RowSum<T>::pack_rows(const Comm& comm, const RowSumRules& rules, const Gradient& gradient) {
  const TableLayout& layout = *rules.layout;
  const int size = comm.size();
  const auto ids = static_cast<double>(2 * lists.total());
  std::vector<std::int32_t> shared;
  if (rules.gather == TableGather::shared && size > 2) shared = take_shared(lists.of_rank);
  const std::vector<std::int32_t> mine = lists.of_rank[at(comm.rank())];
  for (auto& list : lists.of_rank) list = layout.of_owner(list, comm.rank());
  lists.unite();
  if (!shared.empty()) {
    const std::vector<std::span<const std::int32_t>> both{lists.all, shared};
    lists.all = union_of(both);
    shared_ = places_of(std::span<const std::int32_t>(shared), lists.all);
    const Columns all = columns_of(layout, comm.rank(), rules.columns);
    reduced_.resize(shared.size() * all.width);
    gather_rows(gradient.values, all, places_of(std::span<const std::int32_t>(shared), gradient.list),
                std::span<T>(reduced_));
  }
  const std::int64_t width = layout.columns(comm.rank()).count;
  places_.resize(lists.of_rank.size());
  flow_.resize(size);
  flow_.same = layout.cut() == TableCut::none;  // all rows and columns to everybody
  std::vector<std::vector<std::int32_t>> sent(places_.size());
  for (int r = 0; r < size; ++r) {
    const std::vector<std::int32_t>& list = lists.of_rank[at(r)];
    places_[at(r)] = places_of(std::span<const std::int32_t>(list), lists.all);
    flow_.recv_counts[at(r)] = static_cast<std::int64_t>(list.size()) * width;
    if (flow_.same && r > 0) continue;
    const std::vector<std::int32_t> rows = layout.of_owner(mine, r);
    sent[at(r)] = places_of(std::span<const std::int32_t>(rows), gradient.list);
    flow_.send_counts[at(r)] = static_cast<std::int64_t>(rows.size()) * layout.columns(r).count;
  }
  if (flow_.same) flow_.send.resize(static_cast<std::size_t>(flow_.send_counts.front()));
  flow_.make_room();
  std::span<T> to(flow_.send);
  for (int r = 0; r < size; ++r) {
    const auto count = static_cast<std::size_t>(flow_.send_counts[at(r)]);
    gather_rows(gradient.values, columns_of(layout, r, rules.columns), sent[at(r)], to.first(count));
    to = to.subspan(count);
  }
  at_ = lists.all;
  for (std::int32_t& row : at_) row = layout.place(row);
  return copy_seconds(comm, flow_.send) + comm.kernels().unite_index * ids;
}

template <class T>
double RowSum<T>::pack_tokens(const Comm& comm, const Gradient& gradient, std::int64_t columns) {
  const std::vector<std::int32_t>& counted = lists.of_rank[at(comm.rank())];  // without padding
  const auto width = static_cast<std::size_t>(columns);
  ids_.resize(comm.size());
  flow_.resize(comm.size());
  ids_.same = flow_.same = true;
  std::vector<std::int64_t>& ids = ids_.send;
  std::vector<T>& rows = flow_.send;
  ids.clear();
  rows.clear();
  std::vector<bool> sent(gradient.list.size(), false);
  for (const std::int32_t place : gradient.tokens) {
    const auto p = static_cast<std::size_t>(place);
    const std::int32_t id = gradient.list[p];
    if (!std::ranges::binary_search(counted, id)) continue;
    ids.push_back(id);
    const std::span<const T> row = gradient.values.subspan(p * width, width);
    if (sent[p])
      rows.resize(rows.size() + width, T{0});
    else
      rows.insert(rows.end(), row.begin(), row.end());
    sent[p] = true;
  }
  num_tokens_.assign(at(comm.size()), 0);
  num_tokens_[at(comm.rank())] = static_cast<std::int64_t>(ids.size());
  return copy_seconds(comm, ids_.send) + copy_seconds(comm, flow_.send);
}

template <class T>
Task<void> RowSum<T>::gather_tokens(Comm comm, RowSum* sum, const RowSumRules* rules) {
  const Dense counts(std::span<std::int64_t>(sum->num_tokens_));
  co_await all_gather(comm, counts);
  for (int r = 0; r < comm.size(); ++r) {
    const std::int64_t tokens = sum->num_tokens_[at(r)];
    if (tokens < 0 || tokens > std::numeric_limits<std::int32_t>::max()) {
      const int peer = comm.world_rank(r);
      throw TransportError(
          TransportError::Kind::mismatch, peer,
          "rank " + std::to_string(peer) + " says that it has " + std::to_string(tokens) + " tokens");
    }
    sum->ids_.recv_counts[at(r)] = tokens;
    sum->flow_.recv_counts[at(r)] = tokens * rules->columns;
  }
  sum->ids_.make_room();
  sum->flow_.make_room();
  const Comm second = behind(comm, 1), third = behind(comm, 2);
  co_await exchange(second, &sum->ids_);
  auto take = [sum, rules, &comm] {
    sum->take_ids(comm, *rules);
    return comm.kernels().unite_index * static_cast<double>(sum->ids_.recv.size());
  };
  co_await comm.compute(take);
  co_await exchange(third, &sum->flow_);
}

template <class T>
void RowSum<T>::take_ids(const Comm& comm, const RowSumRules& rules) {
  std::span<const std::int64_t> from(ids_.recv);
  for (int r = 0; r < comm.size(); ++r) {
    const auto ids = from.first(static_cast<std::size_t>(num_tokens_[at(r)]));
    from = from.subspan(ids.size());
    if (std::ranges::all_of(ids, [&](std::int64_t id) { return id >= 0 && id < rules.rows; })) continue;
    const int peer = comm.world_rank(r);
    throw TransportError(TransportError::Kind::mismatch, peer,
                         "rank " + std::to_string(peer) + " sent ids that are no rows");
  }
  lists.all = unique_ids(ids_.recv);
  at_ = lists.all;
  for (std::int32_t& row : at_) row = rules.layout->place(row);
  places_.resize(at(comm.size()));
  from = ids_.recv;
  for (int r = 0; r < comm.size(); ++r) {
    const auto ids = from.first(static_cast<std::size_t>(num_tokens_[at(r)]));
    places_[at(r)] = places_of(ids, lists.all);
    from = from.subspan(ids.size());
  }
}

// Step 2
template <class T>
Task<void> RowSum<T>::run(Comm comm, const RowSumRules* rules) {
  if (rules->gather == TableGather::tokens)
    co_await gather_tokens(comm, this, rules);
  else
    co_await exchange(comm, &flow_);
  if (!shared_.empty()) {
    const Dense shared{std::span<T>(reduced_)};
    const Comm second = behind(comm, 1);
    co_await all_reduce(second, shared);
  }
  auto work = [this, rules, &comm] { return add(comm, *rules); };
  co_await comm.compute(work);
}

template <class T>
double RowSum<T>::add(const Comm& comm, const RowSumRules& rules) {
  const Columns own = columns_of(*rules.layout, comm.rank(), rules.columns);
  const std::size_t width = own.count;
  sum_.assign(lists.all.size() * width, T{0});
  std::span<const T> from(flow_.recv);
  for (const std::vector<std::int32_t>& rows : places_) {
    const std::size_t count = rows.size() * width;
    add_rows(from.first(count), width, rows, std::span<T>(sum_));
    from = from.subspan(count);
  }
  if (!shared_.empty())
    place_rows(std::span<const T>(reduced_), {width, 0, width}, shared_, std::span<T>(sum_));
  const T divisor = static_cast<T>(rules.divisor);
  for (std::size_t i = 0; i < sum_.size(); ++i) {
    sum_[i] /= divisor;
    if (bad_ < 0 && !std::isfinite(sum_[i])) bad_ = lists.all[i / width];
  }
  return comm.kernels().fold(dtype_of<T>()) *
         static_cast<double>((flow_.recv.size() + sum_.size()) * sizeof(T));
}

template class RowSum<float>;
template class RowSum<double>;

}  // namespace weft
