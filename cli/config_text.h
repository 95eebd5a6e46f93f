// Strings in config files. CLI11 reads TOML but for its strings: it knows no escapes, and cuts at a '#' even
// between quotes. So strings are taken out before it reads, decoded here, and put back into what it read.
//
//   "basic"    with \" \\ \b \t \n \f \r \uXXXX \UXXXXXXXX, as TOML has them
//   'literal'  as it stands
//
// A value that is not one such string (numbers, words, lists) is CLI11's.
#pragma once

#include <CLI/CLI.hpp>
#include <array>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace weft::cli {

// As a basic string, with its quotes.
inline std::string toml_string(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\t') {
      out += "\\t";
    } else if (c == '\r') {
      out += "\\r";
    } else if (code < 0x20 || code == 0x7f) {
      std::array<char, 8> escaped{};
      std::snprintf(escaped.data(), escaped.size(), "\\u%04x", code);
      out += escaped.data();
    } else {
      out += c;
    }
  }
  return out + '"';
}

class TomlConfig : public CLI::ConfigTOML {
 public:
  // Throws CLI::FileError for a string that is none.
  std::vector<CLI::ConfigItem> from_config(std::istream& input) const override {
    std::vector<std::string> strings;
    std::stringstream plain;
    for (std::string line; std::getline(input, line);) plain << without_string(line, strings) << '\n';
    std::vector<CLI::ConfigItem> found = CLI::ConfigTOML::from_config(plain);
    for (CLI::ConfigItem& item : found) {
      for (std::string& value : item.inputs) {
        std::size_t place = 0;
        if (value.empty() || value.front() != kPlaceholder) continue;
        std::from_chars(value.data() + 1, value.data() + value.size(), place);
        if (place < strings.size()) value = strings[place];
      }
    }
    return found;
  }

 private:
  static constexpr char kPlaceholder = '\x01';

  [[noreturn]] static void refuse(const std::string& line) {
    throw CLI::FileError("the string in '" + line + "' is not one of TOML");
  }

  static void append_utf8(std::string& out, std::uint32_t code) {
    const auto put = [&out](std::uint32_t byte) { out += static_cast<char>(byte); };
    if (code < 0x80) {
      put(code);
    } else if (code < 0x800) {
      put(0xc0 | code >> 6);
      put(0x80 | (code & 0x3f));
    } else if (code < 0x10000) {
      put(0xe0 | code >> 12);
      put(0x80 | (code >> 6 & 0x3f));
      put(0x80 | (code & 0x3f));
    } else {
      put(0xf0 | code >> 18);
      put(0x80 | (code >> 12 & 0x3f));
      put(0x80 | (code >> 6 & 0x3f));
      put(0x80 | (code & 0x3f));
    }
  }

  // What stands behind the backslash at line[at]; gives the place behind it.
  static std::size_t unescape(const std::string& line, std::size_t at, std::string& out) {
    constexpr std::string_view kShort = "\"\\btnfr";
    constexpr std::string_view kMeans = "\"\\\b\t\n\f\r";
    if (at + 1 >= line.size()) refuse(line);
    const char kind = line[at + 1];
    if (const std::size_t i = kShort.find(kind); i != std::string_view::npos) {
      out += kMeans[i];
      return at + 2;
    }
    const std::size_t digits = kind == 'u' ? 4 : kind == 'U' ? 8 : 0;
    if (digits == 0 || at + 2 + digits > line.size()) refuse(line);
    std::uint32_t code = 0;
    const char* const first = line.data() + at + 2;
    const auto [end, error] = std::from_chars(first, first + digits, code, 16);
    const bool surrogate = code >= 0xd800 && code < 0xe000;
    if (error != std::errc() || end != first + digits || code > 0x10ffff || surrogate) refuse(line);
    append_utf8(out, code);
    return at + 2 + digits;
  }

  // `line` with its one string in `strings` and a placeholder in its place; else as it is.
  static std::string without_string(const std::string& line, std::vector<std::string>& strings) {
    const std::size_t equals = line.find('=');
    const std::size_t word = line.find_first_not_of(" \t");
    if (equals == std::string::npos || line[word] == '#' || line[word] == ';') return line;
    const std::size_t open = line.find_first_not_of(" \t", equals + 1);
    if (open == std::string::npos || (line[open] != '"' && line[open] != '\'')) return line;
    const char quote = line[open];
    std::string text;
    std::size_t at = open + 1;
    while (at < line.size() && line[at] != quote) {
      if (quote == '"' && line[at] == '\\')
        at = unescape(line, at, text);
      else
        text += line[at++];
    }
    const std::size_t behind = line.find_first_not_of(" \t\r", at + 1);
    if (at >= line.size() || (behind != std::string::npos && line[behind] != '#')) refuse(line);
    strings.push_back(std::move(text));
    return line.substr(0, equals + 1) + " " + kPlaceholder + std::to_string(strings.size() - 1);
  }
};

}  // namespace weft::cli
