// The index: "MMIDIDX\0\0", version (u64, 1), type (u8), sequences (u64), documents (u64), lengths (i32
// each), places in the .bin in bytes (i64 each), first sequence of each document (i64 each). Little-endian,
// not aligned.
#include "data/megatron.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "weft/error.h"

namespace weft {

namespace {

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw UsageError("Megatron data '" + path + "': " + why);
}

class MappedFile {
 public:
  explicit MappedFile(std::string path) : path_(std::move(path)) {
    const int fd = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) refuse(path_, std::string("cannot be opened: ") + std::strerror(errno));
    struct stat status{};
    const bool regular = fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
    size_ = regular ? static_cast<std::size_t>(status.st_size) : 0;
    if (size_ > 0) data_ = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (!regular) refuse(path_, "is not a file");
    if (data_ == MAP_FAILED) refuse(path_, std::string("cannot be mapped: ") + std::strerror(errno));
  }
  ~MappedFile() {
    if (size_ > 0) munmap(data_, size_);
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  std::size_t size() const { return size_; }
  // REQUIRES: offset + sizeof(T) <= size().
  template <class T>
  T get(std::size_t offset) const {
    T value;
    std::memcpy(&value, static_cast<const char*>(data_) + offset, sizeof value);
    return value;
  }

 private:
  std::string path_;
  std::size_t size_ = 0;
  void* data_ = nullptr;
};

// Bytes of an id by Megatron's number of its type, or 0.
std::size_t bytes_of_type(int type) {
  switch (type) {
    case 1:  // uint8
    case 2:  // int8
      return 1;
    case 3:  // int16
    case 8:  // uint16
      return 2;
    case 4:  // int32
      return 4;
    case 5:  // int64
      return 8;
    default:
      return 0;
  }
}

class MegatronSource final : public DataSource {
 public:
  MegatronSource(const std::string& prefix, std::int64_t vocabulary)
      : index_(prefix + ".idx"), data_(prefix + ".bin"), vocabulary_(vocabulary) {
    read_index();
    if (vocabulary_ == 0) vocabulary_ = largest_id() + 1;
  }

  std::int64_t vocabulary() const override { return vocabulary_; }
  std::int64_t tokens() const override { return ends_.empty() ? 0 : ends_.back(); }

  void read(std::int64_t first, std::span<std::int64_t> out) const override {
    for_each(first, static_cast<std::int64_t>(out.size()), [&](std::int64_t at, std::int64_t id) {
      if (id < 0 || id >= vocabulary_) {
        refuse(data_.path(), "token " + std::to_string(at) + " is " + std::to_string(id) +
                                 ", outside the vocabulary of " + std::to_string(vocabulary_));
      }
      out[static_cast<std::size_t>(at - first)] = id;
    });
  }

  std::string description() const override {
    return std::to_string(tokens()) + " tokens in " + std::to_string(ends_.size()) + " sequences of " +
           data_.path();
  }

 private:
  static constexpr std::size_t kHeader = 9 + 8 + 1 + 8 + 8;

  void read_index() {
    constexpr std::string_view magic("MMIDIDX\0\0", 9);
    for (std::size_t i = 0; i < magic.size(); ++i) {
      if (index_.size() <= i || index_.get<char>(i) != magic[i])
        refuse(index_.path(), "is no Megatron index");
    }
    if (index_.size() < kHeader) refuse(index_.path(), "is truncated in its header");
    const auto version = index_.get<std::uint64_t>(9);
    if (version != 1) refuse(index_.path(), "has version " + std::to_string(version) + ", not 1");
    type_ = index_.get<std::uint8_t>(17);
    id_bytes_ = bytes_of_type(type_);
    if (id_bytes_ == 0) refuse(index_.path(), "type " + std::to_string(type_) + " is none of token ids");
    const auto count = index_.get<std::uint64_t>(18);
    const auto documents = index_.get<std::uint64_t>(26);
    const std::size_t room = index_.size() - kHeader;
    if (count > room / 12 || documents > (room - count * 12) / 8) {
      refuse(index_.path(), "is truncated: " + std::to_string(count) + " sequences and " +
                                std::to_string(documents) + " documents do not fit into its " +
                                std::to_string(index_.size()) + " bytes");
    }
    ends_.reserve(count);
    std::int64_t end = 0;
    for (std::size_t s = 0; s < count; ++s) {
      const auto length = index_.get<std::int32_t>(kHeader + 4 * s);
      const auto place = index_.get<std::int64_t>(kHeader + 4 * count + 8 * s);
      const std::size_t bytes = length < 0 ? 0 : static_cast<std::size_t>(length) * id_bytes_;
      if (length < 0 || place < 0 || bytes > data_.size() ||
          static_cast<std::size_t>(place) > data_.size() - bytes) {
        refuse(index_.path(), "sequence " + std::to_string(s) + " (" + std::to_string(length) +
                                  " tokens at byte " + std::to_string(place) + ") lies outside the " +
                                  std::to_string(data_.size()) + " bytes of " + data_.path());
      }
      ends_.push_back(end += length);
      places_.push_back(static_cast<std::size_t>(place));
    }
    if (end == 0) refuse(index_.path(), "holds no tokens");
  }

  std::int64_t id_at(std::size_t offset) const {
    switch (type_) {
      case 1:
        return data_.get<std::uint8_t>(offset);
      case 2:
        return data_.get<std::int8_t>(offset);
      case 3:
        return data_.get<std::int16_t>(offset);
      case 4:
        return data_.get<std::int32_t>(offset);
      case 5:
        return data_.get<std::int64_t>(offset);
      default:
        return data_.get<std::uint16_t>(offset);
    }
  }

  template <class F>
  void for_each(std::int64_t first, std::int64_t count, F f) const {
    auto s = static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), first) - ends_.begin());
    for (std::int64_t at = first; at < first + count; ++s) {
      const std::int64_t begin = s == 0 ? 0 : ends_[s - 1];
      const std::int64_t end = std::min(ends_[s], first + count);
      for (; at < end; ++at) f(at, id_at(places_[s] + static_cast<std::size_t>(at - begin) * id_bytes_));
    }
  }

  std::int64_t largest_id() const {
    std::int64_t largest = 0;
    for_each(0, tokens(), [&](std::int64_t, std::int64_t id) { largest = std::max(largest, id); });
    if (largest >= 1 << 24)
      refuse(data_.path(), "id " + std::to_string(largest) + " is too large for a token");
    return largest;
  }

  MappedFile index_, data_;
  int type_ = 0;
  std::size_t id_bytes_ = 0;
  std::vector<std::int64_t> ends_;   // of each sequence, in tokens
  std::vector<std::size_t> places_;  // of each sequence, in bytes of the .bin
  std::int64_t vocabulary_;
};

}  // namespace

std::shared_ptr<const DataSource> open_megatron(const std::string& prefix, std::int64_t vocabulary) {
  std::string stem = prefix;
  if (stem.ends_with(".bin") || stem.ends_with(".idx")) stem.resize(stem.size() - 4);
  if (vocabulary < 0) refuse(prefix, "a vocabulary of " + std::to_string(vocabulary) + " words");
  return std::make_shared<MegatronSource>(stem, vocabulary);
}

}  // namespace weft
