// Ranges of safetensors files: what they give is what the whole file has, and a torn head is refused.
#include "wire/safetensors_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "files.h"
#include "weft/error.h"

namespace weft::wire {
namespace {

namespace fs = std::filesystem;
using testing::Folder;
using ::testing::HasSubstr;

std::string read_text(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write(const fs::path& path, const std::vector<float>& a, const std::vector<double>& b) {
  const std::vector<TensorEntry> entries{{"a", "F32", {2, 3}, std::as_bytes(std::span(a))},
                                         {"b", "F64", {2}, std::as_bytes(std::span(b))},
                                         {"none", "F32", {0}, {}}};
  write_safetensors(path, entries, {{"key", "value"}});
}

TEST(SafetensorsReader, RangesAreThoseOfTheWholeFile) {
  const Folder dir;
  write(dir / "x", {1, 2, 3, 4, 5, 6}, {7, 8});
  const SafetensorsReader reader(dir / "x");
  EXPECT_EQ(reader.metadata(), (Metadata{{"key", "value"}}));
  EXPECT_EQ(reader.num_tensors(), 3u);
  EXPECT_EQ(reader.find("c"), nullptr);
  const SafetensorsReader::Tensor* const found = reader.find("a");
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(found->shape, (std::vector<std::int64_t>{2, 3}));
  std::vector<float> part(2);
  reader.read(*found, 3 * sizeof(float), std::as_writable_bytes(std::span(part)));
  EXPECT_EQ(part, (std::vector<float>{4, 5}));
  // Another value is another header: it has the checksum of the data.
  EXPECT_EQ(reader.header_checksum().size(), 8u);
  write(dir / "y", {1, 2, 3, 4, 5, 6}, {7, 9});
  EXPECT_NE(SafetensorsReader(dir / "y").header_checksum(), reader.header_checksum());
}

TEST(SafetensorsReader, ATornHeadOrLengthIsRefused) {
  const Folder dir;
  write(dir / "x", {1, 2, 3, 4, 5, 6}, {7, 8});
  const std::string whole = read_text(dir / "x");
  const std::size_t head = whole.size() - 40;
  const auto refused = [&](const std::string& bytes) {
    std::ofstream(dir / "y", std::ios::binary) << bytes;
    try {
      const SafetensorsReader reader(dir / "y");
      return false;
    } catch (const UsageError& e) {
      EXPECT_THAT(e.what(), HasSubstr("'" + (dir / "y").string() + "': "));
      return true;
    }
  };
  EXPECT_FALSE(refused(whole));
  for (std::size_t n = 0; n < whole.size(); n += 7) EXPECT_TRUE(refused(whole.substr(0, n))) << n;
  for (std::size_t at = 0; at < head; ++at) {
    std::string flipped = whole;
    flipped[at] = static_cast<char>(flipped[at] ^ 4);
    EXPECT_TRUE(refused(flipped)) << at;
  }
  std::string data = whole;  // whoever reads ranges has their checksums from elsewhere
  data[head + 10] = static_cast<char>(data[head + 10] ^ 4);
  EXPECT_FALSE(refused(data));
  EXPECT_THROW(SafetensorsReader(dir / "nowhere"), UsageError);
  EXPECT_THROW(SafetensorsReader(dir.path()), UsageError);
}

}  // namespace
}  // namespace weft::wire
