// Outlines: what is refused, their files, and the events and gradients that drivers take from them.
#include "workload/outline.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <limits>
#include <numeric>

#include "files.h"
#include "measure/outline_file.h"
#include "weft/error.h"
#include "workload/model_shapes.h"
#include "workload/step_parts.h"

namespace weft {
namespace {

Outline sample() {
  Outline out;
  out.model = "gpt";
  out.parameters = 12 + 3 + 20;
  out.tokens_per_rank = 64;
  out.other_seconds = 0.25;
  out.blocks = {{"embedding", 1, 2, 3}, {"layer", 0.5, 4, 0.125}};
  out.tensors = {{"table", 12, 4, 3, 0, 1.0}, {"bias", 3, 0, 0, 1, 0.75}, {"weight", 20, 5, 4, 1, 0.25}};
  out.tables = {{"table", 4, 3, 2.5}};
  return out;
}

// The sentence that an outline is refused with; empty if it is not.
std::string refusal(const std::function<void(Outline&)>& spoil) {
  Outline outline = sample();
  spoil(outline);
  try {
    check(outline, "here");
  } catch (const UsageError& e) {
    return e.what();
  }
  return "";
}

TEST(Outline, AcceptsWhatIsSound) {
  EXPECT_EQ(refusal([](Outline&) {}), "");
  EXPECT_EQ(refusal([](Outline& o) { o.tables.clear(); }), "");
  EXPECT_EQ(refusal([](Outline& o) { o.blocks[0].forward_seconds = 1e4; }), "");
  EXPECT_EQ(refusal([](Outline& o) { o.source = "flops", o.flops_per_second = 1e12; }), "");
}

TEST(Outline, RefusesEverythingElseInOneSentence) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), inf = std::numeric_limits<double>::infinity();
  const std::vector<std::pair<std::function<void(Outline&)>, std::string>> cases = {
      {[](Outline& o) { o.source = "guessed"; }, "guessed"},
      {[](Outline& o) { o.source = "flops"; }, "flops_per_second"},
      {[](Outline& o) { o.flops_per_second = 1; }, "flops_per_second"},
      {[](Outline& o) { o.side_by_side = 0; }, "side_by_side"},
      {[](Outline& o) { o.tokens_per_rank = 0; }, "tokens_per_rank"},
      {[&](Outline& o) { o.other_seconds = nan; }, "other_seconds"},
      {[](Outline& o) { o.blocks.clear(); }, "no block"},
      {[](Outline& o) { o.tensors.clear(); }, "no tensor"},
      {[](Outline& o) { o.blocks[1].name = "embedding"; }, "embedding"},
      {[](Outline& o) { o.blocks[1].name.clear(); }, "no name"},
      {[](Outline& o) { o.blocks[0].forward_seconds = -1; }, "forward"},
      {[&](Outline& o) { o.blocks[0].backward_seconds = inf; }, "backward"},
      {[&](Outline& o) { o.blocks[0].update_seconds = nan; }, "update"},
      {[](Outline& o) { o.blocks[0].forward_seconds = 1e6; }, "more than a day"},
      {[](Outline& o) { o.tensors[0].name = "bias"; }, "bias"},
      {[](Outline& o) { o.tensors[0].length = 0; }, "table"},
      {[](Outline& o) { o.tensors[0].rows = 5; }, "rows"},
      {[](Outline& o) { o.tensors[0].rows = 0; }, "rows"},
      {[](Outline& o) { o.tensors[1].block = 2; }, "block 2"},
      {[](Outline& o) { o.tensors[1].block = -1; }, "block -1"},
      {[](Outline& o) { o.tensors[0].block = 1, o.tensors[1].block = 0; }, "later block"},
      {[&](Outline& o) { o.tensors[0].ready = nan; }, "ready"},
      {[](Outline& o) { o.tensors[0].ready = 1.5; }, "ready"},
      {[](Outline& o) { o.parameters = 34; }, "35"},
      {[](Outline& o) { o.tables[0].name = "chair"; }, "chair"},
      {[](Outline& o) { o.tables[0].width = 4; }, "width"},
      {[](Outline& o) { o.tables[0].rows_per_step = 5; }, "rows_per_step"},
  };
  for (const auto& [spoil, named] : cases) {
    const std::string sentence = refusal(spoil);
    EXPECT_TRUE(sentence.starts_with("here: ")) << named << ": " << sentence;
    EXPECT_NE(sentence.find(named), std::string::npos) << sentence;
    EXPECT_EQ(sentence.find('\n'), std::string::npos);
  }
}

