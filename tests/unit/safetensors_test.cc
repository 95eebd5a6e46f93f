// Checkpoint files: what was written comes back; a file that is not whole is refused with a reason; a write
// that fails leaves the file before it.
//
//   safetensors_test --write FILE, --check FILE: for safetensors_python_test.py, the other end of each exchange
#include "wire/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <numeric>
#include <thread>

#include "files.h"
#include "reference/data.h"
#include "weft/error.h"

namespace weft::wire {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Bytes = std::vector<std::byte>;
using testing::FileLimit;
using testing::Folder;

Bytes read_bytes(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}
void write_bytes(const fs::path& path, std::span<const std::byte> bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
}

// A file as any writer could have made it.
Bytes raw(const std::string& json, std::size_t data_bytes, std::uint64_t length) {
  Bytes out(8 + json.size() + data_bytes);
  std::memcpy(out.data(), &length, 8);
  std::memcpy(out.data() + 8, json.data(), json.size());
  for (std::size_t i = 0; i < data_bytes; ++i) out[8 + json.size() + i] = static_cast<std::byte>(i);
  return out;
}
Bytes raw(const std::string& json, std::size_t data_bytes) { return raw(json, data_bytes, json.size()); }

// What loading says, or "" if it succeeds.
std::string refusal(std::span<const std::byte> bytes) {
  try {
    SafetensorsFile::from_bytes(bytes, "some.safetensors");
  } catch (const UsageError& e) {
    return e.what();
  }
  return "";
}
std::string write_refusal(const fs::path& path, std::span<const TensorEntry> entries,
                          const Metadata& metadata = {}) {
  try {
    write_safetensors(path, entries, metadata);
  } catch (const UsageError& e) {
    return e.what();
  }
  return "";
}

void expect_same(std::span<const TensorEntry> wanted, const SafetensorsFile& file) {
  ASSERT_EQ(file.entries().size(), wanted.size());
  for (const TensorEntry& entry : wanted) {
    const TensorEntry* found = file.find(entry.name);
    ASSERT_NE(found, nullptr) << entry.name;
    EXPECT_EQ(found->name, entry.name);
    EXPECT_EQ(found->dtype, entry.dtype) << entry.name;
    EXPECT_EQ(found->shape, entry.shape) << entry.name;
    EXPECT_TRUE(std::ranges::equal(found->data, entry.data)) << entry.name;
  }
}

// One tensor of every type, and all that is odd about names and shapes. The Python test knows the same table.
struct Sample {
  std::vector<Bytes> memory;
  std::vector<TensorEntry> entries;
  Metadata metadata{{"step", "1000"}, {"a \"b\"\\\n\x01", "π 🧵"}, {"", ""}};

