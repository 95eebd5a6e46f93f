#include "measure/files.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>

#include "weft/error.h"

namespace weft {

namespace {

void write(const std::filesystem::path& path, const std::string& content, std::ios::openmode mode) {
  errno = 0;
  std::ofstream file(path, std::ios::binary | mode);
  file << content;
  file.close();
  if (!file) throw Error("'" + path.string() + "' cannot be written: " + std::strerror(errno));
}

}  // namespace

void write_file(const std::filesystem::path& path, const std::string& content) {
  write(path, content, std::ios::trunc);
}

void append_line(const std::filesystem::path& path, const std::string& line) {
  write(path, line + "\n", std::ios::app);
}

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace weft
