#include "process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "weft/error.h"

namespace weft::cli {

namespace {

struct Stream {
  int fd = -1;
  std::string* text = nullptr;
};

// False at its end.
bool read_some(const Stream& stream) {
  std::array<char, 65536> buffer;
  const ssize_t got = read(stream.fd, buffer.data(), buffer.size());
  if (got > 0) stream.text->append(buffer.data(), static_cast<std::size_t>(got));
  return got > 0 || (got < 0 && errno == EINTR);
}

[[noreturn]] void exec_child(const std::vector<std::string>& arguments, int out, int err, int parent) {
  become_child(parent);
  const int null = open("/dev/null", O_RDONLY);
  dup2(null, STDIN_FILENO);
  dup2(out, STDOUT_FILENO);
  dup2(err, STDERR_FILENO);
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  execvp(argv[0], argv.data());
  _exit(127);
}

// Until both streams end or time is up; true if it is.
bool listen(std::array<Stream, 2> streams, Time deadline) {
  const SteadyClock clock;
  for (;;) {
    std::vector<pollfd> open_streams;
    for (const Stream& stream : streams) {
      if (stream.fd >= 0) open_streams.push_back({stream.fd, POLLIN, 0});
    }
    if (open_streams.empty()) return false;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - clock.now()).count();
    if (left <= 0) return true;
    if (poll(open_streams.data(), open_streams.size(), static_cast<int>(left)) <= 0) continue;
    for (const pollfd& ready : open_streams) {
      for (Stream& stream : streams) {
        if (stream.fd == ready.fd && ready.revents != 0 && !read_some(stream)) stream.fd = -1;
      }
    }
  }
}

}  // namespace

void become_child(int parent_pid) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent_pid) _exit(127);  // it is gone already
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
}

Finished run_program(const std::vector<std::string>& arguments, Time limit) {
  std::array<int, 2> out{}, err{};
  if (pipe2(out.data(), O_CLOEXEC) != 0 || pipe2(err.data(), O_CLOEXEC) != 0)
    throw Error("no pipe could be made");
  const int self = getpid();
  const pid_t child = fork();
  if (child < 0) throw Error("no process could be started: " + std::string(std::strerror(errno)));
  if (child == 0) exec_child(arguments, out[1], err[1], self);
  setpgid(child, child);
  close(out[1]);
  close(err[1]);
  Finished result;
  const SteadyClock clock;
  const Time deadline = clock.now() + limit;
  result.timed_out = listen({Stream{out[0], &result.output}, Stream{err[0], &result.errors}}, deadline);
  close(out[0]);
  close(err[0]);
  int status = 0;
  while (waitpid(child, &status, WNOHANG) == 0) {
    if (clock.now() >= deadline) {
      result.timed_out = true;
      kill(-child, SIGKILL);
    }
    usleep(1000);
  }
  result.status = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  return result;
}

std::string find_program(const std::string& name) {
  const char* path = std::getenv("PATH");
  std::istringstream folders(path != nullptr ? path : "");
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::string candidate = folder + "/" + name;
    if (access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  return {};
}

std::vector<std::string> mpirun(int ranks) {
  return {"mpirun",
          "--allow-run-as-root",
          "--oversubscribe",
          "--bind-to",
          "none",
          "--mca",
          "mpi_yield_when_idle",
          "1",
          "-n",
          std::to_string(ranks)};
}

std::string signal_text(int signal) {
  const char* name = sigabbrev_np(signal);
  return name != nullptr ? "SIG" + std::string(name) : "signal " + std::to_string(signal);
}

}  // namespace weft::cli