  void add(const std::string& name, const std::string& dtype, std::vector<std::int64_t> shape,
           std::size_t bytes) {
    Bytes& data = memory.emplace_back(bytes);
    for (std::size_t i = 0; i < bytes; ++i) data[i] = static_cast<std::byte>(i * 7 + name.size());
    entries.push_back({.name = name, .dtype = dtype, .shape = std::move(shape), .data = data});
  }
  Sample() {
    const std::pair<const char*, std::size_t> types[] = {
        {"BOOL", 1}, {"U8", 1},  {"I8", 1},   {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"I16", 2},
        {"U16", 2},  {"F16", 2}, {"BF16", 2}, {"I32", 4},     {"U32", 4},     {"F32", 4},
        {"C64", 8},  {"F64", 8}, {"I64", 8},  {"U64", 8}};
    for (const auto& [dtype, size] : types) add(std::string("of.") + dtype, dtype, {3, 5}, 15 * size);
    std::fill(memory[0].begin(), memory[0].end(),
              std::byte{1});  // the only bytes that are a bool for everyone
    add("scalar", "F32", {}, 4);
    add("empty", "F64", {0, 3}, 0);
    add("empty too", "U8", {2, 0}, 0);
    add("", "U8", {1}, 1);
    add("层.\"weight\"\\\n\t\x7f🧵", "I32", {1, 1, 2}, 8);
  }
};

TEST(Safetensors, RoundTrip) {
  const Folder folder;
  const Sample sample;
  write_safetensors(folder / "a.safetensors", sample.entries, sample.metadata);
  SafetensorsFile loaded(folder / "a.safetensors");
  expect_same(sample.entries, loaded);
  const SafetensorsFile file = std::move(loaded);
  expect_same(sample.entries, file);
  EXPECT_EQ(file.metadata(), sample.metadata);
  EXPECT_TRUE(file.has_checksums());
  EXPECT_EQ(file.find("nobody"), nullptr);
  EXPECT_EQ(folder.names(), std::vector<std::string>{"a.safetensors"});
  EXPECT_EQ(read_bytes(folder / "a.safetensors"), encode_safetensors(sample.entries, sample.metadata));

  // The order of the call does not matter: equal tensors give equal files.
  std::vector<TensorEntry> reversed(sample.entries.rbegin(), sample.entries.rend());
  EXPECT_EQ(encode_safetensors(reversed, sample.metadata),
            encode_safetensors(sample.entries, sample.metadata));
}

TEST(Safetensors, NothingAtAllIsAFile) {
  const SafetensorsFile file = SafetensorsFile::from_bytes(encode_safetensors({}), "none");
  EXPECT_TRUE(file.entries().empty() && file.metadata().empty() && file.has_checksums());
  EXPECT_FALSE(SafetensorsFile::from_bytes(raw("{}", 0), "none").has_checksums());
}

TEST(Safetensors, TensorsAreAlignedToTheirElements) {
  const Sample sample;
  const Bytes bytes = encode_safetensors(sample.entries);
  std::uint64_t header = 0;
  std::memcpy(&header, bytes.data(), 8);
  EXPECT_EQ((8 + header) % 8, 0u);
  const SafetensorsFile file = SafetensorsFile::from_bytes(bytes, "aligned");
  EXPECT_NO_THROW(file.view<double>("of.F64", {3, 5}));
  EXPECT_NO_THROW(file.view<std::uint64_t>("of.U64", {3, 5}));
  EXPECT_NO_THROW(file.view<std::int32_t>("of.I32", {3, 5}));
  EXPECT_NO_THROW(file.view<bfloat16>("of.BF16", {3, 5}));
}

TEST(Safetensors, TypedAccessChecksTypeAndShape) {
  const std::vector<float> values = {0.5f, -1.0f, 3.0e38f, 0.0f, 1.0f, 2.0f};
  const std::vector<TensorEntry> entries = {
      {.name = "w", .dtype = "F32", .shape = {2, 3}, .data = std::as_bytes(std::span(values))}};
  const SafetensorsFile file = SafetensorsFile::from_bytes(encode_safetensors(entries), "typed");
  EXPECT_TRUE(std::ranges::equal(file.view<float>("w", {2, 3}), values));
  std::vector<float> copied(6);
  file.copy<float>("w", {2, 3}, copied);
  EXPECT_EQ(copied, values);

  const auto says = [](const std::function<void()>& call, const std::string& what) {
    EXPECT_THAT(call, ::testing::ThrowsMessage<UsageError>(AllOf(HasSubstr("'typed'"), HasSubstr(what))));
  };
  says([&] { file.view<float>("v", {2, 3}); }, "no tensor 'v'");
  says([&] { file.view<std::int32_t>("w", {2, 3}); }, "'w' is F32 [2,3], expected I32 [2,3]");
  says([&] { file.view<float>("w", {3, 2}); }, "'w' is F32 [2,3], expected F32 [3,2]");
  says([&] { file.view<float>("w", {6}); }, "expected F32 [6]");
  says([&] { file.copy<float>("w", {2, 3}, std::span(copied).first(5)); }, "room was given for 20");
}

TEST(Safetensors, UnalignedTensorsOfOthersCanBeCopied) {
  const Bytes bytes = raw(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                          R"("b":{"dtype":"U32","shape":[1],"data_offsets":[1,5]}})",
                          5);
  const SafetensorsFile file = SafetensorsFile::from_bytes(bytes, "others");
  EXPECT_THROW(file.view<std::uint32_t>("b", {1}), UsageError);
  std::uint32_t value = 0;
  file.copy<std::uint32_t>("b", {1}, std::span(&value, 1));
  EXPECT_EQ(value, 0x04030201u);
}

TEST(Safetensors, AHeaderMayBeWrittenInManyWays) {
  const SafetensorsFile file =
      SafetensorsFile::from_bytes(raw("{ \"\\u00e9\\uD83E\\uddf5\\/\\n\" :\n{\"data_offsets\":[ 0 "
                                      ",\t8],\r\"shape\":[2] , \"dtype\":\"F32\"} ,"
                                      "\"z\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[8,8]},"
                                      "\"y\":{\"dtype\":\"F4\",\"shape\":[2],\"data_offsets\":[8,9]},"
                                      "\"__metadata__\":{\"format\":\"pt\"}}   ",
                                      9),
                                  "foreign");
  ASSERT_NE(file.find("é🧵/\n"), nullptr);
  EXPECT_EQ(file.find("é🧵/\n")->data.size(), 8u);
  EXPECT_EQ(file.metadata(), (Metadata{{"format", "pt"}}));
}

TEST(Safetensors, TruncatedAnywhereIsRefused) {
  const Folder folder;
  const Sample sample;
  const Bytes whole = encode_safetensors(std::span(sample.entries).last(6), sample.metadata);
  ASSERT_EQ(refusal(whole), "");  // negative control
  for (std::size_t n = 0; n < whole.size(); ++n) {
    EXPECT_THAT(refusal(std::span(whole).first(n)), HasSubstr("'some.safetensors': ")) << n;
  }
  Bytes longer = whole;
  longer.push_back({});
  EXPECT_THAT(refusal(longer), HasSubstr("bytes of data"));
  // The same through a file, and without checksums: the sizes alone find it.
  const Bytes foreign = raw(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 4);
  for (std::size_t n = 0; n <= foreign.size(); ++n) {
    write_bytes(folder / "cut", std::span(foreign).first(n));
    if (n == foreign.size()) {
      EXPECT_NO_THROW(SafetensorsFile(folder / "cut"));
    } else {
      EXPECT_THROW(SafetensorsFile(folder / "cut"), UsageError) << n;
    }
  }
}

TEST(Safetensors, AnyFlippedBitIsFound) {
  const Sample sample;
  Bytes bytes = encode_safetensors(std::span(sample.entries).last(8), sample.metadata);
  ASSERT_EQ(refusal(bytes), "");
  for (std::size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    bytes[bit / 8] ^= std::byte{1} << bit % 8;
    EXPECT_NE(refusal(bytes), "") << "bit " << bit % 8 << " of byte " << bit / 8;
    bytes[bit / 8] ^= std::byte{1} << bit % 8;
  }
  EXPECT_EQ(refusal(bytes), "");

  bytes.back() ^= std::byte{1};
  EXPECT_THAT(refusal(bytes), HasSubstr("the checksum of the data is "));
  // Negative control: without checksums nobody can tell.
  Bytes foreign = raw(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 4);
  foreign.back() ^= std::byte{1};
  EXPECT_EQ(refusal(foreign), "");
}

TEST(Safetensors, TamperedHeadersAreRefused) {
  const auto tensor = [](const std::string& name, const std::string& dtype, const std::string& shape,
                         const std::string& offsets) {
    return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape +
           ",\"data_offsets\":" + offsets + "}";
  };
  const std::string a = tensor("a", "U8", "[4]", "[0,4]");
  ASSERT_EQ(refusal(raw("{" + a + "}", 4)), "");  // the control of all that follow

  struct Case {
    std::string json;
    std::string says;
  };
  const std::string huge = "9223372036854775807";
  const std::vector<Case> cases = {
      // JSON
      {"", "does not begin with '{'"},
      {" {" + a + "}", "does not begin with '{'"},
      {"[" + a + "]", "does not begin with '{'"},
      {"{" + a, "no '}'"},
      {"{" + a + "}x", "behind the closing"},
      {"{" + a + "}{}", "behind the closing"},
      {"{" + a + ",}", "no '\"'"},
      {"{" + a + " " + a + "}", "no '}'"},
      {"{\"a\":1}", "no '{'"},
      {"{\"a\":null}", "no '{'"},
      {"{\"a", "a text without end"},
      {"{\"a\n\":1}", "a control character"},
      {"{\"\\x\":1}", "an unknown escape"},
      {"{\"\\u12g4\":1}", "an unknown escape"},
      {"{\"\\", "an unknown escape"},
      {"{\"\\ud83e\":1}", "half a surrogate pair"},
      {"{\"\\udd83\\ud83e\":1}", "half a surrogate pair"},
      {"{\"\\ud83e\\u0041\":1}", "half a surrogate pair"},
      {"{\"\xff\":1}", "not UTF-8"},
      {"{\"\xc0\x80\":1}", "not UTF-8"},
      {"{\"\xed\xa0\x80\":1}", "not UTF-8"},
      {"{\"\xf4\x90\x80\x80\":1}", "not UTF-8"},
      {"{\"\xe4\xbd\":1}", "not UTF-8"},
      {"{\"\xe4", "not UTF-8"},
      // fields of a tensor
      {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4]}}", "without dtype, shape or data_offsets"},
      {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", "second time"},
      {"{\"a\":{\"type\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", "the field 'type'"},
      {"{\"a\":{\"dtype\":8,\"shape\":[4],\"data_offsets\":[0,4]}}", "no '\"'"},
      {"{" + tensor("a", "Q8", "[4]", "[0,4]") + "}", "unknown type 'Q8'"},
      {"{" + tensor("a", "", "[4]", "[0,4]") + "}", "unknown type ''"},
      {"{" + tensor("a", "U8", "4", "[0,4]") + "}", "no '['"},
      {"{" + tensor("a", "U8", "[-4]", "[0,4]") + "}", "no whole number"},
      {"{" + tensor("a", "U8", "[4.0]", "[0,4]") + "}", "no ']'"},
      {"{" + tensor("a", "U8", "[4e0]", "[0,4]") + "}", "no ']'"},
      {"{" + tensor("a", "U8", "[04]", "[0,4]") + "}", "begins with 0"},
      {"{" + tensor("a", "U8", "[4,]", "[0,4]") + "}", "no whole number"},
      {"{" + tensor("a", "U8", "[[4]]", "[0,4]") + "}", "no whole number"},
      {"{" + tensor("a", "U8", "[\"4\"]", "[0,4]") + "}", "no whole number"},
      {"{" + tensor("a", "U8", "[9223372036854775808]", "[0,4]") + "}", "too large"},
      {"{" + tensor("a", "U8", "[4]", "[0]") + "}", "not two numbers"},
      {"{" + tensor("a", "U8", "[4]", "[0,4,4]") + "}", "not two numbers"},
      {"{" + tensor("a", "U8", "[4]", "[0,18446744073709551620]") + "}", "too large"},
      // shapes and offsets
      {"{" + tensor("a", "U8", "[" + huge + "," + huge + "]", "[0,4]") + "}", "is too large"},
      {"{" + tensor("a", "F32", "[4611686018427387905]", "[0,4]") + "}",
       "is too large"},  // 2^62 + 1: wraps to 4
      {"{" + tensor("a", "U8", "[3]", "[0,4]") + "}", "has 4 bytes, its type U8 and shape [3] ask for 3"},
      {"{" + tensor("a", "F32", "[4]", "[0,4]") + "}", "ask for 16"},
      {"{" + tensor("a", "F4", "[7]", "[0,4]") + "}", "whole byte"},
      {"{" + tensor("a", "U8", "[4]", "[4,0]") + "}", "ends before it begins"},
      {"{" + tensor("a", "U8", "[5]", "[0,5]") + "}", "cut off"},
      {"{" + tensor("a", "U8", "[" + huge + "]", "[0," + huge + "]") + "}", "is too large"},
      {"{" + tensor("a", "U8", "[3]", "[0,3]") + "}", "4 bytes of data, its header describes 3"},
      {"{" + tensor("a", "U8", "[3]", "[1,4]") + "}", "a hole before tensor 'a'"},
      {"{" + tensor("a", "U8", "[1]", "[0,1]") + "," + tensor("b", "U8", "[2]", "[2,4]") + "}",
       "a hole before"},
      {"{" + tensor("a", "U8", "[3]", "[0,3]") + "," + tensor("b", "U8", "[2]", "[2,4]") + "}", "overlaps"},
      {"{" + a + "," + tensor("b", "U8", "[4]", "[0,4]") + "}", "overlaps"},
      {"{}", "describes 0"},
      // names and metadata
      {"{" + a + "," + a + "}", "overlaps"},
      {"{" + tensor("a", "U8", "[2]", "[0,2]") + "," + tensor("a", "U8", "[2]", "[2,4]") + "}",
       "two tensors of the name"},
      {"{" + tensor("a", "U8", "[4]", "[0,4]") + "," + tensor("\\u0061", "U8", "[0]", "[4,4]") + "}",
       "two tensors of the name"},
      {"{\"__metadata__\":{\"n\":1}," + a + "}", "no '\"'"},
      {"{\"__metadata__\":{\"n\":{}}," + a + "}", "no '\"'"},
      {"{\"__metadata__\":\"n\"," + a + "}", "no '{'"},
      {"{\"__metadata__\":{\"n\":\"1\",\"n\":\"1\"}," + a + "}", "a second key"},
      {"{\"__metadata__\":{},\"__metadata__\":{}," + a + "}", "a second __metadata__"},
      {"{\"__metadata__\":{\"weft.crc32c\":\"00000000\"}," + a + "}", "one of its two checksums"},
      {"{\"__metadata__\":{\"weft.header_crc32c\":\"00000000\"}," + a + "}", "one of its two checksums"},
      {"{\"__metadata__\":{\"weft.crc32c\":\"0\",\"weft.header_crc32c\":\"0\"}," + a + "}", "8 hexadecimal"},
      {"{\"__metadata__\":{\"weft.crc32c\":\"0\",\"weft.header_crc32c\":\"\\u00300000000\"}," + a + "}",
       "8 hexadecimal"},
      {"{\"__metadata__\":{\"weft.crc32c\":\"0\",\"weft.header_crc32c\":\"00000000\"}," + a + "}",
       "checksum of the header is"},
  };
  for (const Case& c : cases) {
    EXPECT_THAT(refusal(raw(c.json, 4)), AllOf(HasSubstr("'some.safetensors': "), HasSubstr(c.says)))
        << c.json;
  }
}

