#include "state/checkpoint.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

#include "weft/error.h"
#include "wire/safetensors_header.h"

namespace weft {

namespace {

namespace fs = std::filesystem;
using wire::safetensors::fail;

constexpr const char* kSharedFile = "shared.safetensors";  // of version 1
constexpr std::size_t kMostOpen = 64;                      // files
constexpr const char* kLatestFile = "latest";
constexpr std::string_view kStep = "step-";

std::string number(std::int64_t n) { return std::to_string(n); }

[[noreturn]] void fail_with(const fs::path& path, const std::string& action, const std::error_code& error) {
  fail(path.string(), "cannot " + action + ": " + error.message());
}
[[noreturn]] void fail_with_errno(const fs::path& path, const std::string& action) {
  fail_with(path, action, std::error_code(errno, std::generic_category()));
}

// ---- names ----

std::string folder_name(std::int64_t step) { return std::string(kStep) + number(step); }
fs::path unfinished(const fs::path& dir, std::int64_t step) {
  return dir / ("." + folder_name(step) + ".tmp");
}

// The N of "step-<N>", written as folder_name() does.
std::optional<std::int64_t> step_of(std::string_view name) {
  if (!name.starts_with(kStep)) return std::nullopt;
  std::int64_t step = -1;
  const std::string_view digits = name.substr(kStep.size());
  std::from_chars(digits.data(), digits.data() + digits.size(), step);
  if (step < 0 || folder_name(step) != name) return std::nullopt;
  return step;
}

bool is_temporary(std::string_view name) {
  if (!name.starts_with('.') || !name.ends_with(".tmp")) return false;
  return name.starts_with(".weft-") || step_of(name.substr(1, name.size() - 5)).has_value();
}

std::set<std::string> names_in(const fs::path& folder) {
  std::error_code error;
  std::set<std::string> out;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    out.insert(it->path().filename().string());
  }
  if (error) fail_with(folder, "list", error);
  return out;
}

// Newest first.
std::vector<std::int64_t> steps_in(const fs::path& dir) {
  std::vector<std::int64_t> out;
  for (const std::string& name : names_in(dir)) {
    if (const std::optional<std::int64_t> step = step_of(name)) out.push_back(*step);
  }
  std::sort(out.rbegin(), out.rend());
  return out;
}

std::set<std::string> files_of(int ranks) {
  std::set<std::string> out{kIndexName};
  for (int r = 0; r < ranks; ++r) out.insert(shards_name(r, ranks));
  return out;
}

// The names alone; latest_checkpoint() reads the files.
bool has_all_files(const fs::path& folder) {
  const std::set<std::string> names = names_in(folder);
  const int ranks = static_cast<int>(names.size()) - 1;
  return ranks >= 1 && names == files_of(ranks);
}

std::optional<std::int64_t> named_by_latest(const fs::path& dir) {
  std::error_code error;
  if (!fs::is_regular_file(dir / kLatestFile, error)) return std::nullopt;
  std::ifstream file(dir / kLatestFile);
  std::string line(32, '\0');  // more than any right one has
  file.read(line.data(), static_cast<std::streamsize>(line.size()));
  line.resize(static_cast<std::size_t>(file.gcount()));
  if (!line.ends_with('\n')) return std::nullopt;
  line.pop_back();
  return step_of(line);
}

// ---- changes ----

void sync_folder(const fs::path& folder) {
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) fail_with_errno(folder, "open");
  const int result = ::fsync(fd);
  const int error = errno;
  ::close(fd);
  // EINVAL: a file system that has no such thing for folders.
  if (result != 0 && error != EINVAL) fail_with(folder, "sync", {error, std::generic_category()});
}

void give_name(const fs::path& from, const fs::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) fail_with_errno(from, "rename to " + to.filename().string());
}

void remove_tree(const fs::path& path) {
  std::error_code error;
  fs::remove_all(path, error);  // does not follow links
  if (error) fail_with(path, "remove", error);
}

