#include "embedding/row_fetch.h"

#include "kernels/rows.h"

namespace weft {

namespace {

std::size_t at(int rank) { return static_cast<std::size_t>(rank); }

template <class T>
double copy_seconds(const Comm& comm, const std::vector<T>& copied) {
  return comm.kernels().copy_byte * static_cast<double>(copied.size() * sizeof(T));
}

}  // namespace

template <class T>
double RowFetch<T>::pack(const Comm& comm, const RowLists& lists, const From& from) {
  const TableLayout& layout = *from.layout;
  const auto width = static_cast<std::size_t>(layout.columns(comm.rank()).count);
  flow_.resize(comm.size());
  rows_.resize(lists.of_rank.size());
  std::vector<std::vector<std::int32_t>> sent(lists.of_rank.size());
  for (int r = 0; r < comm.size(); ++r) {
    sent[at(r)] = layout.served(lists.of_rank[at(r)], comm.rank(), r);
    for (std::int32_t& row : sent[at(r)]) row = layout.place(row);
    rows_[at(r)] = layout.served(lists.of_rank[at(comm.rank())], r, comm.rank());
    flow_.send_counts[at(r)] = static_cast<std::int64_t>(sent[at(r)].size() * width);
    flow_.recv_counts[at(r)] = static_cast<std::int64_t>(rows_[at(r)].size()) * layout.columns(r).count;
  }
  flow_.make_room();
  std::span<T> to(flow_.send);
  for (const auto& rows : sent) {
    gather_rows(from.values, {width, 0, width}, rows, to.first(rows.size() * width));
    to = to.subspan(rows.size() * width);
  }
  return copy_seconds(comm, flow_.send);
}

template <class T>
double RowFetch<T>::place(const Comm& comm, const From& from, const Into& into) {
  const auto width = static_cast<std::size_t>(from.columns);
  into.rows->resize(into.list.size() * width);
  std::span<const T> arrived(flow_.recv);
  for (int r = 0; r < comm.size(); ++r) {
    const auto count = static_cast<std::size_t>(flow_.recv_counts[at(r)]);
    const BlockRange c = from.layout->columns(r);
    const Columns columns{width, static_cast<std::size_t>(c.first), static_cast<std::size_t>(c.count)};
    const auto places = places_of(std::span<const std::int32_t>(rows_[at(r)]), into.list);
    place_rows(arrived.first(count), columns, places, std::span<T>(*into.rows));
    arrived = arrived.subspan(count);
  }
  return copy_seconds(comm, flow_.recv);
}

// Where every rank holds all rows.
template <class T>
double RowFetch<T>::copy(const Comm& comm, std::span<const std::int32_t> rows, const From& from,
                         const Into& into) {
  const auto width = static_cast<std::size_t>(from.columns);
  const Columns all{width, 0, width};
  into.rows->resize(into.list.size() * width);
  std::vector<std::int32_t> places(rows.begin(), rows.end());
  for (std::int32_t& row : places) row = from.layout->place(row);
  if (rows.size() == into.list.size()) {
    gather_rows(from.values, all, places, std::span<T>(*into.rows));
  } else {
    flow_.recv.resize(rows.size() * width);
    gather_rows(from.values, all, places, std::span<T>(flow_.recv));
    place_rows(std::span<const T>(flow_.recv), all, places_of(rows, into.list), std::span<T>(*into.rows));
  }
  return comm.kernels().copy_byte * static_cast<double>(rows.size() * width * sizeof(T));
}

template <class T>
Task<void> RowFetch<T>::run(Comm comm, const RowLists* lists, From from, Into into) {
  if (from.layout->replicated()) {
    auto copies = [&] { return copy(comm, lists->of_rank[at(comm.rank())], from, into); };
    co_await comm.compute(copies);
    co_return;
  }
  auto packs = [&] { return pack(comm, *lists, from); };
  co_await comm.compute(packs);
  co_await exchange(comm, &flow_);
  auto places = [&] { return place(comm, from, into); };
  co_await comm.compute(places);
}

template <class T>
void RowPull<T>::plan(const Comm& comm, const TableLayout& layout, const RowLists& lists) {
  RowLists pushed = lists;
  pushed.unite();
  rows_.resize(at(comm.size()));
  for (int r = 0; r < comm.size(); ++r) {
    rows_[at(r)] = layout.of_owner(pushed.all, r);
    for (std::int32_t& row : rows_[at(r)]) row = layout.place(row);
  }
}

template <class T>
Task<void> RowPull<T>::run(Comm comm, std::span<T> table, std::int64_t columns) {
  const auto width = static_cast<std::size_t>(columns);
  const Columns all{width, 0, width};
  auto pack = [&] {
    flow_.resize(comm.size());
    flow_.same = true;
    for (int r = 0; r < comm.size(); ++r)
      flow_.recv_counts[at(r)] = static_cast<std::int64_t>(rows_[at(r)].size()) * columns;
    const std::vector<std::int32_t>& own = rows_[at(comm.rank())];
    flow_.send.resize(own.size() * width);
    flow_.make_room();
    gather_rows(std::span<const T>(table), all, own, std::span<T>(flow_.send));
    return copy_seconds(comm, flow_.send);
  };
  co_await comm.compute(pack);
  co_await exchange(comm, &flow_);
  auto place = [&] {
    std::span<const T> from(flow_.recv);
    for (int r = 0; r < comm.size(); ++r) {
      const auto count = static_cast<std::size_t>(flow_.recv_counts[at(r)]);
      if (count > 0) place_rows(from.first(count), all, rows_[at(r)], table);
      from = from.subspan(count);
    }
    return copy_seconds(comm, flow_.recv);
  };
  co_await comm.compute(place);
}

template class RowFetch<float>;
template class RowFetch<double>;
template class RowPull<float>;
template class RowPull<double>;

}  // namespace weft