TEST(Safetensors, TheLengthOfTheHeaderIsBounded) {
  const std::string json = R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})";
  EXPECT_THAT(refusal(raw(json, 4, json.size() + 5)), HasSubstr("does not fit"));
  EXPECT_THAT(refusal(raw(json, 4, 100'000'000)), HasSubstr("does not fit"));
  EXPECT_THAT(refusal(raw(json, 4, 100'000'001)), HasSubstr("above the limit"));
  EXPECT_THAT(refusal(raw(json, 4, std::numeric_limits<std::uint64_t>::max())), HasSubstr("above the limit"));
  EXPECT_THAT(refusal(raw(json, 4, 0)), HasSubstr("does not begin"));
}

TEST(Safetensors, EntriesThatDoNotHoldTogetherAreNotWritten) {
  const Folder folder;
  const fs::path path = folder / "a";
  const Bytes memory(8);
  const TensorEntry good{.name = "a", .dtype = "F32", .shape = {2}, .data = memory};
  const auto with = [&good](const std::function<void(TensorEntry&)>& change) {
    std::vector<TensorEntry> out = {good};
    change(out[0]);
    return out;
  };
  const auto says = [&path](const std::vector<TensorEntry>& entries, const Metadata& metadata,
                            const std::string& what) {
    EXPECT_THAT(write_refusal(path, entries, metadata), AllOf(HasSubstr(path.string()), HasSubstr(what)));
  };
  says(with([](TensorEntry& e) { e.dtype = "float"; }), {}, "unknown type 'float'");
  says(with([](TensorEntry& e) { e.shape = {3}; }), {}, "needs 12 bytes and was given 8");
  says(with([](TensorEntry& e) { e.shape = {-1, -2}; }), {}, "negative");
  says(with([](TensorEntry& e) { e.shape = {1ll << 62, 1ll << 62}; }), {}, "too large");
  says(with([](TensorEntry& e) { e.name = "__metadata__"; }), {}, "cannot be the name");
  says(with([](TensorEntry& e) { e.name = "\xff"; }), {}, "cannot be the name");
  says({good, good}, {}, "two tensors of the name 'a'");
  says({good}, {{"weft.crc32c", "1"}}, "the writer's own");
  says({good}, {{"a", "\xff"}}, "not UTF-8");
  EXPECT_TRUE(folder.names().empty());
  EXPECT_EQ(write_refusal(path, with([](TensorEntry&) {})), "");  // negative control
}

