#include "experts/popularity.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <numeric>
#include <string>
#include <utility>

#include "weft/error.h"
#include "wire/safetensors.h"

namespace weft {

namespace {

constexpr int kMostLayers = 4096, kMostExperts = 4096;
constexpr std::int64_t kMostCount = std::int64_t{1} << 48;  // of one path and expert: sums stay exact
constexpr double kMostPaths = 0x1p62;                       // numbers of paths fit into 64 bits

[[noreturn]] void refuse(const std::string& what) { throw UsageError("popularity: " + what); }

[[noreturn]] void refuse_in(const std::string& file, const std::string& name, const std::string& what) {
  refuse("'" + file + "': '" + name + "' " + what);
}

std::string name_of(std::size_t layer, std::size_t length, const char* what) {
  return "layer." + std::to_string(layer) + ".path." + std::to_string(length) + "." + what;
}

// A number of the file's metadata.
int number_in(const wire::SafetensorsFile& file, const std::string& where, const char* key, int most) {
  const auto found = file.metadata().find(key);
  if (found == file.metadata().end() || found->second.empty() || found->second.size() > 6 ||
      !std::ranges::all_of(found->second, [](char c) { return c >= '0' && c <= '9'; }))
    refuse("'" + where + "' is no profile of expert paths: it has no " + key);
  const int value = std::stoi(found->second);
  if (value > most) refuse("'" + where + "': " + key + " is " + found->second);
  return value;
}

}  // namespace

void check(const PopularityOptions& o) {
  if (o.layers < 1 || o.layers > kMostLayers)
    refuse("there are 1 to " + std::to_string(kMostLayers) + " layers of experts, not " +
           std::to_string(o.layers));
  if (o.experts < 1 || o.experts > kMostExperts)
    refuse("a layer has 1 to " + std::to_string(kMostExperts) + " experts, not " + std::to_string(o.experts));
  if (o.choices < 1 || o.choices > o.experts)
    refuse("a token has 1 to " + std::to_string(o.experts) + " choices, not " + std::to_string(o.choices));
  double paths = 1;
  for (int i = 0; i < o.path && paths <= kMostPaths; ++i) paths *= o.experts;
  if (o.path < 0 || paths > kMostPaths)
    refuse("paths of " + std::to_string(o.path) + " layers of " + std::to_string(o.experts) +
           " experts cannot be told apart");
  if (o.most_paths < 2)
    refuse("a profile has room for at least 2 paths of a length, not " + std::to_string(o.most_paths));
  if (o.top < 0 || o.top > o.experts)
    refuse("an estimate is of up to " + std::to_string(o.experts) + " experts, not " + std::to_string(o.top));
}

Popularity::Popularity(const PopularityOptions& options) : options_(options) {
  check(options_);
  for (int l = 0; l < options_.layers; ++l)
    layers_.emplace_back(static_cast<std::size_t>(std::min(l, options_.path)) + 1);
}

std::uint64_t Popularity::key(std::span<const std::int32_t> path) const {
  std::uint64_t out = 0;
  for (const std::int32_t expert : path)
    out = out * static_cast<std::uint64_t>(options_.experts) + static_cast<std::uint64_t>(expert);
  return out;
}

// All but so many of the most frequent paths.
void Popularity::forget(Seen& seen, std::size_t kept) const {
  struct Row {
    std::int64_t all;
    std::uint64_t path;
    std::size_t row;
  };
  std::vector<Row> rows;
  rows.reserve(seen.row_of_path.size());
  for (const auto& [path, row] : seen.row_of_path) {
    const auto first = seen.counts.begin() + static_cast<std::ptrdiff_t>(row * experts());
    rows.push_back({std::accumulate(first, first + options_.experts, std::int64_t{0}), path, row});
  }
  std::ranges::sort(
      rows, [](const Row& a, const Row& b) { return a.all != b.all ? a.all > b.all : a.row > b.row; });
  rows.resize(std::min(rows.size(), kept));
  std::ranges::sort(rows, {}, &Row::row);  // who came first is still told
  Seen left;
  for (const Row& row : rows) {
    left.row_of_path.emplace(row.path, left.row_of_path.size());
    const auto first = seen.counts.begin() + static_cast<std::ptrdiff_t>(row.row * experts());
    left.counts.insert(left.counts.end(), first, first + options_.experts);
  }
  seen = std::move(left);
}

void Popularity::record(std::span<const std::int32_t> chosen) {
  const auto choices = static_cast<std::size_t>(options_.choices);
  if (chosen.size() != layers_.size() * choices)
    refuse("a token has " + std::to_string(layers_.size() * choices) + " choices, not " +
           std::to_string(chosen.size()));
  for (const std::int32_t expert : chosen) {
    if (expert < 0 || expert >= options_.experts)
      refuse("expert " + std::to_string(expert) + " of " + std::to_string(options_.experts));
  }
  std::vector<std::int32_t> path;
  for (std::size_t l = 0; l < layers_.size(); ++l) {
    const std::span mine = chosen.subspan(l * choices, choices);
    for (std::size_t length = 0; length < layers_[l].size(); ++length) {
      Seen& seen = layers_[l][length];
      const std::uint64_t path_key = key(std::span(path).last(length));
      const auto most = static_cast<std::size_t>(options_.most_paths);
      if (seen.row_of_path.size() == most && !seen.row_of_path.contains(path_key)) forget(seen, most / 2);
      const auto [row, fresh] = seen.row_of_path.emplace(path_key, seen.row_of_path.size());
      if (fresh) seen.counts.resize(seen.counts.size() + experts());
      for (const std::int32_t expert : mine)
        ++seen.counts[row->second * experts() + static_cast<std::size_t>(expert)];
    }
    path.push_back(mine.front());
  }
}

const std::int64_t* Popularity::find(int layer, std::span<const std::int32_t> path, int* depth) const {
  const std::vector<Seen>& lengths = layers_[static_cast<std::size_t>(layer)];
  for (std::size_t length = std::min(lengths.size() - 1, path.size()) + 1; length-- > 0;) {
    const auto row = lengths[length].row_of_path.find(key(path.last(length)));
    if (row == lengths[length].row_of_path.end()) continue;
    *depth = static_cast<int>(length);
    return lengths[length].counts.data() + row->second * experts();
  }
  *depth = -1;
  return nullptr;
}

int Popularity::depth(int layer, std::span<const std::int32_t> path) const {
  int out = -1;
  find(layer, path, &out);
  return out;
}

std::int64_t Popularity::num_paths(int layer, int length) const {
  return static_cast<std::int64_t>(
      layers_[static_cast<std::size_t>(layer)][static_cast<std::size_t>(length)].row_of_path.size());
}

void Popularity::estimate(int layer, std::span<const std::int32_t> path, std::span<double> rows) const {
  int depth = -1;
  const std::int64_t* const counts = find(layer, path, &depth);
  if (counts == nullptr) return;
  const double all = static_cast<double>(std::accumulate(counts, counts + experts(), std::int64_t{0}));
  const double share = options_.choices / all;
  if (options_.top == 0) {
    for (std::size_t e = 0; e < experts(); ++e) rows[e] += share * static_cast<double>(counts[e]);
    return;
  }
  std::vector<std::size_t> order(experts());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::sort(order, [&](std::size_t a, std::size_t b) {
    return counts[a] != counts[b] ? counts[a] > counts[b] : a < b;
  });
  for (std::size_t i = 0; i < static_cast<std::size_t>(options_.top); ++i)
    rows[order[i]] += share * static_cast<double>(counts[order[i]]);
}

// Rows in the order of their paths, so that equal profiles are equal files.
void Popularity::save(const std::filesystem::path& file) const {
  std::vector<std::vector<std::int64_t>> memory;
  std::vector<wire::TensorEntry> entries;
  const auto add = [&](std::string name, std::vector<std::int64_t> shape, std::vector<std::int64_t> values) {
    memory.push_back(std::move(values));  // (its elements stay where they are when `memory` grows)
    entries.push_back({.name = std::move(name),
                       .dtype = "I64",
                       .shape = std::move(shape),
                       .data = std::as_bytes(std::span(memory.back()))});
  };
  for (std::size_t l = 0; l < layers_.size(); ++l) {
    for (std::size_t length = 0; length < layers_[l].size(); ++length) {
      const Seen& seen = layers_[l][length];
      const std::map<std::uint64_t, std::size_t> ordered(seen.row_of_path.begin(), seen.row_of_path.end());
      std::vector<std::int64_t> paths, counts;
      for (const auto& [path, row] : ordered) {
        paths.push_back(static_cast<std::int64_t>(path));
        const auto first = seen.counts.begin() + static_cast<std::ptrdiff_t>(row * experts());
        counts.insert(counts.end(), first, first + options_.experts);
      }
      const auto rows = static_cast<std::int64_t>(ordered.size());
      add(name_of(l, length, "paths"), {rows}, std::move(paths));
      add(name_of(l, length, "counts"), {rows, options_.experts}, std::move(counts));
    }
  }
  wire::write_safetensors(file, entries,
                          {{"weft.profile", "expert paths"},
                           {"layers", std::to_string(options_.layers)},
                           {"experts", std::to_string(options_.experts)},
                           {"path", std::to_string(options_.path)},
                           {"choices", std::to_string(options_.choices)}});
}

Popularity Popularity::load(const std::filesystem::path& path) {
  const wire::SafetensorsFile file(path);
  const std::string where = path.string();
  PopularityOptions options;
  options.layers = number_in(file, where, "layers", kMostLayers);
  options.experts = number_in(file, where, "experts", kMostExperts);
  options.path = number_in(file, where, "path", 64);
  options.choices = number_in(file, where, "choices", kMostExperts);
  Popularity out(options);
  for (std::size_t l = 0; l < out.layers_.size(); ++l) {
    std::uint64_t most = 1;  // paths of this length
    for (std::size_t length = 0; length < out.layers_[l].size(); ++length) {
      const std::string name = name_of(l, length, "paths");
      const wire::TensorEntry* const entry = file.find(name);
      if (entry == nullptr || entry->shape.size() != 1) refuse_in(where, name, "is not there");
      const std::int64_t rows = entry->shape.front();
      const std::span paths = file.view<std::int64_t>(name, {rows});
      const std::span counts = file.view<std::int64_t>(name_of(l, length, "counts"), {rows, options.experts});
      Seen& seen = out.layers_[l][length];
      for (const std::int64_t key : paths) {
        if (key < 0 || static_cast<std::uint64_t>(key) >= most ||
            !seen.row_of_path.emplace(static_cast<std::uint64_t>(key), seen.row_of_path.size()).second)
          refuse_in(where, name, "has a path twice, or one that cannot be");
      }
      for (std::size_t row = 0; row < paths.size(); ++row) {
        const std::span mine = counts.subspan(row * out.experts(), out.experts());
        const bool sound = std::ranges::all_of(mine, [](auto c) { return c >= 0 && c <= kMostCount; });
        if (!sound || std::ranges::all_of(mine, [](auto c) { return c == 0; }))
          refuse_in(where, name, "has counts that cannot be");
      }
      seen.counts.assign(counts.begin(), counts.end());
      const auto room = static_cast<std::size_t>(options.most_paths);
      if (seen.row_of_path.size() > room) out.forget(seen, room);
      most *= static_cast<std::uint64_t>(options.experts);
    }
  }
  return out;
}

}  // namespace weft
