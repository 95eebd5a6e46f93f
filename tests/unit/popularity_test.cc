// The estimate of how popular experts will be, against the table that the tokens were drawn from (a Markov chain
// that drawn_router.h makes, whose own properties are tested here too).
#include "experts/popularity.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <numeric>

#include "files.h"
#include "message_of.h"
#include "weft/error.h"
#include "wire/safetensors.h"
#include "workload/drawn_router.h"

namespace weft {
namespace {

using testing::Folder;
using ::testing::HasSubstr;
using testing::message_of;

double sum(std::span<const double> values) { return std::accumulate(values.begin(), values.end(), 0.0); }

Popularity fitted(const DrawnRouter& router, std::uint64_t seed, int batches, int path) {
  Popularity out({.layers = router.options().layers, .experts = router.options().experts, .path = path});
  const auto layers = static_cast<std::size_t>(router.options().layers);
  for (int b = 0; b < batches; ++b) {
    const std::vector<std::int32_t> paths = router.draw(seed, b, 0, 4096);
    for (std::size_t at = 0; at < paths.size(); at += layers)
      out.record(std::span(paths).subspan(at, layers));
  }
  return out;
}

// Mean over tokens of the distance (half the sum of differences) between estimated and true shares.
double distance(const DrawnRouter& router, const Popularity& profile, int layer) {
  const auto layers = static_cast<std::size_t>(router.options().layers);
  const std::vector<std::int32_t> paths = router.draw(/*seed=*/99, 0, 3, 2000);
  double out = 0;
  for (std::size_t at = 0; at < paths.size(); at += layers) {
    const std::span path = std::span(paths).subspan(at, static_cast<std::size_t>(layer));
    std::vector<double> rows(static_cast<std::size_t>(router.options().experts));
    profile.estimate(layer, path, rows);
    const std::span<const double> truth = router.shares(layer, path);
    for (std::size_t e = 0; e < rows.size(); ++e) out += std::abs(rows[e] - truth[e]) / 2;
  }
  return out / 2000;
}

TEST(DrawnRouter, EveryLayerHasAHottestExpertOfFourToSixTimesTheColdest) {
  const DrawnRouter router({.layers = 8});
  const auto layers = std::size_t{8};
  std::vector<std::vector<double>> chosen(layers, std::vector<double>(8));
  for (int b = 0; b < 8; ++b) {
    const std::vector<std::int32_t> paths = router.draw(5, b, 0, 4096);
    for (std::size_t i = 0; i < paths.size(); ++i) ++chosen[i % layers][static_cast<std::size_t>(paths[i])];
  }
  for (int l = 0; l < 8; ++l) {
    const std::span<const double> shares = router.popularity(l);
    const auto [least, most] = std::ranges::minmax_element(shares);
    EXPECT_GE(*most / *least, 4);
    EXPECT_LE(*most / *least, 6);
    EXPECT_NEAR(sum(shares), 1, 1e-12);
    // 32768 tokens: a share of 0.3 has a deviation of 0.0026, and five of them are 0.013.
    for (std::size_t e = 0; e < 8; ++e)
      EXPECT_NEAR(chosen[static_cast<std::size_t>(l)][e] / 32768, shares[e], 0.013) << l << " " << e;
  }
}

TEST(DrawnRouter, TopicsThatDriftHaveThatRatioOverAPeriod) {
  const DrawnRouter router({.layers = 6, .drifts = true});
  std::vector<std::vector<double>> chosen(6, std::vector<double>(8));
  for (int b = 0; b < router.options().period; ++b) {
    const std::vector<std::int32_t> paths = router.draw(5, b, 0, 1024);
    for (std::size_t i = 0; i < paths.size(); ++i) ++chosen[i % 6][static_cast<std::size_t>(paths[i])];
  }
  // 65536 tokens: the coldest share of 0.06 is known to 1.5 %, the hottest better; the rest is that a topic's
  // frequency over a period is not exactly its popularity.
  for (const std::vector<double>& rows : chosen) {
    const auto [least, most] = std::ranges::minmax_element(rows);
    EXPECT_GT(*most / *least, 3.8);
    EXPECT_LT(*most / *least, 6.3);
  }
}

TEST(DrawnRouter, IsAFunctionOfItsSeedsAndOfNothingElse) {
  const DrawnRouter router({.layers = 4}), same({.layers = 4}), other({.layers = 4, .seed = 2});
  EXPECT_EQ(router.draw(1, 7, 3, 100), same.draw(1, 7, 3, 100));
  EXPECT_NE(router.draw(1, 7, 3, 100), router.draw(1, 7, 4, 100));
  EXPECT_NE(router.draw(1, 7, 3, 100), router.draw(1, 8, 3, 100));
  EXPECT_NE(router.draw(1, 7, 3, 100), router.draw(2, 7, 3, 100));
  EXPECT_NE(router.draw(1, 7, 3, 100), other.draw(1, 7, 3, 100));
}

TEST(DrawnRouter, TopicsThatDriftChangeTheRowsOfALateLayerAndStationaryOnesDoNot) {
  for (const bool drifts : {false, true}) {
    const DrawnRouter router({.layers = 8, .drifts = drifts, .period = 32});
    double most = 0;  // distance between two batches half a period apart
    std::vector<double> before(8), after(8);
    const std::vector<std::int32_t> late = router.draw(3, 0, 0, 8192), later = router.draw(3, 16, 0, 8192);
    for (std::size_t at = 7; at < late.size(); at += 8) {
      before[static_cast<std::size_t>(late[at])] += 1.0 / 8192;
      after[static_cast<std::size_t>(later[at])] += 1.0 / 8192;
    }
    for (std::size_t e = 0; e < 8; ++e) most = std::max(most, std::abs(before[e] - after[e]));
    // Of a stationary one: a share of 0.3 twice, 0.005 each; five deviations of the difference are 0.036.
    if (drifts) {
      EXPECT_GT(most, 0.08);
    } else {
      EXPECT_LT(most, 0.036);
    }
  }
}

TEST(DrawnRouter, RefusesWhatCannotBe) {
  EXPECT_THAT(message_of([] { DrawnRouter({.experts = 1}); }), HasSubstr("at least two experts"));
  EXPECT_THAT(message_of([] { DrawnRouter({.experts = 4096, .order = 3}); }), HasSubstr("too many"));
  EXPECT_THAT(message_of([] { DrawnRouter({.topics = 9}); }), HasSubstr("topics"));
}

TEST(Popularity, RecoversTheTableOfAMarkovRouterFromAnotherSeed) {
  const DrawnRouter router({.layers = 6, .experts = 4, .topics = 2});
  const Popularity whole = fitted(router, /*seed=*/1, 24, /*path=*/3), shorter = fitted(router, 1, 24, 1);
  // 98304 tokens over 64 paths are 1536 a path: a share of 1/4 is then known to 0.011, and the distance of four
  // shares is below 0.02 on average. Rare paths have fewer.
  for (const int layer : {3, 5}) {
    EXPECT_LT(distance(router, whole, layer), 0.03);
    EXPECT_GT(distance(router, shorter, layer), 0.06);  // control: one layer back is not the chain's memory
  }
}

TEST(Popularity, EstimatesOfTokensSumToTheTokens) {
  const DrawnRouter router({.layers = 5});
  const Popularity profile = fitted(router, 1, 2, 3);
  PopularityOptions cut = profile.options();
  cut.top = 2;
  Popularity truncated(cut);
  const std::vector<std::int32_t> some = router.draw(1, 0, 0, 64);
  for (std::size_t at = 0; at < some.size(); at += 5) truncated.record(std::span(some).subspan(at, 5));
  const std::vector<std::int32_t> paths = router.draw(2, 0, 1, 333);
  for (int layer = 0; layer < 5; ++layer) {
    std::vector<double> rows(8), fewer(8);
    for (std::size_t at = 0; at < paths.size(); at += 5) {
      const std::span path = std::span(paths).subspan(at, static_cast<std::size_t>(layer));
      profile.estimate(layer, path, rows);
      truncated.estimate(layer, path, fewer);
    }
    EXPECT_NEAR(sum(rows), 333, 1e-9);
    EXPECT_LT(sum(fewer), 333);  // of each token's first two experts alone
  }
}

TEST(Popularity, BacksOffToTheLongestEndOfAPathThatWasSeen) {
  Popularity profile({.layers = 4, .experts = 3, .path = 3});
  profile.record(std::vector<std::int32_t>{0, 1, 2, 0});
  profile.record(std::vector<std::int32_t>{0, 1, 2, 0});
  profile.record(std::vector<std::int32_t>{2, 1, 2, 1});
  profile.record(std::vector<std::int32_t>{2, 0, 0, 2});
  const auto estimate = [&](std::vector<std::int32_t> path) {
    std::vector<double> rows(3);
    profile.estimate(3, path, rows);
    return rows;
  };
  using V = std::vector<double>;
  EXPECT_EQ(profile.depth(3, std::vector<std::int32_t>{0, 1, 2}), 3);
  EXPECT_EQ(estimate({0, 1, 2}), (V{1, 0, 0}));
  EXPECT_EQ(profile.depth(3, std::vector<std::int32_t>{1, 1, 2}), 2);  // (1, 2) came three times
  EXPECT_EQ(estimate({1, 1, 2}), (V{2.0 / 3, 1.0 / 3, 0}));
  EXPECT_EQ(profile.depth(3, std::vector<std::int32_t>{1, 2, 0}), 1);
  EXPECT_EQ(estimate({1, 2, 0}), (V{0, 0, 1}));
  EXPECT_EQ(profile.depth(3, std::vector<std::int32_t>{0, 0, 1}), 0);  // nothing came behind (.., 1)
  EXPECT_EQ(estimate({0, 0, 1}), (V{0.5, 0.25, 0.25}));
  const Popularity empty({.layers = 4, .experts = 3, .path = 3});
  EXPECT_EQ(empty.depth(3, std::vector<std::int32_t>{0, 1, 2}), -1);
  std::vector<double> nothing(3);
  empty.estimate(3, std::vector<std::int32_t>{0, 1, 2}, nothing);
  EXPECT_EQ(sum(nothing), 0);
}

// Tokens of a hot path, between them ever new ones: experts of the first two layers are digits of a number that
// counts.
std::vector<std::int32_t> rare(int number) { return {number / 30 % 30, number % 30, 0, 1}; }

TEST(Popularity, ForgetsTheLeastFrequentPathsAndEstimatesByShorterOnes) {
  const std::vector<std::int32_t> hot{7, 7, 0, 3};
  const auto record = [&](std::int64_t most_paths) {
    Popularity out({.layers = 4, .experts = 30, .path = 3, .most_paths = most_paths});
    for (int number = 0; number < 900; ++number) {
      if (number % 30 != 7 || number / 30 != 7) out.record(rare(number));
      if (number % 20 == 0) out.record(hot);
    }
    return out;
  };
  const Popularity bounded = record(64), whole = record(4096);
  for (int layer = 0; layer < 4; ++layer) {
    for (int length = 0; length <= std::min(layer, 3); ++length)
      EXPECT_LE(bounded.num_paths(layer, length), 64);
  }
  EXPECT_EQ(whole.num_paths(3, 3), 900);  // control: so many there are
  const auto estimate = [](const Popularity& profile, std::span<const std::int32_t> token) {
    std::vector<double> rows(30);
    profile.estimate(3, token.first(3), rows);
    return rows;
  };
  // The hot one has all that was recorded of it.
  EXPECT_EQ(bounded.depth(3, std::span(hot).first(3)), 3);
  EXPECT_EQ(estimate(bounded, hot), estimate(whole, hot));
  EXPECT_EQ(estimate(bounded, hot)[3], 1);
  // Of an early rare one its end (.., number % 30, 0) is left, with 29 or 30 tokens that went to 1 each, and for
  // 7 the 45 hot ones as well.
  const std::vector<std::int32_t> first = rare(7);
  EXPECT_EQ(whole.depth(3, std::span(first).first(3)), 3);
  EXPECT_EQ(bounded.depth(3, std::span(first).first(3)), 2);
  EXPECT_EQ(estimate(whole, first)[1], 1);
  EXPECT_DOUBLE_EQ(estimate(bounded, first)[1], 29.0 / (29 + 45));
  EXPECT_DOUBLE_EQ(estimate(bounded, first)[3], 45.0 / (29 + 45));
  // What is forgotten follows from what was recorded.
  const Folder folder;
  bounded.save(folder.path() / "a");
  record(64).save(folder.path() / "b");
  const auto bytes_of = [&](const char* name) {
    std::ifstream in(folder.path() / name, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  EXPECT_EQ(bytes_of("a"), bytes_of("b"));
}

TEST(Popularity, AFileOfMorePathsThanThereIsRoomForGivesTheMostFrequent) {
  Popularity large({.layers = 4, .experts = 30, .path = 3, .most_paths = 30'000});
  const std::vector<std::int32_t> hot{0, 0, 0, 3};
  large.record(hot);
  for (int number = 0; number < 27'000; ++number)
    large.record(std::vector<std::int32_t>{number / 900, number / 30 % 30, number % 30, 1});
  EXPECT_EQ(large.num_paths(3, 3), 27'000);
  const Folder folder;
  large.save(folder.path() / "profile");
  const Popularity some = Popularity::load(folder.path() / "profile");
  EXPECT_EQ(some.num_paths(3, 3), PopularityOptions{}.most_paths);
  EXPECT_EQ(some.num_paths(3, 2), 900);
  EXPECT_EQ(some.depth(3, std::span(hot).first(3)),
            3);  // twice, and so the most frequent, though the first in the file
  EXPECT_EQ(some.depth(3, std::vector<std::int32_t>{0, 0, 1}), 2);
}

TEST(Popularity, SeveralChoicesCountForTheSamePath) {
  Popularity profile({.layers = 2, .experts = 3, .path = 1, .choices = 2});
  profile.record(std::vector<std::int32_t>{0, 1, 2, 1});
  std::vector<double> rows(3);
  profile.estimate(1, std::vector<std::int32_t>{0}, rows);
  EXPECT_EQ(rows, (std::vector<double>{0, 1, 1}));
}

TEST(Popularity, ComesBackFromItsFile) {
  const Folder folder;
  const DrawnRouter router({.layers = 4});
  const Popularity profile = fitted(router, 1, 1, 2);
  profile.save(folder.path() / "profile");
  const Popularity again = Popularity::load(folder.path() / "profile");
  EXPECT_EQ(again.options().path, 2);
  const std::vector<std::int32_t> paths = router.draw(2, 0, 1, 50);
  for (std::size_t at = 0; at < paths.size(); at += 4) {
    std::vector<double> rows(8), same(8);
    profile.estimate(3, std::span(paths).subspan(at, 3), rows);
    again.estimate(3, std::span(paths).subspan(at, 3), same);
    EXPECT_EQ(rows, same);
  }
}

TEST(Popularity, DoesNotTrustAFile) {
  const Folder folder;
  const std::filesystem::path file = folder.path() / "profile";
  const auto refused = [&](const std::vector<wire::TensorEntry>& entries, const wire::Metadata& metadata) {
    wire::write_safetensors(file, entries, metadata);
    return message_of([&] { Popularity::load(file); });
  };
  const wire::Metadata sound{{"layers", "1"}, {"experts", "2"}, {"path", "0"}, {"choices", "1"}};
  const auto entries = [](const std::vector<std::int64_t>& paths, const std::vector<std::int64_t>& counts) {
    const auto rows = static_cast<std::int64_t>(paths.size());
    return std::vector<wire::TensorEntry>{
        {"layer.0.path.0.paths", "I64", {rows}, std::as_bytes(std::span(paths))},
        {"layer.0.path.0.counts", "I64", {rows, 2}, std::as_bytes(std::span(counts))}};
  };
  const std::vector<std::int64_t> zero{0}, one{1}, twice{0, 0}, counts{3, 1}, bad{-1, 2}, none{0, 0},
      four{1, 2, 3, 4};
  EXPECT_THAT(refused({}, {}), HasSubstr("no profile"));
  EXPECT_THAT(refused({}, sound), HasSubstr("is not there"));
  EXPECT_THAT(refused(entries(one, counts), sound), HasSubstr("one that cannot be"));
  EXPECT_THAT(refused(entries(twice, four), sound), HasSubstr("a path twice"));
  EXPECT_THAT(refused(entries(zero, bad), sound), HasSubstr("counts that cannot be"));
  EXPECT_THAT(refused(entries(zero, none), sound), HasSubstr("counts that cannot be"));
  wire::Metadata wrong = sound;
  wrong["experts"] = "-2";
  EXPECT_THAT(refused(entries(zero, counts), wrong), HasSubstr("no experts"));
  wrong["experts"] = "3";
  EXPECT_THAT(refused(entries(zero, counts), wrong), HasSubstr("expected I64 [1,3]"));
  wire::write_safetensors(file, entries(zero, counts), sound);
  EXPECT_NO_THROW(Popularity::load(file));  // control
}

TEST(Popularity, RefusesWhatCannotBe) {
  EXPECT_THAT(message_of([] { Popularity({.experts = 8, .path = 40}); }), HasSubstr("told apart"));
  EXPECT_THAT(message_of([] { Popularity({.experts = 2, .choices = 3}); }), HasSubstr("choices"));
  EXPECT_THAT(message_of([] { Popularity({.experts = 2, .most_paths = 1}); }), HasSubstr("at least 2 paths"));
  Popularity profile({.layers = 2, .experts = 3});
  EXPECT_THAT(message_of([&] { profile.record(std::vector<std::int32_t>{0, 3}); }),
              HasSubstr("expert 3 of 3"));
  EXPECT_THAT(message_of([&] { profile.record(std::vector<std::int32_t>{0}); }),
              HasSubstr("2 choices, not 1"));
}

}  // namespace
}  // namespace weft
