#include "wire/safetensors.h"

#include <fcntl.h>
#include <sys/random.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <new>
#include <optional>
#include <system_error>
#include <utility>

#include "wire/crc32c.h"
#include "wire/input_file.h"
#include "wire/safetensors_header.h"

namespace weft::wire {

using safetensors::bytes_of;
using safetensors::crc_text;
using safetensors::Encoding;
using safetensors::fail;
using safetensors::Header;
using safetensors::ParsedTensor;
using safetensors::printable;
using safetensors::text_of;

static_assert(std::endian::native == std::endian::little,
              "tensors are written in the byte order of little-endian machines");

namespace {

[[noreturn]] void fail_with(const std::string& where, const std::string& action, int error) {
  fail(where, "cannot " + action + ": " + std::generic_category().message(error));
}

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  int get() const { return fd_; }
  int close() { return ::close(std::exchange(fd_, -1)); }

 private:
  int fd_;
};

// Removes the file unless it was renamed.
class TemporaryFile {
 public:
  TemporaryFile(const std::filesystem::path& folder, std::string where) : where_(std::move(where)) {
    int fd = -1;
    do {
      std::uint64_t number = 0;
      if (::getrandom(&number, sizeof number, 0) != sizeof number)
        fail_with(where_, "name a temporary file", errno);
      path_ = folder / (".weft-" + crc_text(static_cast<std::uint32_t>(number >> 32)) +
                        crc_text(static_cast<std::uint32_t>(number)) + ".tmp");
      fd = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    } while (fd < 0 && errno == EEXIST);
    if (fd < 0) fail_with(where_, "create a file in its folder", errno);
    file_.emplace(fd);
  }
  ~TemporaryFile() {
    if (!renamed_) ::unlink(path_.c_str());
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  void write(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::write(file_->get(), bytes.data(), bytes.size());
      if (n > 0) {
        bytes = bytes.subspan(static_cast<std::size_t>(n));
      } else if (n == 0 || errno != EINTR) {
        fail_with(where_, "write", n == 0 ? EIO : errno);
      }
    }
  }
  void rename_to(const std::filesystem::path& path) {
    if (::fsync(file_->get()) != 0) fail_with(where_, "sync", errno);
    if (file_->close() != 0) fail_with(where_, "close", errno);  // some network file systems write only now
    if (::rename(path_.c_str(), path.c_str()) != 0) fail_with(where_, "replace the file", errno);
    renamed_ = true;
  }

 private:
  std::string where_;
  std::filesystem::path path_;
  std::optional<FileDescriptor> file_;
  bool renamed_ = false;
};

// Without it, a crash of the machine could bring the old file back.
void sync_folder(const std::filesystem::path& folder, const std::string& where) {
  const FileDescriptor file(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // EINVAL: a file system that has no such thing for folders.
  if (file.get() < 0 || (::fsync(file.get()) != 0 && errno != EINVAL)) {
    fail_with(where, "sync its folder (the file itself is complete)", errno);
  }
}

}  // namespace

void write_safetensors(const std::filesystem::path& path, std::span<const TensorEntry> entries,
                       const Metadata& metadata) {
  const std::string where = path.string();
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
  const Encoding encoding = safetensors::encode_header(entries, metadata, where);
  TemporaryFile file(folder, where);
  file.write(bytes_of(encoding.head));
  for (const TensorEntry* tensor : encoding.tensors) file.write(tensor->data);
  file.rename_to(path);
  sync_folder(folder, where);
}

std::vector<std::byte> encode_safetensors(std::span<const TensorEntry> entries, const Metadata& metadata) {
  const Encoding encoding = safetensors::encode_header(entries, metadata, "safetensors in memory");
  const std::span<const std::byte> head = bytes_of(encoding.head);
  std::vector<std::byte> out(head.begin(), head.end());
  for (const TensorEntry* tensor : encoding.tensors) {
    out.insert(out.end(), tensor->data.begin(), tensor->data.end());
  }
  return out;
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : name_(path.string()) {
  const InputFile file(path);
  const auto read_at = [&](std::size_t offset, std::span<std::byte> into) { file.read_at(offset, into); };
  load(read_at, file.size());
}

SafetensorsFile SafetensorsFile::from_bytes(std::span<const std::byte> bytes, std::string name) {
  SafetensorsFile file;
  file.name_ = std::move(name);
  const auto read_at = [bytes](std::size_t offset, std::span<std::byte> into) {
    if (!into.empty()) std::memcpy(into.data(), bytes.data() + offset, into.size());
  };
  file.load(read_at, bytes.size());
  return file;
}

void SafetensorsFile::load(ReadAt read_at, std::size_t file_bytes) {
  Header header = safetensors::read_header(read_at, file_bytes, name_);
  const std::size_t data_bytes = file_bytes - header.data_at;
  try {
    data_ = std::make_unique_for_overwrite<std::byte[]>(data_bytes);
  } catch (const std::bad_alloc&) {
    fail(name_, "no memory for its " + std::to_string(data_bytes) + " bytes");
  }
  const std::span<std::byte> data(data_.get(), data_bytes);
  read_at(header.data_at, data);
  const std::optional<std::string>& told = header.data_checksum;
  if (told && crc_text(crc32c(data)) != *told) {
    fail(name_, "the checksum of the data is " + crc_text(crc32c(data)) + ", expected " + printable(*told));
  }

  for (ParsedTensor& tensor : header.tensors) {
    tensor.entry.data = data.subspan(tensor.begin, tensor.end - tensor.begin);
    if (!index_of_name_.emplace(tensor.entry.name, entries_.size()).second) {
      fail(name_, "there are two tensors of the name " + printable(tensor.entry.name));
    }
    entries_.push_back(std::move(tensor.entry));
  }
  metadata_ = std::move(header.metadata);
  has_checksums_ = told.has_value();
}

const TensorEntry* SafetensorsFile::find(std::string_view name) const {
  const auto found = index_of_name_.find(name);
  return found == index_of_name_.end() ? nullptr : &entries_[found->second];
}

const TensorEntry& SafetensorsFile::expect(std::string_view name, std::string_view dtype,
                                           const std::vector<std::int64_t>& shape,
                                           std::size_t alignment) const {
  const TensorEntry* entry = find(name);
  if (entry == nullptr) fail(name_, "there is no tensor " + printable(name));
  if (entry->dtype != dtype || entry->shape != shape) {
    fail(name_, "tensor " + printable(name) + " is " + entry->dtype + " " + text_of(entry->shape) +
                    ", expected " + std::string(dtype) + " " + text_of(shape));
  }
  if (!entry->data.empty() && std::bit_cast<std::uintptr_t>(entry->data.data()) % alignment != 0) {
    fail(name_, "tensor " + printable(name) + " is not aligned and can only be copied");
  }
  return *entry;
}

void SafetensorsFile::expect_room(const TensorEntry& entry, std::size_t bytes) const {
  if (bytes != entry.data.size()) {
    fail(name_, "tensor " + printable(entry.name) + " has " + std::to_string(entry.data.size()) +
                    " bytes, room was given for " + std::to_string(bytes));
  }
}

}  // namespace weft::wire
