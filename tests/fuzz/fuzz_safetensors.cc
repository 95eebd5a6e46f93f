// Files of tensors: garbage is refused with a UsageError and nothing else, what is accepted holds together
// and comes back equal when it is written again, and a changed bit in a file of weft is always found.
//
// The first byte chooses: a whole file; a header alone, with the length before it and the data behind it put
// right (so that the parser is reached at once); or entries to write.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "weft/error.h"
#include "wire/safetensors.h"

namespace weft::wire {
namespace {

using Bytes = std::vector<std::byte>;

void require(bool holds) {
  if (!holds) std::abort();
}

template <class T>
T take(std::span<const std::byte>& bytes) {
  T value{};
  const std::size_t n = std::min(sizeof value, bytes.size());
  if (n > 0) std::memcpy(&value, bytes.data(), n);
  bytes = bytes.subspan(n);
  return value;
}

std::optional<SafetensorsFile> accepted(std::span<const std::byte> bytes) {
  try {
    return SafetensorsFile::from_bytes(bytes, "fuzz");
  } catch (const UsageError& e) {
    require(std::string_view(e.what()).starts_with("'fuzz': "));
    return std::nullopt;
  }
}

void require_same(const SafetensorsFile& a, std::span<const TensorEntry> b, const Metadata& metadata) {
  require(a.entries().size() == b.size() && a.metadata() == metadata);
  for (const TensorEntry& entry : b) {
    const TensorEntry* found = a.find(entry.name);
    require(found != nullptr && found->dtype == entry.dtype && found->shape == entry.shape);
    require(std::ranges::equal(found->data, entry.data));
  }
}

void whole_file(std::span<const std::byte> bytes) {
  const std::optional<SafetensorsFile> file = accepted(bytes);
  if (!file) return;
  std::size_t total = 0;
  for (const TensorEntry& entry : file->entries()) {
    require(file->find(entry.name) == &entry);
    total += entry.data.size();
  }
  std::uint64_t header = 0;
  std::memcpy(&header, bytes.data(), sizeof header);
  require(sizeof header + header + total == bytes.size());
  const std::optional<SafetensorsFile> again =
      accepted(encode_safetensors(file->entries(), file->metadata()));
  require(again && again->has_checksums());
  require_same(*again, file->entries(), file->metadata());
}

void header_alone(std::span<const std::byte> bytes) {
  const std::size_t data_bytes = take<std::uint8_t>(bytes);
  const std::uint64_t header = bytes.size();
  Bytes file(sizeof header);
  std::memcpy(file.data(), &header, sizeof header);
  file.insert(file.end(), bytes.begin(), bytes.end());
  file.resize(file.size() + data_bytes);
  whole_file(file);
}

void round_trip(std::span<const std::byte> bytes) {
  constexpr const char* kTypes[] = {"U8", "F4", "BF16", "I32", "F64"};
  const std::uint32_t change = take<std::uint32_t>(bytes);
  std::vector<TensorEntry> entries;
  Metadata metadata;
  while (!bytes.empty()) {
    const std::size_t name_bytes = std::min<std::size_t>(take<std::uint8_t>(bytes) % 16, bytes.size());
    std::string name(reinterpret_cast<const char*>(bytes.data()), name_bytes);
    bytes = bytes.subspan(name_bytes);
    const std::uint8_t kind = take<std::uint8_t>(bytes);
    if (kind % 6 == 5) {
      metadata[name] = std::to_string(kind);
      continue;
    }
    const std::size_t count = std::min<std::size_t>(take<std::uint8_t>(bytes) % 32 * 8, bytes.size());
    constexpr std::int64_t kNumerator[] = {1, 2, 1, 1, 1};  // elements in so many ...
    constexpr std::int64_t kBytes[] = {1, 1, 2, 4, 8};      // ... bytes
    const std::int64_t elements = static_cast<std::int64_t>(count) * kNumerator[kind % 6] / kBytes[kind % 6];
    entries.push_back({.name = std::move(name),
                       .dtype = kTypes[kind % 6],
                       .shape = {elements, 1},
                       .data = bytes.first(count)});
    bytes = bytes.subspan(count);
  }
  Bytes file;
  try {
    file = encode_safetensors(entries, metadata);
  } catch (const UsageError&) {
    return;  // names that are equal or not UTF-8, sizes that do not fit
  }
  const std::optional<SafetensorsFile> loaded = accepted(file);
  require(loaded.has_value());
  require_same(*loaded, entries, metadata);
  file[change / 8 % file.size()] ^= std::byte{1} << change % 8;
  require(!accepted(file));
}

}  // namespace
}  // namespace weft::wire

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const auto bytes = std::as_bytes(std::span(data, size)).subspan(1);
  switch (data[0] % 3) {
    case 0:
      weft::wire::whole_file(bytes);
      break;
    case 1:
      weft::wire::header_alone(bytes);
      break;
    default:
      weft::wire::round_trip(bytes);
  }
  return 0;
}
