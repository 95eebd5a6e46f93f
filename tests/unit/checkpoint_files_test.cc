// Files of a checkpoint that are not what they should be, and state that must not become files: each is
// refused with one sentence that names the path.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <map>

#include "state/row_lines.h"
#include "unit/checkpoint_samples.h"
#include "wire/safetensors.h"

namespace weft {
namespace {

using namespace checkpoint_samples;  // NOLINT(google-build-using-namespace): made for these tests
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string loading(const fs::path& dir) {
  return refusal([&] { load(dir, 5, 0, 2); });
}

TEST(CheckpointFiles, FilesOfOthersAreRefused) {
  const Folder dir;
  const fs::path index = dir / "step-5/index.safetensors";
  const fs::path rank0 = dir / "step-5/rank-0-of-2.safetensors";
  const fs::path rank1 = dir / "step-5/rank-1-of-2.safetensors";
  EXPECT_THAT(loading(dir), AllOf(HasSubstr(index.string()), HasSubstr("No such file")));
  save(dir, 2, 6);
  save(dir, 3, 7);
  save(dir, 2, 5);
  ASSERT_EQ(loading(dir), "");
  const auto with = [&](const fs::path& path, const fs::path& other, const std::string& says) {
    const std::string before = read_text(path);
    fs::copy_file(other, path, fs::copy_options::overwrite_existing);
    EXPECT_THAT(loading(dir), AllOf(HasSubstr("'" + path.string() + "': "), HasSubstr(says)));
    write_text(path, before);
    EXPECT_EQ(loading(dir), "");
  };
  with(rank0, rank1, "weft.rank is 1, expected 0");
  with(rank0, dir / "step-6/rank-0-of-2.safetensors", "weft.step is 6, expected 5");
  with(rank0, dir / "step-7/rank-0-of-3.safetensors", "weft.step is 7");
  with(rank0, index, "not the shards file of a weft checkpoint");
  with(index, rank0, "not the index file of a weft checkpoint");
  with(index, dir / "step-6/index.safetensors", "weft.step is 6");
  const std::vector<wire::TensorEntry> none;
  wire::write_safetensors(dir / "foreign", none, {{"format", "pt"}});
  with(index, dir / "foreign", "not the index file of a weft checkpoint");
  write_text(dir / "text", "not a checkpoint at all");
  with(index, dir / "text", "");
  // The same step and seed of another run: only its contents tell.
  const Folder twin;
  begin_checkpoint(twin, 5);
  for (int r = 0; r < 2; ++r) {
    Sample sample(r, 2);
    if (r == 0) sample.state.bucket(0).work().residual[0] += 1;
    write_rank(twin, sample, 5);
  }
  commit_checkpoint(twin, info_of(5), 2);
  with(rank0, twin / "step-5/rank-0-of-2.safetensors", "not the file that the index was made of");
}

TEST(CheckpointFiles, CheckpointsOfVersionOneSayWhatToDo) {
  const Folder dir;
  save(dir, 2, 5);
  fs::rename(dir / "step-5/index.safetensors", dir / "step-5/shared.safetensors");
  EXPECT_THAT(loading(dir), AllOf(HasSubstr((dir / "step-5").string()), HasSubstr("version 1"),
                                  HasSubstr("finish that run with the weft that wrote it")));
}

TEST(CheckpointFiles, DamageAnywhereIsFound) {
  const Folder dir;
  save(dir, 2, 5);
  for (const std::string name : {"step-5/index.safetensors", "step-5/rank-0-of-2.safetensors"}) {
    const std::string whole = read_text(dir / name);
    for (std::size_t n = 0; n < whole.size(); n += 1 + n / 8) {
      write_text(dir / name, whole.substr(0, n));
      EXPECT_THAT(loading(dir), HasSubstr("'" + (dir / name).string() + "': ")) << n;
    }
    for (std::size_t at = 0; at < whole.size(); at += 5) {
      std::string flipped = whole;
      flipped[at] = static_cast<char>(flipped[at] ^ 1 << at % 8);
      write_text(dir / name, flipped);
      EXPECT_THAT(loading(dir), HasSubstr("'" + (dir / name).string() + "': ")) << at;
      if (at % 20 == 0) {
        EXPECT_EQ(latest_checkpoint(dir), std::nullopt) << at;
      }
    }
    write_text(dir / name, whole);
    ASSERT_EQ(loading(dir), "");
  }
}

// A file taken apart, changed, and put together with right checksums.
struct Open {
  struct Tensor {
    std::string dtype;
    std::vector<std::int64_t> shape;
    Bytes data;
  };
  std::map<std::string, Tensor> tensors;
  wire::Metadata metadata;

