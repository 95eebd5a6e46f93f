#include "data/text.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include "weft/error.h"

namespace weft {

namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw UsageError("text '" + path + "': " + why);
}

std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) refuse(path, std::string("cannot be read: ") + std::strerror(errno));
  std::string content{std::istreambuf_iterator<char>(file), {}};
  if (file.bad()) refuse(path, "cannot be read to its end");
  return content;
}

bool is_text(std::string_view content) {
  return content.substr(0, 4096).find('\0') == std::string_view::npos;
}

std::vector<std::string> files_below(const std::string& folder) {
  std::error_code error;
  std::vector<std::string> out;
  auto it = fs::recursive_directory_iterator(folder, error);
  for (; !error && it != fs::recursive_directory_iterator(); it.increment(error)) {
    std::error_code ignored;
    if (!it->is_symlink(ignored) && it->is_regular_file(ignored)) out.push_back(it->path().string());
  }
  if (error) refuse(folder, "cannot be listed: " + error.message());
  std::sort(out.begin(), out.end());
  return out;
}

}  // namespace

Text read_text(const std::string& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) refuse(path, "there is no such file or folder");
  Text text{.path = path};
  if (fs::is_regular_file(status)) {
    text.content = content_of(path);
    text.files = 1;
    if (!is_text(text.content)) refuse(path, "is not a text: it has NUL bytes");
  } else if (fs::is_directory(status)) {
    for (const std::string& name : files_below(path)) {
      const std::string content = content_of(name);
      if (content.empty() || !is_text(content)) continue;
      text.content += content;
      if (text.content.back() != '\n') text.content += '\n';
      ++text.files;
    }
    if (text.files == 0) refuse(path, "no text file is in this folder");
  } else {
    refuse(path, "is neither a file nor a folder");
  }
  if (text.content.find_first_not_of(" \t\r\n\v\f") == std::string::npos) refuse(path, "is empty");
  return text;
}

}  // namespace weft
