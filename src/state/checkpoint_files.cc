#include "state/checkpoint_files.h"

#include <algorithm>
#include <charconv>
#include <deque>
#include <system_error>
#include <tuple>
#include <utility>

#include "weft/error.h"
#include "wire/crc32c.h"
#include "wire/safetensors.h"
#include "wire/safetensors_header.h"

namespace weft {

namespace {

namespace fs = std::filesystem;
using wire::safetensors::fail;
using wire::safetensors::printable;

constexpr std::string_view kReservedKeys = "weft.";  // of metadata: what begins so is not the user's
constexpr std::string_view kVersion = "2";
constexpr std::string_view kFileKey = "weft.file.";
constexpr std::string_view kRows = "rows/";
constexpr std::string_view kExtra = "extra/";
constexpr std::int64_t kMostSteps = std::int64_t{1} << 53;
constexpr int kMostRanks = 1 << 20;

std::string_view dtype_name(DType dtype) {
  if (dtype == DType::float32) return wire::safetensors_dtype<float>();
  return dtype == DType::float64 ? wire::safetensors_dtype<double>()
                                 : wire::safetensors_dtype<std::int64_t>();
}

void check_info(const CheckpointInfo& info, const std::string& where) {
  if (info.step < 0 || info.step > kMostSteps) fail(where, "the step is " + std::to_string(info.step));
  for (const auto& [key, value] : info.metadata) {
    if (key.starts_with(kReservedKeys)) fail(where, "the metadata " + printable(key) + " is weft's own");
  }
  for (const auto& [name, bytes] : info.extra) {
    if (name.empty() || name.find('\n') != std::string::npos)
      fail(where, printable(name) + " cannot be the name of an extra state");
  }
}

// ---- what is in the metadata of both ----

wire::Metadata head_of(const char* kind, const CheckpointInfo& info, int size) {
  return {{"weft.checkpoint", kind},
          {"weft.version", std::string(kVersion)},
          {"weft.step", std::to_string(info.step)},
          {"weft.seed", std::to_string(info.seed)},
          {"weft.size", std::to_string(size)}};
}

class Head {
 public:
  Head(const wire::Metadata& metadata, const std::string& where) : metadata_(metadata), where_(where) {}
  void check_kind(const std::string& kind) const {
    const auto found = metadata_.find("weft.checkpoint");
    if (found == metadata_.end() || found->second != kind)
      fail(where_, "it is not the " + kind + " file of a weft checkpoint");
    if (text("weft.version") != kVersion) {
      fail(where_, "it is a checkpoint of version " + printable(text("weft.version")) +
                       ", this weft reads version " + std::string(kVersion));
    }
  }
  const std::string& text(const std::string& key) const {
    const auto found = metadata_.find(key);
    if (found == metadata_.end()) fail(where_, "its metadata has no " + key);
    return found->second;
  }
  template <class T>
  T value(const std::string& key) const {
    const std::string& told = text(key);
    T out{};
    const auto [end, error] = std::from_chars(told.data(), told.data() + told.size(), out);
    if (error != std::errc() || end != told.data() + told.size())
      fail(where_, key + " is " + printable(told) + ", which is no such number");
    return out;
  }
  template <class T>
  void check(const std::string& key, T wanted) const {
    const T found = value<T>(key);
    if (found != wanted)
      fail(where_, key + " is " + std::to_string(found) + ", expected " + std::to_string(wanted));
  }

 private:
  const wire::Metadata& metadata_;
  const std::string& where_;
};

// ---- who stores what ----

// For each row: whether this rank stores it. Largest first, each to the peer that has least so far.
std::vector<bool> dealt_out(std::span<const LiveRow> rows) {
  std::vector<bool> mine(rows.size(), true);
  std::vector<std::size_t> shared;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (one_is_enough(rows[i].row.rule) && rows[i].row.peers.size > 1) shared.push_back(i);
  }
  std::sort(shared.begin(), shared.end(), [&](std::size_t a, std::size_t b) {
    const std::size_t bytes = rows[a].row.num_bytes(), other = rows[b].row.num_bytes();
    return bytes != other ? bytes > other : a < b;
  });
  std::map<std::pair<std::uint64_t, int>, std::vector<std::size_t>> loads;  // of each group's peers
  for (const std::size_t i : shared) {
    const Peers& peers = rows[i].row.peers;
    std::vector<std::size_t>& load = loads[{peers.group, peers.size}];
    load.resize(static_cast<std::size_t>(peers.size));
    const auto least = std::min_element(load.begin(), load.end());
    *least += rows[i].row.num_bytes() + 1;
    mine[i] = least - load.begin() == peers.rank;
  }
  return mine;
}

// ---- a whole of all files ----

// A line and the file it is from.
struct Told {
  const RowLine* line = nullptr;
  std::size_t rank = 0;
};

class Whole {
 public:
  Whole(const fs::path& folder, std::size_t ranks) : folder_(folder), ranks_(ranks) {}