  explicit Open(const fs::path& path) {
    const wire::SafetensorsFile file(path);
    metadata = file.metadata();
    for (const wire::TensorEntry& e : file.entries()) {
      tensors[e.name] = {e.dtype, e.shape, {e.data.begin(), e.data.end()}};
    }
  }
  void write(const fs::path& path) const {
    std::vector<wire::TensorEntry> entries;
    for (const auto& [name, t] : tensors)
      entries.push_back({.name = name, .dtype = t.dtype, .shape = t.shape, .data = t.data});
    // Without the sync of write_safetensors().
    const Bytes bytes = wire::encode_safetensors(entries, metadata);
    write_text(path, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  }
  template <class T>
  void set(const std::string& name, std::size_t i, T value) {
    ASSERT_TRUE(tensors.contains(name)) << name;
    std::memcpy(tensors[name].data.data() + i * sizeof(T), &value, sizeof(T));
  }
  void replace(const std::string& key, const std::string& from, const std::string& to) {
    std::string& text = metadata.at(key);
    ASSERT_NE(text.find(from), std::string::npos) << from;
    text.replace(text.find(from), from.size(), to);
  }
};

constexpr const char* kRank0 = "rank-0-of-2.safetensors";

// What the index says of rank 0's file, made to agree with the file, and the file's lines with its tensors.
void seal(const fs::path& folder, bool lines_too) {
  Open file(folder / kRank0);
  if (lines_too) {
    std::string text;
    for (RowLine& line : lines_of(file.metadata.at("weft.rows"), "test")) {
      if (line.held == RowLine::Held::here)
        line.checksums = checksums_of(file.tensors.at(tensor_name(line.row)).data);
      text += text_of(line) + "\n";
    }
    file.metadata["weft.rows"] = text;
    file.write(folder / kRank0);
  }
  Open index(folder / "index.safetensors");
  const std::string& lines = file.metadata.at("weft.rows");
  const auto bytes = std::as_bytes(std::span(lines));
  index.tensors[std::string("rows/") + kRank0] = {
      "U8", {static_cast<std::int64_t>(lines.size())}, {bytes.begin(), bytes.end()}};
  index.metadata[std::string("weft.file.") + kRank0] =
      wire::SafetensorsReader(folder / kRank0).header_checksum();
  index.write(folder / "index.safetensors");
}

struct Case {
  std::function<void(Open&)> change;
  std::string says;
};

void expect_refused(const std::string& file, bool sealed, bool lines_too, const std::vector<Case>& cases) {
  const Folder dir;
  save(dir, 2, 5);
  const fs::path folder = dir / "step-5";
  const std::string before = read_text(folder / file);
  const std::string index = read_text(folder / "index.safetensors");
  for (const Case& c : cases) {
    Open open(folder / file);
    open.write(folder / file);
    if (sealed) seal(folder, lines_too);
    ASSERT_EQ(loading(dir), "");  // negative control: taken apart and put together it is the same
    c.change(open);
    open.write(folder / file);
    if (sealed) seal(folder, lines_too);
    EXPECT_THAT(loading(dir), AllOf(HasSubstr(folder.string()), HasSubstr(c.says))) << c.says;
    EXPECT_THAT(loading(dir), ::testing::Not(HasSubstr("\n")));
    EXPECT_EQ(latest_checkpoint(dir), std::nullopt) << c.says;
    write_text(folder / file, before);
    write_text(folder / "index.safetensors", index);
  }
}

auto meta(const std::string& key, const std::string& value) {
  return [=](Open& f) { f.metadata["weft." + key] = value; };
}

TEST(CheckpointFiles, TamperedIndexesAreRefused) {
  const auto in_rows = [](const std::string& from, const std::string& to) {
    return [=](Open& f) {
      Open::Tensor& rows = f.tensors.at(std::string("rows/") + kRank0);
      std::string text(reinterpret_cast<const char*>(rows.data.data()), rows.data.size());
      ASSERT_NE(text.find(from), std::string::npos) << from;
      text.replace(text.find(from), from.size(), to);
      const auto bytes = std::as_bytes(std::span(text));
      rows.data.assign(bytes.begin(), bytes.end());
      rows.shape = {static_cast<std::int64_t>(text.size())};
    };
  };
  expect_refused(
      "index.safetensors", false, false,
      {
          {meta("version", "3"), "version '3'"},
          {[](Open& f) { f.metadata.erase("weft.version"); }, "no weft.version"},
          {meta("step", "4"), "weft.step is 4"},
          {meta("step", "5x"), "no such number"},
          {meta("size", "3"), "it has no rows of rank-0-of-3.safetensors"},
          {meta("size", "0"), "it is of 0 ranks"},
          {meta("size", "99999999999"), "no such number"},
          {meta("seed", "-1"), "no such number"},
          {meta("seed", "1"), "weft.seed is"},
          {[](Open& f) { f.metadata.erase(std::string("weft.file.") + kRank0); }, "no weft.file.rank-0"},
          {meta(std::string("file.") + kRank0, "00000000"), "not the file that the index was made of"},
          {[](Open& f) { f.tensors["extra/random"].dtype = "I8"; }, "expected U8"},
          {[](Open& f) { f.tensors["other"] = {"U8", {0}, {}}; }, "tensors where"},
          {[](Open& f) { f.tensors.erase(std::string("rows/") + kRank0); }, "it has no rows of rank-0"},
          // Ranges.
          {in_rows("6,10 0,0 6,5", "6,10 0,1 6,5"), "overlaps"},
          {in_rows("6,10 0,0 6,5", "6,10 0,0 6,4"), "'columns'"},
          {in_rows("6,10 0,0 6,5", "6,10 0,6 6,5"), "is not inside of"},
          {in_rows("6,10 0,0 6,5", "6,10 -1,0 6,5"), "is not inside of"},
          {in_rows("6,10 0,0 6,5", "6,9223372036854775807 0,0 6,5"), "too large"},
          {in_rows("6,10 0,0 6,5", "6,10 0 6,5"), "dimensions"},
          {in_rows("6,10 0,0 6,5", "6,10 0,0x 6,5"), "is not that of a row"},
          {in_rows("6,10 0,0 6,5", "6,10 0,0,6,5"), "row"},
          // Two shards of equal size that change places: each would be whole.
          {[&](Open& f) {
             in_rows("8,2,3 0,0,0 1,2,3", "8,2,3 9,0,0 1,2,3")(f);
             in_rows("8,2,3 2,0,0 1,2,3", "8,2,3 0,0,0 1,2,3")(f);
             in_rows("8,2,3 9,0,0 1,2,3", "8,2,3 2,0,0 1,2,3")(f);
           },
           "not the file that the index was made of"},
          {in_rows("here moves float32", "here moves float16"), "is not that of a row"},
          {in_rows("here moves float32", "here moved float32"), "is not that of a row"},
          {in_rows("here moves float32", "told moves float32"), "is in no file"},
          {in_rows("here restart int64", "told restart int64"), "is not that of a row"},
          {in_rows("here sum float32 0/2", "here sum float32 2/2"), "of peer 2 of 2"},
          {in_rows("here sum float32 0/2", "here sum float32 1/2"), ""},
          {in_rows("here sum float32 0/2", "here sum float32 0/3"), "(the number of its peers)"},
          {in_rows("here sum float32 0/2", "here sum float32 2147483646/2147483647"),
           "(the number of its peers)"},
          {in_rows("here sum float32 0/2/1 ", "here sum float32 0/2/2 "), "(its divisor)"},
          {in_rows("here sum float32 0/2/1 ", "here sum float32 0/2 "), "(its divisor)"},
          {in_rows("here sum float32 0/2/1 ", "here sum float32 0/2/inf "),
           "a divisor that is no such number"},
          {in_rows("here sum float32 0/2", "zeros sum float32 0/2"), "is not that of a row"},
          {in_rows(" data_parallel residual ", " data_parallel  "), "is not that of a row"},
      });
}

// A sum's line tells its divisor, to the bit; one of before it was told is read, and written, without.
TEST(CheckpointFiles, LinesTellDivisorsOfSums) {
  StateRow row{{"a", "residual", "x"}, DType::float32, LayoutRule::sum, Shard::whole({2}), {1, 3}};
  for (const auto& [divisor, peers] : {std::pair{4.0, "1/3/4"}, std::pair{0.1, "1/3/0.1"},
                                       std::pair{0.0, "1/3"}, std::pair{1.0 / 3, "1/3/0.3333333333333333"}}) {
    row.divisor = divisor;
    const std::string text = text_of(RowLine{.row = row, .held = RowLine::Held::zeros, .checksums = ""});
    EXPECT_EQ(text, "zeros sum float32 " + std::string(peers) + " 2 0 2 a residual - x");
    EXPECT_EQ(lines_of(text, "test").at(0).row, row);
  }
  for (const char* peers :
       {"1/3/", "1/3/0", "1/3/-4", "1/3/nan", "1/3/inf", "1/3/4/4", "1/3/4x", "1//4", "/3/4"}) {
    EXPECT_NE(refusal([&] {
                lines_of("zeros sum float32 " + std::string(peers) + " 2 0 2 a residual - x", "test");
              }),
              "")
        << peers;
  }
  const std::string moves = " 2 0 2 a value 00000000 x";
  EXPECT_EQ(refusal([&] { lines_of("told moves float32 1/3" + moves, "test"); }), "");
  EXPECT_NE(refusal([&] { lines_of("told moves float32 1/3/3" + moves, "test"); }), "");
}

TEST(CheckpointFiles, TamperedShardsAreRefused) {
  const std::vector<Case> heads = {
      {meta("rank", "1"), "weft.rank is 1"},
      {meta("size", "3"), "weft.size is 3, expected 2"},
      {meta("seed", "1"), "weft.seed is 1"},
      {[](Open& f) { f.metadata.erase("weft.rows"); }, "no weft.rows"},
      {[](Open& f) { f.set("data_parallel/residual/wte", 0, 1.0F); },
       "not the file that the index was made of"},
  };
  expect_refused(kRank0, false, false, heads);
  // With an index that is right about the file.
  expect_refused(
      kRank0, true, false,
      {{[](Open& f) { f.set("data_parallel/residual/wte", 0, 1.0F); },
        "the checksum of the residual of 'wte'"},
       {[](Open& f) { f.tensors.erase("data_parallel/residual/wte"); },
        "no tensor 'data_parallel/residual/wte'"},
       {[](Open& f) { f.tensors["data_parallel/residual/wte"].dtype = "I32"; }, "not what its line tells"},
       {[](Open& f) { f.tensors["data_parallel/residual/wte"].shape = {3, 4}; }, "not what its line tells"},
       {[](Open& f) { f.tensors["other"] = {"U8", {0}, {}}; }, "tensors where"}});
}

// With checksums that are right everywhere: what is left are the owners' own rules.
TEST(CheckpointFiles, ValuesThatCannotBeAreRefused) {
  const Folder dir;
  save(dir, 2, 5);
  const fs::path folder = dir / "step-5";
  const std::string before = read_text(folder / kRank0);
  const std::string index = read_text(folder / "index.safetensors");
  const std::string bucket = bucket_name(plan(), 0);
  constexpr auto kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr auto kMost = std::numeric_limits<std::int64_t>::max();
  const auto number = [](const std::string& name, std::size_t i, std::int64_t value) {
    return [=](Open& f) { f.set(name, i, value); };
  };
  const std::string dp = "data_parallel/";
  const auto figure = [&](std::size_t i, double value) {
    return [=](Open& f) { f.set(dp + "team_figures/" + bucket, i, value); };
  };
  const std::vector<Case> cases = {
      {[&](Open& f) { f.set(dp + "residual/wte", 0, kNan); },
       "the residual of 'wte' has a value that is not finite"},
      {[&](Open& f) { f.set(dp + "velocity/h.0/ü", 0, kNan); }, "the velocity of 'h.0/"},
      {number(dp + "team_quota/" + bucket, 0, 18), "the team quota of a bucket of 17 elements"},
      {number(dp + "team_quota/" + bucket, 1, -kMost), "the team quota"},
      {number(dp + "team_quota/" + bucket, 2, 2), "the team quota"},
      {figure(0, 0.5), "the team figures"},
      {figure(0, 65), "the team figures"},
      {figure(1, 3), "the team figures"},
      {figure(2, 2), "the team figures"},
      {figure(3, 18), "the team figures"},
      {figure(4, -1), "the team figures"},
      {figure(5, 1.1), "the team figures"},
      {figure(6, 0.5), "the team figures"},
      {figure(7, -1), "the team figures"},
      {[&](Open& f) { f.set(dp + "thresholds/" + bucket, 0, -1.0F); }, "the thresholds"},
      {[&](Open& f) { f.set(dp + "thresholds/" + bucket, 1, kNan); }, "the thresholds"},
      {number(dp + "threshold_steps/" + bucket, 0, 18), "the thresholds"},
      {number(dp + "threshold_steps/" + bucket, 1, kMost), "the thresholds"},
      {number(dp + "regions/" + bucket, 0, 1), "the regions"},
      {number(dp + "regions/" + bucket, 1, 18), "the regions"},
      {number(dp + "regions/" + bucket, 2, 16), "the regions"},
      {[&](Open& f) { f.set("model/value/columns [0:6,0:5] of [6,10]", 2, kNan); }, "not finite"},
  };
  for (const Case& c : cases) {
    Open open(folder / kRank0);
    c.change(open);
    open.write(folder / kRank0);
    seal(folder, true);
    EXPECT_THAT(loading(dir), AllOf(HasSubstr(folder.string()), HasSubstr(c.says))) << c.says;
    EXPECT_THAT(loading(dir), ::testing::Not(HasSubstr("\n")));
    write_text(folder / kRank0, before);
    write_text(folder / "index.safetensors", index);
    ASSERT_EQ(loading(dir), "");
  }
}

TEST(CheckpointFiles, StateThatCouldNotBeLoadedIsNotWritten) {
  const Folder dir;
  save(dir, 2, 4);
  begin_checkpoint(dir, 5);
  const auto says = [&dir](const std::function<void(Sample&, CheckpointInfo&)>& change,
                           const std::string& what) {
    Sample sample(0, 2);
    CheckpointInfo info = info_of(5);
    change(sample, info);
    EXPECT_THAT(refusal([&] { write_shards(dir, info, sample.registry, sample.rank, sample.size); }),
                AllOf(HasSubstr((dir / ".step-").string()), HasSubstr(what)));
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  says([&](auto& s, auto&) { std::memcpy(s.tensors.bytes(4).data(), &nan, 4); }, "not finite");
  says([](auto& s, auto&) { s.tensors.row(4).dtype = DType::int32; }, "int32, not float32");
  says([](auto& s, auto&) { s.tensors.row(4).shard.extent = {6, 4}; }, "has 30 elements, not 24");
  says([](auto& s, auto&) { s.tensors.row(1).key.name = "wte"; }, "twice");
  says([](auto& s, auto&) { s.tensors.row(1).key.name = ""; }, "cannot be the name");
  says([](auto& s, auto&) { s.tensors.row(1).key.name = "a\nb"; }, "cannot be the name");
  says([](auto&, auto& i) { i.metadata["weft.step"] = "3"; }, "weft's own");
  says([](auto&, auto& i) { i.extra[""] = {}; }, "cannot be the name");
  says([](auto&, auto& i) { i.step = -1; }, "the step is -1");
  says([&](auto& s, auto&) { s.state.bucket(0).work().residual[0] = nan; }, "not finite");
  says([](auto& s, auto&) { s.state.bucket(0).work().thresholds.regions = {0, 17}; }, "the regions");
  says([](auto& s, auto&) { s.rank = 2; }, "of peer 2 of 2");
  says([](auto& s, auto&) { s.size = 0; }, "of peer 0 of 0");
  says([](auto&, auto& i) { i.step = 9; }, ".step-9.tmp");  // not begun
  EXPECT_EQ(latest_checkpoint(dir), 4);
}

}  // namespace
}  // namespace weft
