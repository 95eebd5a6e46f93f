// Writes seeds for fuzz_safetensors into the folder it is given: a whole file, headers of it and of another
// writer, and entries to write.
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include "wire/safetensors.h"

using namespace weft::wire;  // NOLINT(google-build-using-namespace): a single-purpose program

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const std::vector<std::byte> data(48, std::byte{7});
  const std::vector<TensorEntry> entries = {
      {.name = "w", .dtype = "F32", .shape = {2, 3}, .data = std::span(data).first(24)},
      {.name = "step", .dtype = "I64", .shape = {}, .data = std::span(data).first(8)},
      {.name = "b\n", .dtype = "BF16", .shape = {0}, .data = {}}};
  const std::vector<std::byte> file = encode_safetensors(entries, {{"format", "pt"}});
  const std::string whole(reinterpret_cast<const char*>(file.data()), file.size());
  const std::string foreign =
      R"({"__metadata__":{"format":"pt"},"\u00e9\ud83e\uddf5":{"dtype":"U8","shape":[2,2],"data_offsets":[0,4]}, )"
      R"("b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}} )";
  // The first byte chooses the part of the target; the second is the length of the data behind a header.
  const std::vector<std::string> seeds = {
      std::string(1, '\0') + whole, std::string("\1\x20", 2) + whole.substr(8, whole.size() - 8 - 32),
      "\1\x8" + foreign,
      std::string("\2abcd\1w\0\1", 9) + "12345678" + std::string("\1m\5", 3) + std::string("\1v\4\2", 4) +
          "1234567812345678"};
  for (std::size_t i = 0; i < seeds.size(); ++i) {
    std::ofstream out(std::string(argv[1]) + "/file" + std::to_string(i), std::ios::binary);
    out << seeds[i];
  }
  return 0;
}
