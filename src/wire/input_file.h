// A file that is read at places. Errors are UsageErrors of one sentence with the path. Thread: any; reads do
// not disturb each other.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>

namespace weft::wire {

class InputFile {
 public:
  explicit InputFile(const std::filesystem::path& path);  // throws for what is no regular file
  ~InputFile();
  InputFile(InputFile&& other) noexcept;
  InputFile& operator=(InputFile&&) = delete;

  const std::string& name() const { return name_; }
  std::size_t size() const { return size_; }  // when it was opened
  // Throws if they are not there.
  void read_at(std::size_t offset, std::span<std::byte> into) const;

 private:
  std::string name_;
  int file_ = -1;
  std::size_t size_ = 0;
};

}  // namespace weft::wire
