// The header of a safetensors file (safetensors.h is the map): from JSON to checked tensors, and back. No
// files here; `where` names the file in errors, which are UsageErrors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "wire/safetensors.h"

namespace weft::wire::safetensors {

inline constexpr std::size_t kPrefixBytes = 8;  // the length in front of the header

// Throws UsageError "'where': what".
[[noreturn]] void fail(const std::string& where, const std::string& what);
// A name out of a file or a call, short and printable enough for an error.
std::string printable(std::string_view text);
std::string text_of(const std::vector<std::int64_t>& shape);
std::string crc_text(std::uint32_t crc);
inline std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

// ---- reading ----

struct ParsedTensor {
  TensorEntry entry;  // its data is not known yet
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};
struct Header {
  std::vector<ParsedTensor> tensors;
  Metadata metadata;
  std::size_t header_crc_at = 0;  // where the digits of "weft.header_crc32c" begin, if it is there
  // Of read_header():
  std::size_t data_at = 0;                   // in the file
  std::optional<std::string> data_checksum;  // none: a file of another writer
  std::string header_checksum;
};

// Fills `into` with the bytes from `offset` on; throws if they are not there.
using ReadAt = FunctionRef<void(std::size_t offset, std::span<std::byte> into)>;
// The header of a file of so many bytes, checked against them and against its checksum.
Header read_header(ReadAt read_at, std::size_t file_bytes, const std::string& where);

Header parse_header(std::string_view json, const std::string& where);
// Brings the tensors into the order of their data, which must fill the region exactly.
void check_layout(std::vector<ParsedTensor>& tensors, std::uint64_t data_bytes, const std::string& where);
// Takes the checksums out of the metadata; that of the header is checked. A file has both or none: without
// this rule, a damaged key would make a damaged file look like one of another writer.
void check_header(Header& header, std::string_view json, const std::string& where);

// ---- writing ----

struct Encoding {
  std::string head;                         // prefix and header
  std::vector<const TensorEntry*> tensors;  // in the order of their data
};

Encoding encode_header(std::span<const TensorEntry> entries, const Metadata& metadata,
                       const std::string& where);

}  // namespace weft::wire::safetensors
