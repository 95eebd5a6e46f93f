#include "launcher.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <optional>
#include <utility>

#include "process.h"
#include "verbs.h"
#include "weft/clock.h"
#include "weft/error.h"

extern char**
    environ;  // NOLINT(readability-redundant-declaration): POSIX leaves the declaration to the program

namespace weft::cli {

namespace {

constexpr Time kFarewell = 1s;  // from a rank's failure to SIGTERM: the others find out and say so
constexpr Time kGrace = 3s;     // from SIGTERM to SIGKILL
constexpr Time kDrain = 200ms;  // for output that is under way when the last rank has ended

std::string random_token() {
  std::array<unsigned char, 32> bytes{};
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    throw Error("the system gave no random bytes for the job's token");
  }
  std::string text;
  for (const unsigned char byte : bytes) {
    std::array<char, 3> hex{};
    std::snprintf(hex.data(), hex.size(), "%02x", byte);
    text += hex.data();
  }
  return text;
}

// A socket that holds the port while it lives; -1 if it is taken.
int hold_port(int port, int* got) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), length) != 0) {
    close(fd);
    return -1;
  }
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
  *got = ntohs(address.sin_port);
  return fd;
}

// One whose successor is free too: that is where the ranks meet.
int free_port() {
  for (int attempt = 0; attempt < 100; ++attempt) {
    int port = 0, next = 0;
    const int first = hold_port(0, &port);
    if (first < 0 || port == 65535) continue;
    const int second = hold_port(port + 1, &next);
    close(first);
    if (second < 0) continue;
    close(second);
    return port;
  }
  throw Error("no free port was found; name one with --port");
}

// Ours replaces what an outer launcher said.
bool is_placement(const char* entry) {
  for (const char* name :
       {"RANK=", "WORLD_SIZE=", "LOCAL_RANK=", "LOCAL_WORLD_SIZE=", "MASTER_ADDR=", "MASTER_PORT=",
        "WEFT_TOKEN=", "OMPI_COMM_WORLD_", "PMI_", "PMIX_", "SLURM_PROCID=", "SLURM_NTASKS="}) {
    if (std::strncmp(entry, name, std::strlen(name)) == 0) return true;
  }
  return false;
}

// Text of one stream, given on line by line.
class Lines {
 public:
  Lines(int fd, int rank, std::FILE* to) : fd_(fd), prefix_("[" + std::to_string(rank) + "] "), to_(to) {}
  int fd() const { return fd_; }

  void read_some() {
    std::array<char, 65536> buffer;
    const ssize_t got = read(fd_, buffer.data(), buffer.size());
    if (got > 0) {
      text_.append(buffer.data(), static_cast<std::size_t>(got));
    } else if (got == 0 || (errno != EINTR && errno != EAGAIN)) {
      end();
    }
    std::size_t start = 0;
    for (std::size_t end = text_.find('\n'); end != std::string::npos; end = text_.find('\n', start)) {
      print(text_.substr(start, end - start));
      start = end + 1;
    }
    text_.erase(0, start);
    std::fflush(to_);
  }
  void end() {
    if (fd_ < 0) return;
    close(std::exchange(fd_, -1));
    if (!text_.empty()) print(text_);
    text_.clear();
    std::fflush(to_);
  }

 private:
  void print(const std::string& line) const {
    const std::string whole = prefix_ + line + '\n';  // at once, and with the zero bytes that it may have
    std::fwrite(whole.data(), 1, whole.size(), to_);
  }
  int fd_;
  std::string prefix_;
  std::FILE* to_;
  std::string text_;
};

