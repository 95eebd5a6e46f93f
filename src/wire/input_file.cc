#include "wire/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "wire/safetensors_header.h"

namespace weft::wire {

using safetensors::fail;

InputFile::InputFile(const std::filesystem::path& path)
    : name_(path.string()),
      // O_NONBLOCK: opening a pipe would wait for its writer.
      file_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  struct stat status{};
  const bool known = file_ >= 0 && ::fstat(file_, &status) == 0;
  const int error = errno;
  if (known && S_ISREG(status.st_mode)) {
    size_ = static_cast<std::size_t>(status.st_size);
    return;
  }
  if (file_ >= 0) ::close(file_);
  if (!known) fail(name_, "cannot open: " + std::generic_category().message(error));
  fail(name_, "it is not a file");
}

InputFile::InputFile(InputFile&& other) noexcept
    : name_(std::move(other.name_)), file_(std::exchange(other.file_, -1)), size_(other.size_) {}

InputFile::~InputFile() {
  if (file_ >= 0) ::close(file_);
}

void InputFile::read_at(std::size_t offset, std::span<std::byte> into) const {
  while (!into.empty()) {
    const ssize_t n = ::pread(file_, into.data(), into.size(), static_cast<off_t>(offset));
    if (n == 0) fail(name_, "it became shorter while it was read");
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(name_, "cannot read: " + std::generic_category().message(errno));
    offset += static_cast<std::size_t>(n);
    into = into.subspan(static_cast<std::size_t>(n));
  }
}

}  // namespace weft::wire
