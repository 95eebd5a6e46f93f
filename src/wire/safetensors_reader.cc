#include "wire/safetensors_reader.h"

#include <utility>

#include "wire/safetensors_header.h"

namespace weft::wire {

SafetensorsReader::SafetensorsReader(const std::filesystem::path& path) : file_(path) {
  const auto read_at = [this](std::size_t offset, std::span<std::byte> into) { file_.read_at(offset, into); };
  safetensors::Header header = safetensors::read_header(read_at, file_.size(), file_.name());
  for (safetensors::ParsedTensor& t : header.tensors) {
    Tensor tensor{.dtype = std::move(t.entry.dtype),
                  .shape = std::move(t.entry.shape),
                  .begin = header.data_at + t.begin,
                  .bytes = t.end - t.begin};
    if (!tensors_.emplace(t.entry.name, std::move(tensor)).second) {
      safetensors::fail(file_.name(),
                        "there are two tensors of the name " + safetensors::printable(t.entry.name));
    }
  }
  metadata_ = std::move(header.metadata);
  header_checksum_ = std::move(header.header_checksum);
}

const SafetensorsReader::Tensor* SafetensorsReader::find(std::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

}  // namespace weft::wire