TEST(Safetensors, ErrorsOfTheSystemNameThePath) {
  const Folder folder;
  const Bytes memory(8);
  const std::vector<TensorEntry> entries = {{.name = "a", .dtype = "F32", .shape = {2}, .data = memory}};
  const fs::path missing = folder / "nowhere/a.safetensors";
  EXPECT_THAT(write_refusal(missing, entries),
              AllOf(HasSubstr(missing.string()), HasSubstr("No such file or directory")));
  fs::create_directory(folder / "folder");
  EXPECT_THAT(write_refusal(folder / "folder", entries), HasSubstr("Is a directory"));
  EXPECT_EQ(folder.names(), std::vector<std::string>{"folder"});

  const auto reading = [](const fs::path& path) {
    try {
      const SafetensorsFile file(path);
    } catch (const UsageError& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_THAT(reading(missing), AllOf(HasSubstr(missing.string()), HasSubstr("No such file or directory")));
  EXPECT_THAT(reading(folder / "folder"), HasSubstr("it is not a file"));
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_THAT(reading(folder / "pipe"), HasSubstr("it is not a file"));

  if (::geteuid() != 0) {  // root may write everywhere
    fs::permissions(folder / "folder", fs::perms::owner_read | fs::perms::owner_exec);
    EXPECT_THAT(write_refusal(folder / "folder/a", entries), HasSubstr("Permission denied"));
  }
}

TEST(Safetensors, AWriteThatFailsLeavesTheFileBeforeIt) {
  const Folder folder;
  const fs::path path = folder / "a";
  const Bytes small(8);
  const Bytes large(1 << 16, std::byte{3});
  const std::vector<TensorEntry> before = {{.name = "a", .dtype = "U8", .shape = {8}, .data = small}};
  const std::vector<TensorEntry> after = {{.name = "a", .dtype = "U8", .shape = {1 << 16}, .data = large}};
  write_safetensors(path, before);
  for (const rlim_t limit : {0, 1, 100, 4096, 1 << 16}) {
    std::string said;
    {
      const FileLimit full(limit);
      said = write_refusal(path, after);
    }
    EXPECT_THAT(said, AllOf(HasSubstr(path.string()), HasSubstr("cannot write: File too large"))) << limit;
    EXPECT_EQ(folder.names(), std::vector<std::string>{"a"});
    expect_same(before, SafetensorsFile(path));
  }
  write_safetensors(path, after);  // negative control: with room it is replaced
  expect_same(after, SafetensorsFile(path));
}

// In a child: a file system of 64 KiB in a mount namespace of its own.
int fill_a_disk(const fs::path& place) noexcept {
  constexpr int kCannot = 77;
  if (!testing::mount_small(place, "64k")) return kCannot;
  const Bytes small(8);
  const Bytes large(1 << 17);
  const std::vector<TensorEntry> before = {{.name = "a", .dtype = "U8", .shape = {8}, .data = small}};
  const std::vector<TensorEntry> after = {{.name = "a", .dtype = "U8", .shape = {1 << 17}, .data = large}};
  write_safetensors(place / "a", before);
  const std::string said = write_refusal(place / "a", after);
  std::fprintf(stderr, "%s\n", said.c_str());
  const auto files = std::distance(fs::directory_iterator(place), fs::directory_iterator());
  const bool same = SafetensorsFile(place / "a").find("a")->data.size() == small.size();
  write_safetensors(place / "a", before);  // and the room is there again
  return said.ends_with("No space left on device") && files == 1 && same ? 0 : 1;
}

TEST(Safetensors, AFullDiskLeavesTheFileBeforeIt) {
  const Folder folder;
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) ::_exit(fill_a_disk(folder.path()));
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == 77) GTEST_SKIP() << "a small file system cannot be mounted here";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(Safetensors, AKilledWriterLeavesAWholeFile) {
  const Folder folder;
  const fs::path path = folder / "a";
  const auto version = [](int v) { return Bytes(1 << 18, static_cast<std::byte>(v)); };
  const auto write = [&](int v) noexcept {  // a child must not come back from here
    const Bytes data = version(v);
    const std::vector<TensorEntry> entries = {{.name = "a", .dtype = "U8", .shape = {1 << 18}, .data = data}};
    write_safetensors(path, entries, {{"version", std::to_string(v)}});
  };
  write(0);
  for (int round = 0; round < 20; ++round) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      for (int v = 0;; v = (v + 1) % 100) write(v);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(500 + reference::hash(1, 0, round) % 5000));
    ASSERT_EQ(::kill(child, SIGKILL), 0);
    ASSERT_EQ(::waitpid(child, nullptr, 0), child);
    const SafetensorsFile file(path);
    EXPECT_TRUE(std::ranges::equal(file.find("a")->data, version(std::stoi(file.metadata().at("version")))));
  }
  for (const std::string& name : folder.names())
    EXPECT_TRUE(name == "a" || name.starts_with(".weft-")) << name;
}