// The next contents of `latest`, on the disk under another name: what could fail for want of room is done
// before anything changes.
class NextLatest {
 public:
  NextLatest(const fs::path& dir, std::int64_t step) : dir_(dir), path_(dir / ".weft-latest.tmp") {
    const std::string line = folder_name(step) + "\n";
    const int fd = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) fail_with_errno(path_, "create");
    const bool written =
        ::write(fd, line.data(), line.size()) == static_cast<ssize_t>(line.size()) && ::fsync(fd) == 0;
    const int error = errno;
    if (::close(fd) == 0 && written) return;
    ::unlink(path_.c_str());
    fail_with(path_, "write", {written ? errno : error, std::generic_category()});
  }
  ~NextLatest() { ::unlink(path_.c_str()); }
  NextLatest(const NextLatest&) = delete;
  NextLatest& operator=(const NextLatest&) = delete;
  void publish() const { give_name(path_, dir_ / kLatestFile); }

 private:
  fs::path dir_, path_;
};

// Gives `from` the name `to`. What had it is removed afterwards; where the file system can exchange names
// there is no moment without a folder of this name.
void replace_folder(const fs::path& dir, const fs::path& from, const fs::path& to) {
  std::error_code error;
  if (!fs::exists(fs::symlink_status(to, error))) {
    give_name(from, to);
    return sync_folder(dir);
  }
  fs::path old = from;
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) != 0) {
    if (errno != EINVAL && errno != ENOSYS) fail_with_errno(from, "exchange with " + to.filename().string());
    old = dir / ".weft-replaced.tmp";
    remove_tree(old);
    give_name(to, old);
    give_name(from, to);
  }
  sync_folder(dir);
  fs::remove_all(old, error);  // begin_checkpoint() tries again
}

// What the files in the folder say of themselves. Throws UsageError unless they are a whole.
CheckpointIndex index_of(const fs::path& folder, const CheckpointInfo& info, int ranks) {
  CheckpointIndex out{.info = info, .files = {}};
  std::vector<std::vector<RowLine>> rows;
  for (int r = 0; r < ranks; ++r) {
    const std::string name = shards_name(r, ranks);
    const ShardsFile file(folder / name, info, r, ranks);
    rows.push_back(lines_of(file.lines(), (folder / name).string()));
    out.files.push_back({.name = name, .checksum = file.checksum(), .lines = file.lines()});
  }
  check_whole(folder, rows);
  return out;
}

}  // namespace

void begin_checkpoint(const fs::path& dir, std::int64_t step) {
  if (step < 0) fail(dir.string(), "a checkpoint of step " + number(step));
  std::error_code error;
  fs::create_directories(dir, error);
  if (error) fail_with(dir, "create", error);
  for (const std::string& name : names_in(dir)) {
    if (is_temporary(name)) remove_tree(dir / name);
  }
  fs::create_directory(unfinished(dir, step), error);
  if (error) fail_with(unfinished(dir, step), "create", error);
}

void write_shards(const fs::path& dir, const CheckpointInfo& info, StateRegistry& registry, int rank,
                  int size) {
  const fs::path path = unfinished(dir, info.step) / shards_name(rank, size);
  std::vector<LiveRow> rows;
  try {
    rows = registry.rows();
    std::erase_if(rows, [](const LiveRow& row) { return row.loads_only; });
  } catch (const UsageError& e) {
    fail(path.string(), e.what());
  }
  write_shards_file(path, info, rows, rank, size);
}

void commit_checkpoint(const fs::path& dir, const CheckpointInfo& info, int ranks) {
  const fs::path from = unfinished(dir, info.step);
  if (ranks < 1) fail(from.string(), "a checkpoint of " + number(ranks) + " ranks");
  std::set<std::string> wanted = files_of(ranks);
  wanted.erase(kIndexName);
  std::set<std::string> found = names_in(from);
  for (const std::string& name : wanted) {
    std::error_code error;
    if (!fs::is_regular_file(fs::symlink_status(from / name, error))) {
      fail((from / name).string(), "it was not written, so nothing is committed");
    }
    found.erase(name);
  }
  found.erase(kIndexName);                 // of a commit that failed: it is written again
  for (const std::string& name : found) {  // a writer that was killed leaves its temporary file
    if (!is_temporary(name))
      fail((from / name).string(), "it does not belong to a checkpoint of " + number(ranks) + " ranks");
    remove_tree(from / name);
  }
  write_index(from / kIndexName, index_of(from, info, ranks));
  sync_folder(from);
  const NextLatest next(dir, info.step);
  replace_folder(dir, from, dir / folder_name(info.step));
  next.publish();
  sync_folder(dir);
}