  void check(const std::vector<Told>& all) const {
    const StateRow& first = all[0].line->row;
    const bool cut = first.rule == LayoutRule::sum || first.rule == LayoutRule::moves;
    for (const Told& t : all) {
      const StateRow& row = t.line->row;
      if (row.rule != first.rule || row.dtype != first.dtype) differs(t, all[0], " (its type)");
      if (cut && row.shard.shape != first.shard.shape) differs(t, all[0], " (its shape)");
    }
    if (first.rule == LayoutRule::same) check_replicas(all);
    if (first.rule == LayoutRule::restart) check_peers(all);
    if (!cut) return;
    // Ranks that hold the same part of a tensor are the peers of one group.
    std::map<std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>>, std::vector<Told>> boxes;
    for (const Told& t : all) boxes[{t.line->row.shard.first, t.line->row.shard.extent}].push_back(t);
    std::vector<Told> one_of_each;
    for (const auto& [box, told] : boxes) {
      first.rule == LayoutRule::moves ? check_replicas(told) : check_summands(told);
      one_of_each.push_back(told[0]);
    }
    check_ranges(one_of_each);
  }

 private:
  std::string name_of(const Told& t) const {
    return shards_name(static_cast<int>(t.rank), static_cast<int>(ranks_));
  }
  std::string file_of(const Told& t) const { return (folder_ / name_of(t)).string(); }
  [[noreturn]] void differs(const Told& t, const Told& other, const char* what = "") const {
    const StateRow& row = t.line->row;
    fail(file_of(t),
         "it differs from " + name_of(other) + " in " + describe(row.key) + ", of " + row.key.owner + what +
             (row.rule == LayoutRule::same
                  ? ": the ranks disagree, or groups that hold different state have strategies of one name"
                  : ""));
  }

  void check_ranges(const std::vector<Told>& all) const {
    const StateRow& first = all[0].line->row;
    std::int64_t covered = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      const Shard& mine = all[i].line->row.shard;
      covered += mine.num_elements();
      for (std::size_t j = 0; j < i; ++j) {
        const Shard& other = all[j].line->row.shard;
        if (common_elements(mine, other) == 0) continue;
        fail(file_of(all[i]), describe(first.key) + ", " + text_of(mine) + ", overlaps " + text_of(other) +
                                  " in " + name_of(all[j]));
      }
    }
    const std::int64_t wanted = first.shard.tensor_elements();
    if (covered != wanted) {
      fail(folder_.string(), std::to_string(wanted - covered) + " of the " + std::to_string(wanted) +
                                 " elements of " + describe(first.key) + " are in no file");
    }
  }
  // Of a part that several hold: what most of them have is right, and one of them stores it.
  void check_replicas(const std::vector<Told>& all) const {
    const auto are_equal = [](const Told& a, const Told& b) {
      return a.line->row.shard == b.line->row.shard && a.line->checksums == b.line->checksums;
    };
    const auto votes = [&](const Told& t) {
      return std::count_if(all.begin(), all.end(), [&](const Told& o) { return are_equal(o, t); });
    };
    const Told* most = &all[0];
    if (votes(all[0]) != static_cast<std::ptrdiff_t>(all.size())) {
      for (const Told& t : all) most = votes(t) > votes(*most) ? &t : most;
    }
    const Told* stored = nullptr;
    for (const Told& t : all) {
      if (!are_equal(t, *most)) differs(t, *most);
      if (t.line->held == RowLine::Held::told) continue;
      if (stored != nullptr && t.line->row.rule == LayoutRule::moves) is_twice(t, *stored);
      stored = &t;
    }
    if (stored == nullptr)
      fail(folder_.string(),
           name_of_part(describe(all[0].line->row.key), all[0].line->row.shard) + " is in no file");
  }
  void check_summands(const std::vector<Told>& all) const {
    const int peers = all[0].line->row.peers.size;
    std::map<int, const Told*> of_peer;
    for (const Told& t : all) {
      const StateRow& row = t.line->row;
      if (row.peers.size != peers) differs(t, all[0], " (the number of its peers)");
      if (row.divisor != all[0].line->row.divisor) differs(t, all[0], " (its divisor)");
      const auto [found, fresh] = of_peer.emplace(row.peers.rank, &t);
      if (!fresh) is_twice(t, *found->second);
    }
    int missing = 0;
    while (of_peer.contains(missing)) ++missing;
    if (missing == peers) return;
    fail(folder_.string(), describe(all[0].line->row.key) + " of rank " + std::to_string(missing) + " of " +
                               std::to_string(peers) + " is in no file");
  }
  void check_peers(const std::vector<Told>& all) const {
    for (std::size_t i = 0; i < all.size(); ++i) {
      for (std::size_t j = 0; j < i; ++j) {
        if (all[i].line->row.peers == all[j].line->row.peers) is_twice(all[i], all[j]);
      }
    }
  }
  [[noreturn]] void is_twice(const Told& t, const Told& other) const {
    const StateRow& row = t.line->row;
    fail(file_of(t), name_of_part(describe(row.key), row.shard) + " is there for rank " +
                         std::to_string(row.peers.rank) + " of " + std::to_string(row.peers.size) +
                         " as in " + name_of(other) +
                         ": each group has a name, or a part of the tensor, of its own");
  }

