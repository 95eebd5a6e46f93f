// Files of a checkpoint that are not what they should be, and snapshots that must not become files: each is
// refused with one sentence that names the path.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>

#include "unit/checkpoint_samples.h"
#include "wire/safetensors.h"

namespace weft {
namespace {

using namespace checkpoint_samples;  // NOLINT(google-build-using-namespace): made for these tests
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string loading(const fs::path& dir) {
  return refusal([&] { load_checkpoint(dir, 5, 0, 2); });
}

TEST(CheckpointFiles, FilesOfOthersAreRefused) {
  const Folder dir;
  const fs::path shared = dir / "step-5/shared.safetensors";
  const fs::path rank0 = dir / "step-5/rank-0-of-2.safetensors";
  const fs::path rank1 = dir / "step-5/rank-1-of-2.safetensors";
  EXPECT_THAT(loading(dir), AllOf(HasSubstr(shared.string()), HasSubstr("No such file")));
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
  with(rank0, shared, "not the rank file of a weft checkpoint");
  with(shared, rank0, "not the shared file of a weft checkpoint");
  with(shared, dir / "step-6/shared.safetensors", "weft.step is 6");
  const std::vector<wire::TensorEntry> none;
  wire::write_safetensors(dir / "foreign", none, {{"format", "pt"}});
  with(shared, dir / "foreign", "not the shared file of a weft checkpoint");
  write_text(dir / "text", "not a checkpoint at all");
  with(shared, dir / "text", "");
  EXPECT_THAT(refusal([&] { load_checkpoint(dir, 5, 2, 2); }), HasSubstr("no rank 2 of 2"));
  EXPECT_THAT(refusal([&] { load_checkpoint(dir, 5, -1, 2); }), HasSubstr("no rank -1"));
  EXPECT_THAT(refusal([&] { load_checkpoint(dir, 5, 0, 0); }), HasSubstr("no rank 0 of 0"));
}

TEST(CheckpointFiles, DamageAnywhereIsFound) {
  const Folder dir;
  save(dir, 2, 5);
  for (const std::string name : {"step-5/shared.safetensors", "step-5/rank-0-of-2.safetensors"}) {
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
    const Bytes bytes =
        wire::encode_safetensors(entries, metadata);  // without the sync of write_safetensors()
    write_text(path, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  }
  template <class T>
  void set(const std::string& name, std::size_t i, T value) {
    ASSERT_TRUE(tensors.contains(name)) << name;
    std::memcpy(tensors[name].data.data() + i * sizeof(T), &value, sizeof(T));
  }
};

TEST(CheckpointFiles, TamperedFilesAreRefused) {
  const Folder dir;
  save(dir, 2, 5);
  const std::string shared = "step-5/shared.safetensors";
  const std::string rank = "step-5/rank-0-of-2.safetensors";
  struct Case {
    std::string file;
    std::function<void(Open&)> change;
    std::string says;
  };
  const auto meta = [](const std::string& key, const std::string& value) {
    return [=](Open& f) { f.metadata["weft." + key] = value; };
  };
  const auto number = [](const std::string& name, std::size_t i, std::int64_t value) {
    return [=](Open& f) { f.set(name, i, value); };
  };
  constexpr auto kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr auto kMost = std::numeric_limits<std::int64_t>::max();
  const std::vector<Case> cases = {
      {shared, meta("version", "2"), "version '2'"},
      {shared, [](Open& f) { f.metadata.erase("weft.version"); }, "no weft.version"},
      {shared, meta("step", "4"), "weft.step is 4"},
      {shared, meta("step", "5x"), "no such number"},
      {shared, meta("size", "3"), "rank-0-of-3.safetensors"},
      {shared, meta("size", "0"), "it is of 0 ranks"},
      {shared, meta("size", "99999999999"), "no such number"},
      {shared, meta("seed", "-1"), "no such number"},
      {shared, meta("seed", "1"), "weft.seed is"},
      {shared, meta("lr", "nan"), "learning rate"},
      {shared, meta("lr", "-1"), "learning rate"},
      {shared, meta("lr", "fast"), "no such number"},
      {shared, meta("model", "wte\nwte\na scalar\nempty"), "two model tensors of the name 'wte'"},
      {shared, meta("model", "wte\nh.0/ü\na scalar"), "tensors where"},
      {shared, meta("model", "wte\nh.0/ü\na scalar\nempty\n"), "empty name"},
      {shared, meta("model", "wte\nh.0/ü\na scalar\nempty\nother"), "no tensor 'model/other'"},
      {shared, meta("optimizer_parameters", "wte"), "expected I64 [1]"},
      {shared, meta("optimizer_vectors", "exp_avg"), "tensors where"},
      {shared, meta("optimizer_vectors", "exp_avg\nexp_avg_sq\nmax"), "no tensor 'optimizer/wte/max'"},
      {shared, number("optimizer/step", 0, -1), "the optimizer's step of 'wte' is -1"},
      {shared, [](Open& f) { f.set("model/wte", 2, kNan); },
       "'wte' of the model has a value that is not finite"},
      {shared, [](Open& f) { f.set("model/h.0/ü", 4, INFINITY * 1.0); }, "not finite"},
      {shared, [](Open& f) { f.set("optimizer/wte/exp_avg", 2, kNan); }, "exp_avg of 'wte' has a value"},
      {shared, [](Open& f) { f.tensors["model/wte"].dtype = "I32"; }, "is I32, not F32 or F64"},
      {shared, [](Open& f) { f.tensors["optimizer/wte/exp_avg"].shape = {3, 4}; }, "expected F32 [12]"},
      {shared, [](Open& f) { f.tensors["extra/random"].dtype = "I8"; }, "expected U8"},
      {shared, [](Open& f) { f.tensors["other"] = {"U8", {0}, {}}; }, "tensors where"},
      {shared, [](Open& f) { f.tensors.erase("model/wte"); }, "no tensor 'model/wte'"},
      {rank, meta("rank", "1"), "weft.rank is 1"},
      {rank, meta("size", "3"), "weft.size is 3, expected 2"},
      {rank, meta("seed", "1"), "weft.seed is 1"},
      {rank, meta("state_step", "-1"), "committed steps is -1"},
      {rank, meta("parameters", "wte\nh.0/ü\nnone yet\nnone yet"), "two parameters of the name 'none yet'"},
      {rank, meta("parameters", "wte"), "expected I64 [1]"},
      {rank, meta("buckets", "4"), "expected I64 [4]"},
      {rank, meta("buckets", "-1"), "-1 buckets"},
      {rank, meta("buckets", std::to_string(kMost)), "buckets"},
      {rank, [](Open& f) { f.set("residual/wte", 0, kNan); },
       "residual of 'wte' has a value that is not finite"},
      {rank, [](Open& f) { f.tensors.erase("residual/wte"); }, "weft.residuals is 2, expected 1"},
      {rank, [](Open& f) { f.tensors["residual/empty"] = {"F32", {1}, Bytes(4)}; }, "expected 3"},
      {rank, [](Open& f) { f.set("velocity/h.0/ü", 0, kNan); }, "the velocity of 'h.0/"},
      {rank, [](Open& f) { f.tensors.erase("velocity/h.0/ü"); }, "weft.velocities is 1, expected 0"},
      {rank, [](Open& f) { f.metadata.erase("weft.velocities"); }, "no weft.velocities"},
      {rank, [](Open& f) { f.tensors["velocity/h.0/ü"] = {"F32", {6}, Bytes(24)}; }, "has 6 elements, not 5"},
      {rank, [](Open& f) { f.set("factor/wte", 0, kNan); },
       "the factor of 'wte' has a value that is not finite"},
      {rank, [](Open& f) { f.tensors.erase("factor/wte"); }, "weft.factors is 1, expected 0"},
      {rank, [](Open& f) { f.tensors["factor/wte"].shape = {6}; }, "the factor of 'wte' is not a matrix"},
      {rank,
       [](Open& f) {
         f.tensors["factor/wte"].shape = {0, 6};
         f.tensors["factor/wte"].data.clear();
       },
       "is not a matrix"},
      {rank, [](Open& f) { f.tensors["factor/wte"] = {"F32", {2, 7}, Bytes(56)}; },
       "14 elements in 2 columns"},
      {rank, [](Open& f) { f.tensors["factor/wte"].dtype = "I32"; }, "expected F32 [2,3]"},
      {rank, number("parameter/count", 0, 11), "has 12 elements, not 11"},
      {rank, number("parameter/count", 2, -1), "elements of 'none yet' is -1"},
      {rank, number("parameter/count", 2, kMost), "elements of 'none yet' is"},
      {rank, [](Open& f) { f.set("parameter/scale", 0, -2.0); }, "the scale of 'wte'"},
      {rank, [](Open& f) { f.set("parameter/scale", 0, NAN * 1.0); }, "the scale of 'wte'"},
      {rank, number("bucket/num_parameters", 0, 3), "lists of its buckets"},
      {rank, number("bucket/num_parameters", 0, -1), "lists of its buckets"},
      {rank, number("bucket/num_parameters", 1, kMost), "lists of its buckets"},
      {rank, number("bucket/num_regions", 0, 2), "lists of its buckets"},
      {rank, number("bucket/parameters", 0, 4), "parameter 4 of 4"},
      {rank, number("bucket/parameters", 0, -1), "parameter -1 of 4"},
      {rank, number("bucket/parameters", 0, 2), "the regions of a bucket of 19 elements"},
      {rank, number("bucket/team_quota", 0, 18), "the team quota of a bucket of 17 elements"},
      {rank, number("bucket/team_quota", 1, -kMost), "the team quota"},
      {rank, number("bucket/team_quota", 2, 2), "inertia of a team quota is 2"},
      {rank, [](Open& f) { f.set("bucket/thresholds", 0, -1.0F); }, "the thresholds"},
      {rank, [](Open& f) { f.set("bucket/thresholds", 1, kNan); }, "the thresholds"},
      {rank, number("bucket/threshold_steps", 0, 18), "the thresholds"},
      {rank, number("bucket/threshold_steps", 1, kMost), "the thresholds"},
      {rank, number("bucket/regions", 0, 1), "the regions"},
      {rank, number("bucket/regions", 1, 18), "the regions"},
      {rank, number("bucket/regions", 2, 16), "the regions"},
  };
  for (const Case& c : cases) {
    const std::string before = read_text(dir / c.file);
    Open file(dir / c.file);
    file.write(dir / c.file);
    ASSERT_EQ(loading(dir), "");  // negative control: taken apart and put together it is the same
    c.change(file);
    file.write(dir / c.file);
    EXPECT_THAT(loading(dir), AllOf(HasSubstr((dir / "step-5").string()), HasSubstr(c.says))) << c.says;
    EXPECT_THAT(loading(dir), ::testing::Not(HasSubstr("\n")));
    write_text(dir / c.file, before);
  }
}

TEST(CheckpointFiles, FilesFromBeforeThereWereVelocitiesLoad) {
  const Folder dir;
  save(dir, 1, 5);
  Open file(dir / "step-5/rank-0-of-1.safetensors");
  file.tensors.erase("velocity/h.0/ü");
  file.metadata.erase("weft.velocities");
  file.write(dir / "step-5/rank-0-of-1.safetensors");
  StateSnapshot expected = state_of(0, 1);
  expected.parameters[1].velocity.clear();
  EXPECT_TRUE(same(load_checkpoint(dir, 5, 0, 1).state, expected));
}

TEST(CheckpointFiles, SnapshotsThatCouldNotBeLoadedAreNotWritten) {
  const Folder dir;
  save(dir, 2, 4);
  begin_checkpoint(dir, 5);
  const auto says = [&dir](const std::function<void(TrainingSnapshot&)>& change, const std::string& what) {
    TrainingSnapshot s = snapshot_of(0, 2, 5);
    change(s);
    const std::string shared = refusal([&] { write_shared(dir, s); });
    const std::string rank = refusal([&] { write_rank(dir, s); });
    EXPECT_THAT(shared + rank, AllOf(HasSubstr((dir / ".step-").string()), HasSubstr(what)));
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  says([&](auto& s) { std::memcpy(s.model[0].bytes.data(), &nan, 4); }, "not finite");
  says([](auto& s) { s.model[0].dtype = DType::int32; }, "int32, not float32");
  says([](auto& s) { s.model[0].shape = {5}; }, "needs 20 bytes");
  says([](auto& s) { s.model[1].name = "wte"; }, "two model tensors");
  says([](auto& s) { s.model[1].name = ""; }, "cannot be the name");
  says([](auto& s) { s.model[1].name = "a\nb"; }, "cannot be the name");
  says([](auto& s) { s.metadata["weft.step"] = "3"; }, "weft's own");
  says([](auto& s) { s.optimizer.lr = INFINITY; }, "learning rate");
  says([](auto& s) { s.optimizer.parameters[1].vectors.pop_back(); }, "other vectors");
  says([](auto& s) { s.extra[""] = {}; }, "cannot be the name");
  says([&](auto& s) { s.state.parameters[0].residual[0] = nan; }, "not finite");
  says([](auto& s) { s.state.parameters[0].residual.pop_back(); }, "has 11 elements, not 12");
  says([&](auto& s) { s.state.parameters[1].velocity[3] = nan; }, "not finite");
  says([](auto& s) { s.state.parameters[0].velocity.resize(3); }, "has 3 elements, not 12");
  says([](auto& s) { s.state.parameters[0].factor_rank = 4; }, "6 elements in 4 columns");
  says([](auto& s) { s.state.rank = 2; }, "no rank 2 of 2");
  says([](auto& s) { s.state.controllers[0].parameters[0] = "who"; }, "unknown parameter 'who'");
  says([](auto& s) { s.state.controllers[0].thresholds.regions = {0, 17}; }, "the regions");
  says([](auto& s) { s.step = 9; }, ".step-9.tmp");  // not begun
  EXPECT_EQ(latest_checkpoint(dir), 4);
}

}  // namespace
}  // namespace weft
