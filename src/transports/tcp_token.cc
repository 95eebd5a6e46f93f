#include "transports/tcp_token.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "transports/tcp_handshake.h"
#include "weft/error.h"

namespace weft::tcp {

namespace {

constexpr std::size_t kTokenCharacters = 64;

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }

 private:
  int fd_;
};

std::string error_text() { return std::strerror(errno); }  // NOLINT(concurrency-mt-unsafe)

std::string hex(const Nonce& bytes) {
  constexpr std::string_view digits = "0123456789abcdef";
  std::string text;
  for (const std::byte b : bytes) {
    text += digits[static_cast<unsigned>(b) >> 4];
    text += digits[static_cast<unsigned>(b) & 15u];
  }
  return text;
}

// A directory that is ours alone, made if it is missing.
void check_directory(const std::string& directory) {
  if (::mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) {
    throw UsageError("cannot make the token directory " + directory + ": " + error_text() +
                     "; set WEFT_TOKEN instead");
  }
  struct stat status{};
  if (::lstat(directory.c_str(), &status) != 0 || !S_ISDIR(status.st_mode) || status.st_uid != ::geteuid() ||
      (status.st_mode & 077) != 0) {
    throw UsageError("the token directory " + directory +
                     " is not a directory of this user with mode 0700; remove it or set WEFT_TOKEN");
  }
}

}  // namespace

std::string token_path(const std::string& directory, std::uint64_t job, std::uint16_t port) {
  const std::string base = directory.empty() ? "/tmp/weft-" + std::to_string(::geteuid()) : directory;
  return base + "/" + std::to_string(job) + "-" + std::to_string(port) + ".token";
}

TokenFile::TokenFile(std::string path) : token_(hex(random_nonce())) {
  check_directory(path.substr(0, path.rfind('/')));
  // A file left by a job that was killed: this rank holds the port now, so nobody uses it. The directory is
  // ours alone, so nobody else can put one in between.
  ::unlink(path.c_str());
  const Descriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!file.valid()) throw UsageError("cannot make the token file " + path + ": " + error_text());
  path_ = std::move(path);
  if (::fchmod(file.get(), 0600) != 0 ||
      ::write(file.get(), token_.data(), token_.size()) != static_cast<ssize_t>(token_.size())) {
    const std::string reason = error_text();
    ::unlink(path_.c_str());
    throw UsageError("cannot write the token file " + path_ + ": " + reason);
  }
}

TokenFile::TokenFile(TokenFile&& other) noexcept
    : path_(std::exchange(other.path_, {})), token_(std::move(other.token_)) {}

TokenFile& TokenFile::operator=(TokenFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(token_, other.token_);
  return *this;
}

TokenFile::~TokenFile() {
  if (!path_.empty()) ::unlink(path_.c_str());
}

std::string read_token(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  if (!file.valid()) {
    throw UsageError("cannot read the token file " + path + ": " + error_text() +
                     "; ranks of one job run as one user on one host, or have WEFT_TOKEN set");
  }
  struct stat status{};
  if (::fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode) || status.st_uid != ::geteuid() ||
      (status.st_mode & 077) != 0) {
    throw UsageError("the token file " + path + " is not a file of this user with mode 0600");
  }
  std::array<char, kTokenCharacters + 1> text{};
  const ssize_t n = ::read(file.get(), text.data(), text.size());
  if (n != static_cast<ssize_t>(kTokenCharacters)) throw UsageError("the token file " + path + " is damaged");
  return {text.data(), kTokenCharacters};
}

}  // namespace weft::tcp