class Job {
 public:
  explicit Job(const LaunchOptions& options) : options_(options), token_(random_token()) {
    sigset_t caught;
    sigemptyset(&caught);
    for (const int signal : {SIGCHLD, SIGINT, SIGTERM, SIGHUP}) sigaddset(&caught, signal);
    sigprocmask(SIG_BLOCK, &caught, &mask_before_);
    signals_ = signalfd(-1, &caught, SFD_CLOEXEC | SFD_NONBLOCK);
    port_ = options.port != 0 ? options.port : free_port();
  }
  ~Job() {
    for (const pid_t pid : groups_) kill(-pid, SIGKILL);  // whatever the ranks left behind
    close(signals_);
    sigprocmask(SIG_SETMASK, &mask_before_, nullptr);
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  int run() {
    for (int rank = 0; rank < options_.ranks; ++rank) start(rank);
    while (running_ > 0) {
      wait_for_something();
      take_signals();
      reap();
      if (end_at_ && clock_.now() >= *end_at_) end_all();
      if (kill_at_ && clock_.now() >= *kill_at_) {
        signal_all(SIGKILL);
        kill_at_.reset();
      }
    }
    drain();
    return status_;
  }
  bool told_to_end() const { return told_to_end_; }

 private:
  void start(int rank);
  [[noreturn]] void become(int rank, int out, int err, int parent);
  std::vector<std::string> environment(int rank) const;

  void wait_for_something() {
    std::vector<pollfd> polled{{signals_, POLLIN, 0}};
    for (const Lines& lines : output_) {
      if (lines.fd() >= 0) polled.push_back({lines.fd(), POLLIN, 0});
    }
    int timeout = -1;
    if (const std::optional<Time> next = kill_at_ ? kill_at_ : end_at_) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(*next - clock_.now()).count();
      timeout = static_cast<int>(std::max<long long>(0, left)) + 1;
    }
    if (poll(polled.data(), polled.size(), timeout) <= 0) return;
    for (const pollfd& ready : polled) {
      for (Lines& lines : output_) {
        if (ready.revents != 0 && lines.fd() == ready.fd) lines.read_some();
      }
    }
  }

  void take_signals() {
    signalfd_siginfo info{};
    while (read(signals_, &info, sizeof(info)) == sizeof(info)) {
      const auto signal = static_cast<int>(info.ssi_signo);
      if (signal == SIGCHLD) continue;
      if (status_ == 0) {
        status_ = 128 + signal;
        told_to_end_ = true;
        std::fprintf(stderr, "weft launch: told to end (%s)\n", signal_text(signal).c_str());
      }
      end_all();
    }
  }

  void reap() {
    for (;;) {
      int how = 0;
      const pid_t pid = waitpid(-1, &how, WNOHANG);
      if (pid <= 0) return;
      for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
        if (ranks_[rank] != pid) continue;
        ranks_[rank] = 0;
        --running_;
        ended(static_cast<int>(rank), how);
      }
    }
  }

  void ended(int rank, int how) {
    const bool killed = WIFSIGNALED(how);
    const int status = killed ? 128 + WTERMSIG(how) : WEXITSTATUS(how);
    const std::string text =
        killed ? "was ended by " + signal_text(WTERMSIG(how)) : "ended with status " + std::to_string(status);
    if (options_.verbose) std::fprintf(stderr, "weft launch: rank %d %s\n", rank, text.c_str());
    if (status == 0 || status_ != 0) return;
    status_ = status;
    const std::string others = running_ > 0 ? "; ending the other " + std::to_string(running_) : "";
    std::fprintf(stderr, "weft launch: rank %d failed first: it %s%s\n", rank, text.c_str(), others.c_str());
    end_at_ = clock_.now() + kFarewell;
  }

  void end_all() {
    if (ending_) return;
    ending_ = true;
    end_at_.reset();
    signal_all(SIGTERM);
    kill_at_ = clock_.now() + kGrace;
  }
  void signal_all(int signal) const {
    for (const pid_t pid : ranks_) {
      if (pid > 0) kill(-pid, signal);
    }
  }

  // What the ranks wrote last. A program that they left behind may hold their pipes open for ever.
  void drain() {
    const Time until = clock_.now() + kDrain;
    for (Lines& lines : output_) {
      while (lines.fd() >= 0) {
        pollfd polled{lines.fd(), POLLIN, 0};
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - clock_.now()).count();
        if (poll(&polled, 1, static_cast<int>(std::max<long long>(0, left))) <= 0) break;
        lines.read_some();
      }
      lines.end();
    }
  }

  const LaunchOptions& options_;
  std::string token_;
  SteadyClock clock_;
  int port_ = 0;
  int signals_ = -1;
  sigset_t mask_before_{};
  std::vector<pid_t> ranks_;   // 0: has ended
  std::vector<pid_t> groups_;  // of all that were started
  std::vector<Lines> output_;
  int running_ = 0;
  int status_ = 0;
  bool ending_ = false;
  bool told_to_end_ = false;
  std::optional<Time> end_at_, kill_at_;
};

