// Tensors in a file, in the safetensors format: what Python's safetensors writes is read here, and the other
// way round. This comment is the map.
//
//   u64 n                 length of the header, little-endian, at most 100,000,000
//   n bytes of JSON       {"__metadata__": {text: text, ...},
//                          name: {"dtype": .., "shape": [..], "data_offsets": [begin, end]}, ...}
//   data                  the tensors one after another, without holes; offsets count from here
//
// Written by weft, the header is filled with spaces so that the data begins at a multiple of 8, wide elements
// come before narrow ones so that every tensor is aligned to its own, and the metadata holds two checksums
// (CRC32C, 8 hexadecimal digits): "weft.crc32c" of the data, and "weft.header_crc32c" of everything before it
// with these digits of its own as zeros. Damage is found (one bit always); who means harm can compute a
// checksum too. Who rewrites such a file with other tools leaves both out.
//
// All errors are UsageErrors of one sentence with the path: another path, more room or another checkpoint
// helps. Nothing here is shared between calls: any thread, as many at once as there are different files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "weft/dtype.h"
#include "weft/function_ref.h"

namespace weft::wire {

inline constexpr std::size_t kMaxSafetensorsHeaderBytes = 100'000'000;  // as the reference implementation

struct TensorEntry {
  std::string name;                 // UTF-8, unique in the file, not "__metadata__"
  std::string dtype;                // "F32", "BF16", "I64" ...: the format's own names
  std::vector<std::int64_t> shape;  // empty for a scalar
  std::span<const std::byte> data;  // row-major, little-endian
};

using Metadata = std::map<std::string, std::string>;  // UTF-8

// The file is there as a whole or not at all: it is written beside `path` as ".weft-<16 digits>.tmp", synced,
// and renamed over it. After an error (no room, no permission, no such folder) the file that was there is as
// it was and the temporary one is gone; only a killed process leaves its own behind. Throws UsageError,
// before anything is touched, for entries that do not hold together and for the two keys of the checksums.
// The one error that comes after the rename is that of a folder that cannot be synced; it says so.
void write_safetensors(const std::filesystem::path& path, std::span<const TensorEntry> entries,
                       const Metadata& metadata = {});
// The same bytes, in memory.
std::vector<std::byte> encode_safetensors(std::span<const TensorEntry> entries,
                                          const Metadata& metadata = {});

// The format's name for an element type.
template <class T>
constexpr std::string_view safetensors_dtype() {
  if constexpr (std::is_same_v<T, float>)
    return "F32";
  else if constexpr (std::is_same_v<T, double>)
    return "F64";
  else if constexpr (std::is_same_v<T, bfloat16>)
    return "BF16";
  else if constexpr (std::is_same_v<T, float16>)
    return "F16";
  else if constexpr (std::is_same_v<T, std::byte>)
    return "U8";
  else {
    static_assert(std::is_integral_v<T> && !std::is_same_v<T, bool>, "not an element type of safetensors");
    constexpr std::string_view names[2][4] = {{"U8", "U16", "U32", "U64"}, {"I8", "I16", "I32", "I64"}};
    return names[std::is_signed_v<T>][sizeof(T) == 1 ? 0 : sizeof(T) == 2 ? 1 : sizeof(T) == 4 ? 2 : 3];
  }
}

// A file that was read and checked as a whole: sizes, JSON, types, shapes, offsets, and checksums if it has
// them. It is read and not mapped: what was checked cannot change afterwards, and a bad disk is an exception
// and no SIGBUS. Memory is asked for only after header and file size were found to agree.
class SafetensorsFile {
 public:
  // Throws UsageError that says what is wrong.
  explicit SafetensorsFile(const std::filesystem::path& path);
  // The same for bytes in memory, which are copied; `name` is for errors.
  static SafetensorsFile from_bytes(std::span<const std::byte> bytes, std::string name);

  SafetensorsFile(SafetensorsFile&&) = default;
  SafetensorsFile& operator=(SafetensorsFile&&) = default;

  // In the order of their data. Spans into this object's memory: they live as long as it does, also when
  // moved.
  std::span<const TensorEntry> entries() const { return entries_; }
  const TensorEntry* find(std::string_view name) const;   // nullptr if there is none
  const Metadata& metadata() const { return metadata_; }  // without the checksums
  bool has_checksums() const { return has_checksums_; }   // false for files of other writers

  // The tensor's elements. Throws UsageError if there is none of this name, type and shape, or if its
  // elements are not aligned for T (only in files of other writers; copy() takes them).
  template <class T>
  std::span<const T> view(std::string_view name, const std::vector<std::int64_t>& shape) const {
    const TensorEntry& entry = expect(name, safetensors_dtype<T>(), shape, alignof(T));
    return {reinterpret_cast<const T*>(entry.data.data()), entry.data.size() / sizeof(T)};
  }
  // The same into `into`, which has exactly its elements.
  template <class T>
  void copy(std::string_view name, const std::vector<std::int64_t>& shape, std::span<T> into) const {
    const TensorEntry& entry = expect(name, safetensors_dtype<T>(), shape, 1);
    expect_room(entry, into.size_bytes());
    if (!into.empty()) std::memcpy(into.data(), entry.data.data(), into.size_bytes());
  }

 private:
  // Fills `into` with the bytes from `offset` on; throws if they are not there.
  using ReadAt = FunctionRef<void(std::size_t offset, std::span<std::byte> into)>;

  SafetensorsFile() = default;
  void load(ReadAt read_at, std::size_t file_bytes);
  const TensorEntry& expect(std::string_view name, std::string_view dtype,
                            const std::vector<std::int64_t>& shape, std::size_t alignment) const;
  void expect_room(const TensorEntry& entry, std::size_t bytes) const;

  std::string name_;  // of the file
  std::unique_ptr<std::byte[]> data_;
  std::vector<TensorEntry> entries_;
  std::map<std::string, std::size_t, std::less<>> index_of_name_;
  Metadata metadata_;
  bool has_checksums_ = false;
};

}  // namespace weft::wire
