// The secret of a job on one host: where no WEFT_TOKEN is given, rank 0 leaves a random one in a file that
// its user alone can read (0600, in a directory of mode 0700), and the others read it there.
#pragma once

#include <cstdint>
#include <string>

namespace weft::tcp {

// Where the token of this job lies. `directory` empty: /tmp/weft-<uid>.
std::string token_path(const std::string& directory, std::uint64_t job, std::uint16_t port);

// Makes a random token and leaves it at `path`; removes the file at the end of its life. Throws UsageError
// where directory or file belong to somebody else or can be read by others.
class TokenFile {
 public:
  TokenFile() = default;
  explicit TokenFile(std::string path);
  TokenFile(TokenFile&& other) noexcept;
  TokenFile& operator=(TokenFile&& other) noexcept;
  ~TokenFile();
  const std::string& token() const { return token_; }

 private:
  std::string path_;
  std::string token_;
};

// Throws UsageError if the file is missing or not safe.
std::string read_token(const std::string& path);

}  // namespace weft::tcp