std::vector<std::string> Job::environment(int rank) const {
  std::vector<std::string> variables;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    if (!is_placement(*entry)) variables.emplace_back(*entry);
  }
  const std::string size = std::to_string(options_.ranks);
  const std::string self = std::to_string(rank);
  for (const std::string& mine : {"RANK=" + self, "WORLD_SIZE=" + size, "LOCAL_RANK=" + self,
                                  "LOCAL_WORLD_SIZE=" + size, std::string("MASTER_ADDR=127.0.0.1"),
                                  "MASTER_PORT=" + std::to_string(port_), "WEFT_TOKEN=" + token_}) {
    variables.push_back(mine);
  }
  return variables;
}

void Job::become(int rank, int out, int err, int parent) {
  become_child(parent);
  dup2(open("/dev/null", O_RDONLY), STDIN_FILENO);
  if (out >= 0) dup2(out, STDOUT_FILENO);
  if (err >= 0) dup2(err, STDERR_FILENO);
  const std::vector<std::string> variables = environment(rank);
  std::vector<char*> envp, argv;
  for (const std::string& variable : variables) envp.push_back(const_cast<char*>(variable.c_str()));
  for (const std::string& argument : options_.command) argv.push_back(const_cast<char*>(argument.c_str()));
  envp.push_back(nullptr);
  argv.push_back(nullptr);
  execvpe(argv[0], argv.data(), envp.data());
  std::fprintf(stderr, "weft launch: %s: %s\n", argv[0], std::strerror(errno));
  _exit(127);
}

void Job::start(int rank) {
  const bool own_output = !options_.prefix && rank == 0;
  std::array<int, 2> out{-1, -1}, err{-1, -1};
  if (!own_output) {
    if (pipe2(err.data(), O_CLOEXEC) != 0) throw Error("no pipe could be made");
    if (options_.prefix && pipe2(out.data(), O_CLOEXEC) != 0) throw Error("no pipe could be made");
    if (!options_.prefix) out[1] = open("/dev/null", O_WRONLY | O_CLOEXEC);
  }
  const int self = getpid();
  const pid_t pid = fork();
  if (pid < 0) throw Error("rank " + std::to_string(rank) + " could not be started: " + std::strerror(errno));
  if (pid == 0) become(rank, out[1], err[1], self);
  setpgid(pid, pid);
  ranks_.push_back(pid);
  groups_.push_back(pid);
  ++running_;
  if (out[1] >= 0) close(out[1]);
  if (err[1] >= 0) close(err[1]);
  if (out[0] >= 0) output_.emplace_back(out[0], rank, stdout);
  if (err[0] >= 0) output_.emplace_back(err[0], rank, stderr);
  if (options_.verbose) {
    std::fprintf(stderr, "weft launch: rank %d is process %d (MASTER_PORT=%d, WEFT_TOKEN set)\n", rank, pid,
                 port_);
  }
}

}  // namespace

int launch(const LaunchOptions& options) {
  for (int restart = 0;; ++restart) {
    std::fflush(nullptr);
    Job job(options);
    const int status = job.run();
    if (status == 0 || job.told_to_end() || restart >= options.restarts) return status;
    if (status == kUsage) return status;  // the command line is wrong, and would be again
    std::fprintf(stderr, "weft launch: starting all ranks again (%d of %d)\n", restart + 1, options.restarts);
  }
}

}  // namespace weft::cli