std::optional<std::int64_t> latest_checkpoint(const fs::path& dir, std::vector<std::string>* passed_over) {
  std::error_code error;
  if (fs::status(dir, error).type() == fs::file_type::not_found) return std::nullopt;
  std::vector<std::int64_t> steps = steps_in(dir);
  if (const std::optional<std::int64_t> named = named_by_latest(dir)) {
    std::erase(steps, *named);
    steps.insert(steps.begin(), *named);
  }
  for (const std::int64_t step : steps) {
    try {
      Checkpoint(dir, step).check();
      return step;
    } catch (const UsageError& e) {
      if (passed_over != nullptr) passed_over->push_back(e.what());
    }
  }
  return std::nullopt;
}

void keep_last(const fs::path& dir, int n) {
  if (n < 1) fail(dir.string(), "keep_last(" + number(n) + ") would keep no checkpoint");
  const std::optional<std::int64_t> named = named_by_latest(dir);
  int kept = 0;
  for (const std::int64_t step : steps_in(dir)) {
    const fs::path folder = dir / folder_name(step);
    std::error_code error;
    if (!fs::is_directory(folder, error) || !has_all_files(folder) || ++kept <= n || step == named) continue;
    // Under another name first: a crash leaves no checkpoint of half its files.
    const fs::path old = dir / (".weft-old-" + folder_name(step) + ".tmp");
    remove_tree(old);
    give_name(folder, old);
    remove_tree(old);
  }
}

Checkpoint::Checkpoint(const fs::path& dir, std::int64_t step) : folder_(dir / folder_name(step)) {
  std::error_code error;
  if (fs::exists(folder_ / kSharedFile, error) && !fs::exists(folder_ / kIndexName, error)) {
    fail(folder_.string(),
         "it is a checkpoint of version 1, this weft reads version 2: finish that run with the weft that "
         "wrote it, or begin it anew");
  }
  index_ = read_index(folder_ / kIndexName, step);
  std::vector<std::vector<RowLine>> rows;
  rows.reserve(index_.files.size());
  for (const CheckpointIndex::File& file : index_.files)
    rows.push_back(lines_of(file.lines, (folder_ / kIndexName).string()));
  check_whole(folder_, rows);
  for (std::size_t f = 0; f < rows.size(); ++f) {
    for (RowLine& line : rows[f]) {
      if (line.held == RowLine::Held::told) continue;
      rows_.push_back({line.row, line.held == RowLine::Held::zeros});
      places_.push_back({f, std::move(line)});
    }
  }
  files_.resize(index_.files.size());
}

const ShardsFile& Checkpoint::file(std::size_t i) const {
  if (files_[i] == nullptr) {
    if (num_open_ == kMostOpen) {
      for (std::unique_ptr<ShardsFile>& each : files_) each.reset();
      num_open_ = 0;
    }
    const fs::path path = folder_ / index_.files[i].name;
    auto opened = std::make_unique<ShardsFile>(path, index_.info, static_cast<int>(i), ranks());
    if (opened->checksum() != index_.files[i].checksum || opened->lines() != index_.files[i].lines)
      fail(path.string(), "it is not the file that the index was made of");
    files_[i] = std::move(opened);
    ++num_open_;
  }
  return *files_[i];
}

std::span<const std::byte> Checkpoint::piece(std::size_t row, std::size_t index) const {
  if (piece_of_ == std::pair(row, index)) return piece_;
  piece_of_.reset();
  piece_.resize(std::min(kPieceBytes, rows_[row].row.num_bytes() - index * kPieceBytes));
  file(places_[row].file).read_piece(places_[row].line, index, piece_);
  piece_of_ = {row, index};
  return piece_;
}

void Checkpoint::read(std::size_t row, std::size_t first, std::span<std::byte> into) const {
  while (!into.empty()) {
    const std::span<const std::byte> from = piece(row, first / kPieceBytes).subspan(first % kPieceBytes);
    const std::size_t count = std::min(from.size(), into.size());
    std::memcpy(into.data(), from.data(), count);
    into = into.subspan(count);
    first += count;
  }
}

void Checkpoint::check() const {
  for (std::size_t f = 0; f < files_.size(); ++f) file(f);
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    if (rows_[i].zeros) continue;
    for (std::size_t at = 0; at < rows_[i].row.num_bytes(); at += kPieceBytes) {
      if (all_finite(rows_[i].row.dtype, piece(i, at / kPieceBytes))) continue;
      fail((folder_ / index_.files[places_[i].file].name).string(),
           describe(rows_[i].row.key) + " has a value that is not finite");
    }
  }
}

}  // namespace weft
