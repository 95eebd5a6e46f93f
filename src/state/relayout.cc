#include "state/relayout.h"

#include <algorithm>
#include <cstring>

#include "weft/collective.h"
#include "weft/error.h"

namespace weft {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw UsageError("parts that change hands: " + what); }

StateRow with_part(StateRow row, const HeldPart& part) {
  row.shard = Shard::range(row.shard.shape, 0, part.first, part.count);
  row.peers = part.peers;
  return row;
}

bool overlap(const HeldPart& a, const HeldPart& b) {
  return a.first < b.first + b.count && b.first < a.first + a.count;
}

// Parts of a tensor of one value an index: for who reads what, which is the same for every tensor.
class Indices final : public StateSource {
 public:
  std::span<const Saved> rows() const override { return rows_; }
  void read(std::size_t, std::size_t, std::span<std::byte>) const override {}
  std::string where() const override { return "parts that change hands"; }
  void add(StateRow row) { rows_.push_back({std::move(row), false}); }

 private:
  std::vector<Saved> rows_;
};

}  // namespace

Relayout::Relayout(const std::vector<LiveRow>& rows, RelayoutOptions options) : options_(std::move(options)) {
  std::vector<std::byte> scratch;
  for (const LiveRow& live : rows) {
    const StateRow& row = live.row;
    if ((row.rule != LayoutRule::sum && row.rule != LayoutRule::moves) || row.shard.shape.empty())
      refuse(describe(row.key) + " has no parts");
    if (length_ == 0) length_ = row.shard.shape.front();
    if (row.shard.shape.front() != length_)
      refuse(describe(row.key) + " has " + std::to_string(row.shard.shape.front()) +
             " rows, and others have " + std::to_string(length_));
    if (!(row == with_part(row, options_.from(options_.rank))))
      refuse(describe(row.key) + " is " + text_of(row.shard) + ", not what its layout says");
    const bool zeros = row.rule == LayoutRule::sum && options_.zeros && options_.zeros(row);
    Mine mine{.row = row, .bytes = {}, .zeros = zeros};
    mine.index_bytes =
        static_cast<std::size_t>(row.shard.tensor_elements() / std::max<std::int64_t>(length_, 1)) *
        size_of(row.dtype);
    if (!zeros) {
      const std::span<const std::byte> values = checked_value(live, scratch);
      mine.bytes.assign(values.begin(), values.end());
    }
    mine_.push_back(std::move(mine));
  }
  to_.assign(static_cast<std::size_t>(options_.size), 0);
  from_ = to_;
  plan_rows();
  plan_sends();
  plan_receives();
}

// Ranks that have something of what the reader will hold, the nearest first.
std::vector<int> Relayout::holders_for(int reader) const {
  std::vector<int> out;
  const HeldPart wanted = options_.to(reader);
  for (int r = 0; r < options_.size; ++r) {
    if (overlap(options_.from(r), wanted)) out.push_back(r);
  }
  std::ranges::sort(out, {}, [reader](int r) { return r ^ reader; });
  return out;
}

// Step 2
std::vector<Relayout::Read> Relayout::reads_of(LayoutRule rule, int reader) const {
  const std::vector<int> holders = holders_for(reader);
  StateRow like{.key = {"experts", "part", "indices"},
                .dtype = DType::float32,
                .rule = rule,
                .shard = Shard::whole({length_}),
                .peers = {}};
  Indices source;
  std::vector<std::size_t> all;
  for (const int r : holders) {
    all.push_back(source.rows().size());
    source.add(with_part(like, options_.from(r)));
  }
  std::vector<Read> out;
  const auto add = [&](std::size_t row, std::int64_t first, std::int64_t count) {
    out.push_back({holders[row], first, count});
  };
  for_each_read(with_part(like, options_.to(reader)), source, all, add);
  return out;
}

void Relayout::plan_rows() {
  sources_ = holders_for(options_.rank);
  for (const int r : sources_) {
    for (const Mine& mine : mine_) rows_.push_back({with_part(mine.row, options_.from(r)), mine.zeros});
  }
}

void Relayout::plan_sends() {
  for (int reader = 0; reader < options_.size; ++reader) {
    const std::size_t before = sent_.size();
    std::size_t come = 0;
    const std::array reads{reads_of(LayoutRule::sum, reader), reads_of(LayoutRule::moves, reader)};
    for (const Mine& mine : mine_) {
      if (mine.zeros) continue;
      for (const Read& read : reads[mine.row.rule == LayoutRule::sum ? 0 : 1]) {
        if (read.source == reader) continue;
        const std::size_t first = static_cast<std::size_t>(read.first) * mine.index_bytes,
                          count = static_cast<std::size_t>(read.count) * mine.index_bytes;
        come += count;
        if (read.source != options_.rank) continue;
        const std::size_t at = sent_.size();
        sent_.resize(at + count);
        if (!mine.bytes.empty() && count > 0) std::memcpy(&sent_[at], &mine.bytes[first], count);
      }
    }
    to_[static_cast<std::size_t>(reader)] = static_cast<std::int64_t>(sent_.size() - before);
    most_bytes_ = std::max(most_bytes_, static_cast<std::int64_t>(come));
  }
}

void Relayout::plan_receives() {
  const std::array reads{reads_of(LayoutRule::sum, options_.rank),
                         reads_of(LayoutRule::moves, options_.rank)};
  std::size_t at = 0;
  for (int source = 0; source < options_.size; ++source) {
    const auto place = static_cast<std::size_t>(std::ranges::find(sources_, source) - sources_.begin());
    if (source == options_.rank || place == sources_.size()) continue;
    const std::size_t before = at;
    for (std::size_t i = 0; i < mine_.size(); ++i) {
      if (mine_[i].zeros) continue;
      for (const Read& read : reads[mine_[i].row.rule == LayoutRule::sum ? 0 : 1]) {
        if (read.source != source) continue;
        places_[{place * mine_.size() + i, static_cast<std::size_t>(read.first) * mine_[i].index_bytes}] = at;
        at += static_cast<std::size_t>(read.count) * mine_[i].index_bytes;
      }
    }
    from_[static_cast<std::size_t>(source)] = static_cast<std::int64_t>(at - before);
  }
  received_.resize(at);
}

// Step 3. Pairs exchange directly: what a rank sends is what others read from it.
Task<void> Relayout::exchange(Comm comm, Relayout* me) {
  const Parts send{Dense(me->sent_.data(), static_cast<std::int64_t>(me->sent_.size()), DType::bytes),
                   me->to_};
  const Parts recv{Dense(me->received_.data(), static_cast<std::int64_t>(me->received_.size()), DType::bytes),
                   me->from_};
  const AllToAllOptions how{.algorithm = "pairwise"};
  co_await all_to_all_v(comm, send, recv, how);
  me->sent_bytes_ = comm.bytes_sent();
}

void Relayout::read(std::size_t row, std::size_t first, std::span<std::byte> into) const {
  if (into.empty()) return;
  const std::size_t source = row / mine_.size();
  if (sources_[source] == options_.rank) {
    const std::vector<std::byte>& own = mine_[row % mine_.size()].bytes;
    if (own.empty())
      std::ranges::fill(into, std::byte{0});
    else
      std::memcpy(into.data(), &own[first], into.size());
    return;
  }
  const auto found = places_.find({row, first});
  if (found == places_.end() || found->second + into.size() > received_.size())
    refuse("bytes of " + describe(rows_[row].row.key) + " that nobody was to send");
  std::memcpy(into.data(), &received_[found->second], into.size());
}

}  // namespace weft