TEST(Outline, SecondsAndParameters) {
  EXPECT_EQ(compute_seconds(sample()), 0.25 + 1 + 2 + 3 + 0.5 + 4 + 0.125);
  const std::vector<ParameterInfo> parameters = under_scheme(shape_of(sample()), {});
  ASSERT_EQ(parameters.size(), 3u);
  EXPECT_EQ(parameters[0].rows, 4);
  EXPECT_EQ(parameters[1].rows, 0);
  EXPECT_EQ(parameters[2].use, 1);
  EXPECT_EQ(parameters[2].count, 20);
}

TEST(Outline, BackwardHandsGradientsOverAsTheyBecomeReady) {
  const Timetable events = timetable_of(sample(), shape_of(sample()));
  ASSERT_EQ(events.size(), 2u);
  ASSERT_EQ(events[1][0].gradients.size(), 2u);
  EXPECT_EQ(events[1][0].gradients[0].tensor, 2);  // after a quarter of 4 seconds
  EXPECT_EQ(events[1][0].gradients[0].seconds, 1);
  EXPECT_EQ(events[1][0].gradients[1].tensor, 1);  // after three quarters
  EXPECT_EQ(events[1][0].gradients[1].seconds, 2);
  EXPECT_EQ(events[1][0].rest_seconds, 1);
  ASSERT_EQ(events[0][0].gradients.size(), 1u);
  EXPECT_EQ(events[0][0].gradients[0].seconds, 2);
  EXPECT_EQ(events[0][0].rest_seconds, 0);
  Outline together = sample();
  together.tensors[1].ready = together.tensors[2].ready = 1;
  EXPECT_EQ(timetable_of(together, shape_of(together))[1][0].gradients[0].tensor,
            2);  // used last: there first
}

// A layer of experts: the parts of a block, each with gradients of its own.
TEST(Outline, ExpertsAreTimedByTheirParts) {
  ModelOptions o = model_options("gpt-moe", "tiny");
  o.experts.shared = 1;
  o.experts.slices = 3;
  const ModelShape shape = model_shape("gpt-moe", o);
  const Outline outline = outline_from_flops(shape, 64, 1e9);
  ASSERT_EQ(outline.experts.size(), 1u);
  const ExpertLayout layout{.slices = 2, .ranks = 4, .rank = 3};
  const ModelShape made = shape_of(outline, layout);
  made.check();
  ASSERT_EQ(made.experts.size(), 1u);
  const ExpertShape& layer = made.experts[0];
  const auto block = static_cast<std::size_t>(layer.block);
  const Timetable times = timetable_of(outline, made, {.experts = layout.ranks});
  ASSERT_EQ(times[block].size(), made.blocks[block].parts.size());
  const auto at = [&](int part) -> const PartTimes& { return times[block][static_cast<std::size_t>(part)]; };
  const double d = 32;
  EXPECT_DOUBLE_EQ(at(layer.gate).forward_seconds, 2 * d * 4 * 64 / 1e9);
  EXPECT_DOUBLE_EQ(at(layer.first_slice).row_forward_seconds, 16 * d * d / 1e9);
  EXPECT_DOUBLE_EQ(at(layer.first_slice).row_backward_seconds, 2 * 16 * d * d / 1e9);
  // Norm and gate behind the gate; shared ones; the experts' four behind the first slice, which is the last to go back.
  EXPECT_EQ(at(layer.gate).gradients.size(), 3u);
  EXPECT_EQ(at(layer.gate + 1).gradients.size(), 4u);
  EXPECT_EQ(at(layer.first_slice).gradients.size(), 4u);
  EXPECT_TRUE(at(layer.first_slice + 1).gradients.empty());
  // Of four experts this rank has the last.
  for (const ParameterShape& p : made.parameters) {
    if (p.of_experts == 0) continue;
    EXPECT_EQ(p.of_experts, 4);
    EXPECT_EQ(p.dims.front(), 1);
    EXPECT_EQ(p.first, 3);
  }
  EXPECT_EQ(outline.parameters, shape.num_elements());
  // All of a step: as many FLOPs as the shape says, and twice as many back; experts with their capacity.
  const double experts = 16 * d * d * 2;
  EXPECT_NEAR(compute_seconds(outline), 3 * (shape.flops_per_token() + 0.25 * experts) * 64 / 1e9, 1e-12);
}

TEST(GradientWindows, AreAFunctionOfSeedRankStepAndTensor) {
  const Outline outline = sample();
  EmulationOptions options;
  const GradientWindows a(outline, options), b(outline, options);
  options.seed = 2;
  const GradientWindows other(outline, options);
  const auto values = [](std::span<const float> s) { return std::vector<float>(s.begin(), s.end()); };
  for (int tensor = 0; tensor < 3; ++tensor) {
    const auto length = static_cast<std::size_t>(outline.tensors[static_cast<std::size_t>(tensor)].length);
    EXPECT_EQ(a.of(1, 2, tensor).size(), length);
    EXPECT_EQ(values(a.of(1, 2, tensor)), values(b.of(1, 2, tensor)));
    EXPECT_NE(values(a.of(1, 2, tensor)), values(a.of(0, 2, tensor)));
    EXPECT_NE(values(a.of(1, 2, tensor)), values(a.of(1, 3, tensor)));
    EXPECT_NE(values(a.of(1, 2, tensor)), values(other.of(1, 2, tensor)));
  }
  EXPECT_NE(values(a.of(1, 2, 1)), values(a.of(1, 2, 2).first(3)));
}

