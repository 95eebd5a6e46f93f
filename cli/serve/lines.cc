#include "serve/lines.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>

#include "weft/error.h"

namespace weft::cli {

namespace {

constexpr std::chrono::seconds kPatience{5};  // with a client that does not read

sigset_t ending_signals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGTERM);
  return set;
}

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw UsageError("--socket '" + path + "': " + why);
}

// False: whoever reads is gone, or does not.
bool write_all(int fd, std::string_view bytes) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point until = Clock::now() + kPatience;  // for all of it
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), bytes.size());
    if (written >= 0) {
      bytes.remove_prefix(static_cast<std::size_t>(written));
      continue;
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) return false;
    pollfd room{.fd = fd, .events = POLLOUT, .revents = 0};
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count();
    if (left <= 0 || ::poll(&room, 1, static_cast<int>(left)) <= 0) return false;
  }
  return true;
}

}  // namespace

void block_signals() {
  sigset_t set = ending_signals();
  sigaddset(&set, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

Lines::Lines(const std::string& socket_path) : path_(socket_path) {
  const sigset_t set = ending_signals();
  signals_ = ::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  if (signals_ < 0) throw Error(std::string("signals cannot be waited for: ") + std::strerror(errno));
  try {
    if (path_.empty())
      clients_[next_client_++] = {.in = STDIN_FILENO, .out = STDOUT_FILENO, .begun = {}};
    else
      listen_at(path_);
  } catch (...) {
    close_all();
    throw;
  }
}

Lines::~Lines() {
  if (listening_ >= 0) ::unlink(path_.c_str());
  close_all();
}

void Lines::close_all() {
  while (!clients_.empty()) close_client(clients_.begin()->first);
  for (const int fd : {signals_, listening_}) {
    if (fd >= 0) ::close(fd);
  }
}

void Lines::listen_at(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path)
    refuse(path, "a path of at most " + std::to_string(sizeof address.sun_path - 1) + " bytes");
  std::memcpy(address.sun_path, path.data(), path.size());
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) refuse(path, std::strerror(errno));
  // What is there already is not touched: somebody may listen at it.
  if (::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) < 0 || ::listen(fd, 64) < 0) {
    const std::string why = errno == EADDRINUSE ? "something is there already" : std::strerror(errno);
    ::close(fd);
    refuse(path, why);
  }
  listening_ = fd;
}

void Lines::accept_one() {
  const int fd = ::accept4(listening_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd >= 0) clients_[next_client_++] = {.in = fd, .out = fd, .begun = {}};
}

void Lines::close_client(int client) {
  if (listening_ >= 0) ::close(clients_.at(client).out);
  clients_.erase(client);
}

void Lines::take(int client, std::string_view bytes) {
  Client& mine = clients_.at(client);
  for (;;) {
    const std::size_t end = bytes.find('\n');
    if (!mine.skips) mine.begun += bytes.substr(0, end);
    if (mine.begun.size() > kMostBytes) {
      mine.begun.clear();
      mine.skips = true;
    }
    if (end == std::string_view::npos) return;
    const bool blank = mine.begun.find_first_not_of(" \t\r") == std::string::npos;
    if (mine.skips || !blank) {
      ready_.push_back({client, mine.begun, mine.skips});
      ++mine.unanswered;
    }
    mine.begun.clear();
    mine.skips = false;
    bytes.remove_prefix(end + 1);
  }
}

void Lines::read_from(int client) {
  std::array<char, 65536> buffer;
  const ssize_t count = ::read(clients_.at(client).in, buffer.data(), buffer.size());
  if (count > 0) return take(client, {buffer.data(), static_cast<std::size_t>(count)});
  if (count < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK)) return;
  take(client, "\n");  // a last line without an end
  if (listening_ < 0) {
    ended_ = true;
    return;
  }
  // It may have closed its side for sending only, and still read what it asked for.
  clients_.at(client).in = -1;
  if (clients_.at(client).unanswered == 0) close_client(client);
}

std::vector<Lines::Line> Lines::wait(std::size_t most, int milliseconds) {
  if (ready_.empty() && !ended_) {
    std::vector<pollfd> all{{.fd = signals_, .events = POLLIN, .revents = 0}};
    std::vector<int> whose{-1};
    if (listening_ >= 0) {
      all.push_back({.fd = listening_, .events = POLLIN, .revents = 0});
      whose.push_back(-1);
    }
    for (const auto& [id, client] : clients_) {
      all.push_back({.fd = client.in, .events = POLLIN, .revents = 0});  // (a negative one is passed over)
      whose.push_back(id);
    }
    if (::poll(all.data(), all.size(), milliseconds) > 0) {
      if (all[0].revents != 0) ended_ = true;
      if (listening_ >= 0 && all[1].revents != 0) accept_one();
      for (std::size_t i = 0; i < all.size(); ++i) {
        if (whose[i] >= 0 && all[i].revents != 0) read_from(whose[i]);
      }
    }
  }
  std::vector<Line> out;
  while (!ready_.empty() && out.size() < most) {
    out.push_back(std::move(ready_.front()));
    ready_.pop_front();
  }
  return out;
}

void Lines::answer(int client, const std::string& line) {
  const auto found = clients_.find(client);
  if (found == clients_.end()) return;
  const bool written = write_all(found->second.out, line + "\n");
  if (!written && listening_ < 0) throw Error("the output could not be written");
  const bool over = --found->second.unanswered == 0 && found->second.in < 0;
  if (!written || over) close_client(client);
}

}  // namespace weft::cli