  const fs::path& folder_;
  std::size_t ranks_;
};

}  // namespace

std::string shards_name(int rank, int size) {
  return "rank-" + std::to_string(rank) + "-of-" + std::to_string(size) + ".safetensors";
}

void check_whole(const fs::path& folder, const std::vector<std::vector<RowLine>>& rows_of_rank) {
  std::map<StateKey, std::vector<Told>> all;
  for (std::size_t r = 0; r < rows_of_rank.size(); ++r) {
    for (const RowLine& line : rows_of_rank[r]) all[line.row.key].push_back({&line, r});
  }
  const Whole whole(folder, rows_of_rank.size());
  for (const auto& [key, told] : all) whole.check(told);
}

void write_shards_file(const fs::path& path, const CheckpointInfo& info, std::span<const LiveRow> rows,
                       int rank, int size) {
  const std::string where = path.string();
  check_info(info, where);
  if (size < 1 || size > kMostRanks || rank < 0 || rank >= size)
    fail(where, "there is no rank " + std::to_string(rank) + " of " + std::to_string(size));
  const std::vector<bool> mine = dealt_out(rows);
  std::vector<wire::TensorEntry> entries;
  std::deque<std::vector<std::byte>> scratch;  // of what is stored
  std::string lines;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const StateRow& row = rows[i].row;
    scratch.emplace_back();
    std::span<const std::byte> values;
    try {
      values = checked_value(rows[i], scratch.back());
    } catch (const UsageError& e) {
      fail(where, e.what());
    }
    RowLine line{.row = row, .held = RowLine::Held::here, .checksums = checksums_of(values)};
    if (values.empty() && row.num_bytes() > 0) line.held = RowLine::Held::zeros;
    if (!mine[i]) line.held = RowLine::Held::told;
    if (line.held == RowLine::Held::here) {
      entries.push_back({.name = tensor_name(row),
                         .dtype = std::string(dtype_name(row.dtype)),
                         .shape = row.shard.extent,
                         .data = values});
    } else {
      scratch.pop_back();
    }
    lines += text_of(line) + "\n";
  }
  wire::Metadata metadata = head_of("shards", info, size);
  metadata["weft.rank"] = std::to_string(rank);
  metadata["weft.rows"] = std::move(lines);
  wire::write_safetensors(path, entries, metadata);
}