// Log-normal magnitudes have a few elements with most of the energy; a normal distribution has not.
TEST(GradientWindows, AreHeavyUnlessToldOtherwise) {
  Outline outline = sample();
  outline.tensors[2] = {"weight", 100'000, 0, 0, 1, 1};
  const auto share_of_largest = [&](Distribution distribution) {
    EmulationOptions options;
    if (distribution != Distribution::heavy) options.gradients = distribution;
    const GradientWindows windows(outline, options);
    std::vector<double> squares;
    for (const float v : windows.of(0, 0, 2)) squares.push_back(static_cast<double>(v) * v);
    std::sort(squares.rbegin(), squares.rend());
    const double largest = std::accumulate(squares.begin(), squares.begin() + 1000, 0.0);
    return largest / std::accumulate(squares.begin(), squares.end(), 0.0);
  };
  EXPECT_GT(share_of_largest(Distribution::heavy), 0.5);
  EXPECT_LT(share_of_largest(Distribution::gaussian), 0.2);
}

class OutlineFile : public ::testing::Test {
 protected:
  std::string refused(const std::string& text) {
    std::ofstream(file_, std::ios::trunc) << text;
    try {
      read_outline(file_);
    } catch (const UsageError& e) {
      EXPECT_NE(std::string(e.what()).find(file_.string()), std::string::npos) << e.what();
      EXPECT_EQ(std::string(e.what()).find("json.exception"), std::string::npos) << e.what();
      return e.what();
    }
    return "";
  }
  // The file of the sample, with one text in it replaced.
  std::string with(const std::string& from, const std::string& to) {
    std::string text = outline_json(sample());
    const std::size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return text.replace(at, from.size(), to);
  }

  testing::Folder folder_;
  std::filesystem::path file_ = folder_.path() / "outline.json";
};

TEST_F(OutlineFile, ComesBackAsItWas) {
  Outline outline = sample();
  outline.blocks[0].forward_seconds = 0.1 + 0.2;  // no short decimal
  outline.tensors[0].name = "quoted \"name\" \xc3\xa9";
  outline.tables[0].name = outline.tensors[0].name;
  write_outline(file_, outline);
  const Outline back = read_outline(file_);
  EXPECT_EQ(outline_json(back), outline_json(outline));
  EXPECT_EQ(back.blocks[0].forward_seconds, outline.blocks[0].forward_seconds);
  EXPECT_EQ(back.tensors[0].name, outline.tensors[0].name);
}

TEST_F(OutlineFile, IsCheckedBeforeItIsUsed) {
  EXPECT_EQ(refused(outline_json(sample())), "");  // the control: this one is sound
  EXPECT_NE(refused(""), "");
  EXPECT_NE(refused("[]"), "");
  const std::string whole = outline_json(sample());
  EXPECT_NE(refused(whole.substr(0, whole.size() / 2)).find("not JSON"), std::string::npos);
  EXPECT_NE(refused(with("\"blocks\"", "\"boxes\"")).find("blocks is missing"), std::string::npos);
  EXPECT_NE(refused(with("\"model\"", "\"extra\": 1, \"model\"")).find("extra"), std::string::npos);
  EXPECT_NE(refused(with("\"length\": 12", "\"length\": -12")).find("tensors[0]"), std::string::npos);
  EXPECT_NE(refused(with("\"length\": 12", "\"length\": 1e30")).find("length"), std::string::npos);
  EXPECT_NE(refused(with("\"length\": 12", "\"length\": 18446744073709551615")).find("length"),
            std::string::npos);
  EXPECT_NE(refused(with("\"length\": 12", "\"length\": 13")).find("rows"), std::string::npos);
  EXPECT_NE(refused(with("\"ready\": 1.0", "\"ready\": \"1\"")).find("ready"), std::string::npos);
  EXPECT_NE(refused(with("\"parameters\": 35", "\"parameters\": 36")).find("parameters"), std::string::npos);
  EXPECT_NE(refused(with("\"other_seconds\": 0.25", "\"other_seconds\": 1e999")), "");
}

TEST_F(OutlineFile, ThatIsNotThereOrNoFileIsRefused) {
  EXPECT_THROW(read_outline(folder_.path() / "none.json"), UsageError);
  EXPECT_THROW(read_outline(folder_.path()), UsageError);
  EXPECT_THROW(write_outline(folder_.path() / "no" / "folder.json", sample()), Error);
}

}  // namespace
}  // namespace weft