TEST(Safetensors, TwoThreadsWriteIntoOneFolder) {
  const Folder folder;
  constexpr int kRounds = 20;
  const auto writer = [&folder](int me) {
    const Bytes data(5000, static_cast<std::byte>(me));
    const std::vector<TensorEntry> entries = {{.name = "a", .dtype = "U8", .shape = {5000}, .data = data}};
    for (int round = 0; round < kRounds; ++round) {
      write_safetensors(folder / std::to_string(me), entries, {{"round", std::to_string(round)}});
      const SafetensorsFile file(folder / std::to_string(me));
      EXPECT_EQ(file.metadata().at("round"), std::to_string(round));
      expect_same(entries, file);
    }
  };
  std::thread other(writer, 1);
  writer(2);
  other.join();
  EXPECT_EQ(folder.names(), (std::vector<std::string>{"1", "2"}));
}

TEST(Safetensors, APathWithoutAFolderIsHere) {
  const Folder folder;
  const fs::path before = fs::current_path();
  fs::current_path(folder.path());
  write_safetensors("a", {});
  fs::current_path(before);
  EXPECT_EQ(folder.names(), std::vector<std::string>{"a"});
}

// ---- the other end of safetensors_python_test.py ----

int exchange(const std::string& what, const fs::path& path) {
  Sample sample;
  if (what == "--write") {
    write_safetensors(path, sample.entries, sample.metadata);
    return 0;
  }
  std::erase_if(sample.entries, [](const TensorEntry& entry) {  // types that numpy has not
    return entry.dtype == "BF16" || entry.dtype.starts_with("F8");
  });
  const SafetensorsFile file(path);
  expect_same(sample.entries, file);
  EXPECT_EQ(file.metadata(), sample.metadata);
  EXPECT_FALSE(file.has_checksums());
  return ::testing::Test::HasFailure() ? 1 : 0;
}

}  // namespace
}  // namespace weft::wire

int main(int argc, char** argv) {
  ::testing::InitGoogleMock(&argc, argv);
  if (argc == 3) return weft::wire::exchange(argv[1], argv[2]);
  return RUN_ALL_TESTS();
}
