#include "data_parallel/checkpoint.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <fstream>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

#include "data_parallel/checkpoint_files.h"
#include "weft/error.h"
#include "wire/safetensors_header.h"

namespace weft {

namespace {

namespace fs = std::filesystem;
using wire::safetensors::fail;

constexpr const char* kSharedFile = "shared.safetensors";
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
std::string rank_name(int rank, int size) {
  return "rank-" + number(rank) + "-of-" + number(size) + ".safetensors";
}
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
  std::set<std::string> out{kSharedFile};
  for (int r = 0; r < ranks; ++r) out.insert(rank_name(r, ranks));
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

// Throws UsageError unless every file is there and sound, and they are of one job.
void check_checkpoint(const fs::path& folder, std::int64_t step) {
  const TrainingSnapshot shared = read_shared_file(folder / kSharedFile, step);
  const int ranks = shared.state.size;
  StateSnapshot first;
  for (int r = 0; r < ranks; ++r) {
    const fs::path path = folder / rank_name(r, ranks);
    StateSnapshot state = read_rank_file(path, shared, r);
    const auto same = [](const StateSnapshot::Parameter& a, const StateSnapshot::Parameter& b) {
      return a.name == b.name && a.count == b.count && a.factor == b.factor && a.factor_rank == b.factor_rank;
    };
    if (r == 0) {
      first = std::move(state);
    } else if (state.step != first.step ||
               !std::equal(state.parameters.begin(), state.parameters.end(), first.parameters.begin(),
                           first.parameters.end(), same)) {
      fail(path.string(), "it has other committed steps, parameters or factors than the file of rank 0");
    }
  }
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

void write_rank(const fs::path& dir, const TrainingSnapshot& snapshot) {
  write_rank_file(unfinished(dir, snapshot.step) / rank_name(snapshot.state.rank, snapshot.state.size),
                  snapshot);
}

void write_shared(const fs::path& dir, const TrainingSnapshot& snapshot) {
  write_shared_file(unfinished(dir, snapshot.step) / kSharedFile, snapshot);
}

void commit_checkpoint(const fs::path& dir, std::int64_t step, int ranks) {
  const fs::path from = unfinished(dir, step);
  if (ranks < 1) fail(from.string(), "a checkpoint of " + number(ranks) + " ranks");
  const std::set<std::string> wanted = files_of(ranks);
  std::set<std::string> found = names_in(from);
  for (const std::string& name : wanted) {
    std::error_code error;
    if (!fs::is_regular_file(fs::symlink_status(from / name, error))) {
      fail((from / name).string(), "it was not written, so nothing is committed");
    }
    found.erase(name);
  }
  for (const std::string& name : found) {  // a writer that was killed leaves its temporary file
    if (!is_temporary(name))
      fail((from / name).string(), "it does not belong to a checkpoint of " + number(ranks) + " ranks");
    remove_tree(from / name);
  }
  sync_folder(from);
  const NextLatest next(dir, step);
  replace_folder(dir, from, dir / folder_name(step));
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
      check_checkpoint(dir / folder_name(step), step);
      return step;
    } catch (const UsageError& e) {
      if (passed_over != nullptr) passed_over->push_back(e.what());
    }
  }
  return std::nullopt;
}

TrainingSnapshot load_checkpoint(const fs::path& dir, std::int64_t step, int rank, int size) {
  const fs::path folder = dir / folder_name(step);
  if (size < 1 || rank < 0 || rank >= size) {
    fail(folder.string(), "there is no rank " + number(rank) + " of " + number(size) + " to load it");
  }
  TrainingSnapshot out = read_shared_file(folder / kSharedFile, step);
  if (out.state.size == size) {
    out.state = read_rank_file(folder / rank_name(rank, size), out, rank);
    return out;
  }
  const int saved = out.state.size;
  std::vector<StateSnapshot> states;
  states.reserve(static_cast<std::size_t>(saved));
  for (int r = 0; r < saved; ++r) states.push_back(read_rank_file(folder / rank_name(r, saved), out, r));
  try {
    out.state = std::move(reshard(states, size)[static_cast<std::size_t>(rank)]);
  } catch (const UsageError& e) {
    fail(folder.string(), e.what());
  }
  return out;
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

}  // namespace weft
