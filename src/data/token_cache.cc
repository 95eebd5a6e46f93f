// The file: magic, version, key (as in its name), number of words, number of tokens, length of the words'
// bytes, CRC32C of what follows; then words (length, bytes), then tokens. Everything is checked before it is
// used.
#include "data/token_cache.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <utility>

#include "data/tokenizer.h"
#include "wire/crc32c.h"

namespace weft {

namespace {

namespace fs = std::filesystem;

struct Header {
  std::array<char, 8> magic{'w', 'e', 'f', 't', 't', 'o', 'k', '\n'};
  std::uint32_t version = 1;  // also of the tokenizer: a new one finds other words
  std::uint32_t crc = 0;
  std::array<std::uint64_t, 2> key{};
  std::uint64_t words = 0, word_bytes = 0, tokens = 0;
};
static_assert(sizeof(Header) == 56);

// Two hashes of 64 bits by FNV-1a from different starts; the second sees each byte changed.
std::array<std::uint64_t, 2> key_of(const Text& text, const VocabularyOptions& o) {
  std::array<std::uint64_t, 2> hash{0xcbf2'9ce4'8422'2325u, 0x84222325'cbf29ce4u};
  const auto add = [&](std::string_view bytes) {
    for (const char c : bytes) {
      const auto byte = static_cast<unsigned char>(c);
      hash[0] = (hash[0] ^ byte) * 0x0000'0100'0000'01b3u;
      hash[1] = (hash[1] ^ (byte ^ 0x5au)) * 0x0000'0100'0000'01b3u;
      hash[1] ^= hash[1] >> 29;
    }
  };
  add(text.content);
  add(o.bytes ? "bytes" : "words " + std::to_string(o.limit));
  return hash;
}

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

std::optional<EncodedText> parse(const std::string& file, const std::array<std::uint64_t, 2>& key,
                                 bool bytes) {
  Header header;
  if (file.size() < sizeof header) return {};
  std::memcpy(&header, file.data(), sizeof header);
  const Header good;
  std::string_view rest = std::string_view(file).substr(sizeof header);
  if (header.magic != good.magic || header.version != good.version || header.key != key) return {};
  if (header.word_bytes > rest.size() || header.words > header.word_bytes / sizeof(std::uint32_t)) return {};
  if (header.tokens != (rest.size() - header.word_bytes) / sizeof(std::int32_t)) return {};
  if (header.word_bytes + header.tokens * sizeof(std::int32_t) != rest.size()) return {};
  if (wire::crc32c(bytes_of(rest)) != header.crc) return {};

  std::string_view word_part = rest.substr(0, header.word_bytes);
  std::vector<std::string> words;
  words.reserve(header.words);
  while (words.size() < header.words) {
    std::uint32_t length = 0;
    if (word_part.size() < sizeof length) return {};
    std::memcpy(&length, word_part.data(), sizeof length);
    word_part.remove_prefix(sizeof length);
    if (length > word_part.size()) return {};
    words.emplace_back(word_part.substr(0, length));
    word_part.remove_prefix(length);
  }
  std::vector<std::int32_t> tokens(header.tokens);
  if (!tokens.empty())
    std::memcpy(tokens.data(), rest.data() + header.word_bytes, tokens.size() * sizeof tokens[0]);
  for (const std::int32_t t : tokens) {
    if (t < 0 || static_cast<std::uint64_t>(t) >= header.words) return {};
  }
  return EncodedText{Vocabulary(std::move(words), bytes), std::move(tokens)};
}

std::string serialise(const EncodedText& encoded, const std::array<std::uint64_t, 2>& key) {
  std::string payload;
  for (const std::string& word : encoded.vocabulary.words()) {
    const auto length = static_cast<std::uint32_t>(word.size());
    payload.append(reinterpret_cast<const char*>(&length), sizeof length);
    payload += word;
  }
  Header header{.key = key,
                .words = static_cast<std::uint64_t>(encoded.vocabulary.size()),
                .word_bytes = payload.size(),
                .tokens = encoded.tokens.size()};
  payload.append(reinterpret_cast<const char*>(encoded.tokens.data()),
                 encoded.tokens.size() * sizeof(std::int32_t));
  header.crc = wire::crc32c(bytes_of(payload));
  return std::string(reinterpret_cast<const char*>(&header), sizeof header) + payload;
}

// Whole or not at all. False where it could not be written.
bool write_file(const std::string& path, std::string_view content) {
  std::error_code error;
  fs::create_directories(fs::path(path).parent_path(), error);
  std::string part = path + ".XXXXXX";
  const int fd = mkstemp(part.data());
  if (fd < 0) return false;
  bool good = true;
  while (good && !content.empty()) {
    const ssize_t written = write(fd, content.data(), content.size());
    good = written > 0;
    if (good) content.remove_prefix(static_cast<std::size_t>(written));
  }
  good = fsync(fd) == 0 && good;
  good = close(fd) == 0 && good;
  good = good && std::rename(part.c_str(), path.c_str()) == 0;
  if (!good) unlink(part.c_str());
  return good;
}

std::string name_in(const std::string& folder, const std::array<std::uint64_t, 2>& key) {
  constexpr std::string_view digits = "0123456789abcdef";
  std::string name = folder + "/";
  for (const std::uint64_t half : key) {
    for (int shift = 60; shift >= 0; shift -= 4) name += digits[half >> shift & 15];
  }
  return name + ".tokens";
}

}  // namespace

std::string default_cache_folder() {
  const char* xdg = std::getenv("XDG_CACHE_HOME");
  if (xdg != nullptr && *xdg == '/') return std::string(xdg) + "/weft";
  const char* home = std::getenv("HOME");
  return home != nullptr && *home == '/' ? std::string(home) + "/.cache/weft" : std::string();
}

std::string cache_file(const Text& text, const VocabularyOptions& options) {
  return name_in(options.cache, key_of(text, options));
}

EncodedText encode(const Text& text, const VocabularyOptions& options) {
  const std::array<std::uint64_t, 2> key = key_of(text, options);
  if (!options.cache.empty()) {
    std::ifstream file(name_in(options.cache, key), std::ios::binary);
    if (file) {
      const std::string content{std::istreambuf_iterator<char>(file), {}};
      if (std::optional<EncodedText> known = parse(content, key, options.bytes)) return std::move(*known);
    }
  }
  Vocabulary vocabulary =
      options.bytes ? Vocabulary::of_bytes() : Vocabulary::of_words(text.content, options.limit);
  std::vector<std::int32_t> tokens = vocabulary.encode(text.content);
  EncodedText out{std::move(vocabulary), std::move(tokens)};
  if (!options.cache.empty()) write_file(name_in(options.cache, key), serialise(out, key));
  return out;
}

}  // namespace weft
