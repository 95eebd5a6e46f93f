// Ranges of a safetensors file: the header is read and checked, data only as it is asked for. Who needs a
// file as a whole takes SafetensorsFile (safetensors.h), which checks all of it.
//
// What was checked can change on the disk afterwards, and the checksum of the data is not looked at: whoever
// reads ranges knows their checksums from elsewhere. Errors are UsageErrors of one sentence with the path.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "wire/input_file.h"
#include "wire/safetensors.h"

namespace weft::wire {

class SafetensorsReader {
 public:
  struct Tensor {
    std::string dtype;
    std::vector<std::int64_t> shape;
    std::uint64_t begin = 0;  // in the file
    std::uint64_t bytes = 0;
  };

  // Throws UsageError for what is no such file, is cut off, or has a damaged header.
  explicit SafetensorsReader(const std::filesystem::path& path);

  const Metadata& metadata() const { return metadata_; }  // without the checksums
  // Eight digits over the header, with the checksum of the data in it; "": of another writer.
  const std::string& header_checksum() const { return header_checksum_; }
  std::size_t num_tensors() const { return tensors_.size(); }
  const Tensor* find(std::string_view name) const;  // nullptr if there is none
  // Bytes of the tensor from `first` on. REQUIRES: it has them.
  void read(const Tensor& tensor, std::uint64_t first, std::span<std::byte> into) const {
    file_.read_at(tensor.begin + first, into);
  }

 private:
  InputFile file_;
  std::map<std::string, Tensor, std::less<>> tensors_;
  Metadata metadata_;
  std::string header_checksum_;
};

}  // namespace weft::wire