ShardsFile::ShardsFile(const fs::path& path, const CheckpointInfo& info, int rank, int size)
    : where_(path.string()), reader_(path) {
  const Head head(reader_.metadata(), where_);
  head.check_kind("shards");
  head.check("weft.step", info.step);
  head.check("weft.seed", info.seed);
  head.check("weft.size", size);
  head.check("weft.rank", rank);
  std::size_t stored = 0;
  for (const RowLine& line : lines_of(lines(), where_)) {
    if (line.held != RowLine::Held::here) continue;
    ++stored;
    const wire::SafetensorsReader::Tensor* const tensor = reader_.find(tensor_name(line.row));
    if (tensor == nullptr) fail(where_, "there is no tensor " + printable(tensor_name(line.row)));
    if (tensor->dtype != dtype_name(line.row.dtype) || tensor->shape != line.row.shard.extent)
      fail(where_, "tensor " + printable(tensor_name(line.row)) + " is not what its line tells");
  }
  if (stored != reader_.num_tensors()) {
    fail(where_, "it has " + std::to_string(reader_.num_tensors()) + " tensors where " +
                     std::to_string(stored) + " are expected");
  }
}

const std::string& ShardsFile::lines() const { return Head(reader_.metadata(), where_).text("weft.rows"); }

void ShardsFile::read_piece(const RowLine& line, std::size_t piece, std::span<std::byte> into) const {
  const wire::SafetensorsReader::Tensor* const tensor = reader_.find(tensor_name(line.row));
  if (tensor == nullptr) fail(where_, "there is no tensor " + printable(tensor_name(line.row)));
  reader_.read(*tensor, piece * kPieceBytes, into);
  const std::string told = line.checksums.substr(8 * piece, 8);
  if (const std::string found = checksums_of(into); found != told) {
    fail(where_,
         "the checksum of " + describe(line.row.key) + " is " + found + ", expected " + printable(told));
  }
}

void write_index(const fs::path& path, const CheckpointIndex& index) {
  check_info(index.info, path.string());
  wire::Metadata metadata = head_of("index", index.info, static_cast<int>(index.files.size()));
  metadata.insert(index.info.metadata.begin(), index.info.metadata.end());
  std::vector<wire::TensorEntry> entries;
  const auto add = [&](std::string name, std::span<const std::byte> bytes) {
    entries.push_back({.name = std::move(name),
                       .dtype = std::string(wire::safetensors_dtype<std::byte>()),
                       .shape = {static_cast<std::int64_t>(bytes.size())},
                       .data = bytes});
  };
  for (const CheckpointIndex::File& file : index.files) {
    metadata[std::string(kFileKey) + file.name] = file.checksum;
    add(std::string(kRows) + file.name, std::as_bytes(std::span(file.lines)));
  }
  for (const auto& [name, bytes] : index.info.extra) add(std::string(kExtra) + name, bytes);
  wire::write_safetensors(path, entries, metadata);
}

CheckpointIndex read_index(const fs::path& path, std::int64_t step) {
  const std::string where = path.string();
  const wire::SafetensorsFile file(path);
  const Head head(file.metadata(), where);
  head.check_kind("index");
  head.check("weft.step", step);
  CheckpointIndex out;
  out.info.step = step;
  out.info.seed = head.value<std::uint64_t>("weft.seed");
  const int size = head.value<int>("weft.size");
  if (size < 1 || size > kMostRanks) fail(where, "it is of " + std::to_string(size) + " ranks");
  for (const auto& [key, value] : file.metadata()) {
    if (!key.starts_with(kReservedKeys)) out.info.metadata.emplace(key, value);
  }
  std::size_t used = 0;
  for (int r = 0; r < size; ++r) {
    const std::string name = shards_name(r, size);
    const wire::TensorEntry* const lines = file.find(std::string(kRows) + name);
    if (lines == nullptr) fail(where, "it has no rows of " + name);
    ++used;
    out.files.push_back(
        {.name = name,
         .checksum = head.text(std::string(kFileKey) + name),
         .lines = std::string(reinterpret_cast<const char*>(lines->data.data()), lines->data.size())});
  }
  for (const wire::TensorEntry& entry : file.entries()) {
    if (!entry.name.starts_with(kExtra)) continue;
    ++used;
    std::vector<std::byte> bytes(entry.data.size());
    file.copy<std::byte>(entry.name, {static_cast<std::int64_t>(bytes.size())}, bytes);
    out.info.extra.emplace(entry.name.substr(kExtra.size()), std::move(bytes));
  }
  if (used != file.entries().size()) {
    fail(where, "it has " + std::to_string(file.entries().size()) + " tensors where " + std::to_string(used) +
                    " are expected");
  }
  check_info(out.info, where);
  return out;
}

}  // namespace weft
