// The table of schemes: what it says of itself, its knobs as texts, and bytes by its formulas.
#include "data_parallel/schemes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "collectives/registry.h"
#include "weft/error.h"

namespace weft {
namespace {

std::string refusal(const SchemeOptions& options, int ranks = 4) {
  try {
    check_scheme(options, ranks);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

TEST(Schemes, EveryRowIsOneKindAndPassesItsCheck) {
  int lossless = 0, low_rank = 0;
  for (const Scheme& row : schemes()) {
    EXPECT_EQ(row.selects + row.low_rank + row.dense(), 1) << row.name;
    EXPECT_EQ(row.all_reduce == nullptr, row.low_rank) << row.name;
    EXPECT_FALSE(row.summary.empty()) << row.name;
    EXPECT_EQ(&find_scheme(row.name), &row);
    EXPECT_EQ(refusal({.name = std::string(row.name)}), "");
    lossless += row.lossless ? 1 : 0;
    low_rank += row.low_rank ? 1 : 0;
  }
  EXPECT_EQ(lossless, 1);
  EXPECT_EQ(low_rank, 1);
  EXPECT_EQ(lossless_scheme().name, "dense");
  EXPECT_EQ(schemes().size(), sparse_algorithms().size() + 1);
}

TEST(Schemes, UnknownNamesAreToldTheNearest) {
  EXPECT_NE(refusal({.name = "powersdg"}).find("did you mean 'powersgd'"), std::string::npos);
  try {
    find_scheme_knob("bucket-mb");
    ADD_FAILURE();
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("bucket-mib"), std::string::npos) << error.what();
  }
}

TEST(Schemes, WhatCannotBeMeantIsRefused) {
  EXPECT_EQ(refusal({.teams = 2}), "");  // control
  EXPECT_EQ(refusal({.teams = 3}), "teams must be a divisor of the 4 ranks, not 3");
  EXPECT_EQ(refusal({.teams = 3}, 0), "");  // (how many ranks there are is not known)
  EXPECT_EQ(refusal({.density = 0}), "density must be above 0 and at most 1, not 0");
  EXPECT_NE(refusal({.density = std::nan("")}), "");
  EXPECT_NE(refusal({.codec = "zip"}), "");
  EXPECT_NE(refusal({.gather = "c-sag"}), "");
  EXPECT_NE(refusal({.momentum_correction = 1}), "");
  EXPECT_NE(refusal({.columns = 0}), "");
  EXPECT_NE(refusal({.min_compression = -1}), "");
  EXPECT_NE(refusal({.wire = "bf17"}).find("did you mean 'bf16'"), std::string::npos);
  EXPECT_NE(refusal({.all_reduce = "rink"}), "");
  EXPECT_NE(refusal({.buckets = {.dense_below = -1}}), "");
}

// Every knob takes what it tells, and changes something.
TEST(Schemes, KnobsReadWhatTheyWrite) {
  const SchemeOptions fresh;
  for (const SchemeKnob& knob : scheme_knobs()) {
    SchemeOptions options;
    knob.set(options, knob.text(fresh));
    EXPECT_EQ(knob.text(options), knob.text(fresh)) << knob.name;
    EXPECT_TRUE(std::ranges::any_of(schemes(), knob.applies)) << knob.name;
    if (!knob.is_text) {
      knob.set(options, "1");
      EXPECT_EQ(knob.text(options), "1") << knob.name;
      for (const char* bad : {"", "one", "1x", "0x10"})
        EXPECT_THROW(knob.set(options, bad), UsageError) << bad;
    }
  }
  SchemeOptions options;
  find_scheme_knob("bucket-mib").set(options, "0.5");
  EXPECT_EQ(options.buckets.bucket_bytes, std::size_t{1} << 19);
  EXPECT_THROW(find_scheme_knob("bucket-mib").set(options, "0"), UsageError);
  find_scheme_knob("residual").set(options, "lres");
  EXPECT_EQ(options.residual, ResidualRule::lres);
  EXPECT_THROW(find_scheme_knob("residual").set(options, "none"), UsageError);
}

TEST(Schemes, WhatABucketTakes) {
  const Scheme& dense = lossless_scheme();
  const Scheme& spardl = find_scheme("spardl");
  EXPECT_EQ(&scheme_of_bucket(spardl, false, 10, 100), &spardl);
  EXPECT_EQ(&scheme_of_bucket(spardl, false, 100, 100), &dense);
  EXPECT_EQ(&scheme_of_bucket(spardl, true, 100, 100), &dense);
  EXPECT_EQ(&scheme_of_bucket(find_scheme("dense-bf16"), false, 100, 100), &find_scheme("dense-bf16"));
  EXPECT_EQ(&scheme_of_bucket(find_scheme("powersgd"), false, 100, 100), &find_scheme("powersgd"));
  EXPECT_EQ(bucket_options({.name = "powersgd"}).dense_below, 0);
  EXPECT_EQ(bucket_options({.name = "spardl"}).dense_below, BucketOptions{}.dense_below);
}

TEST(Schemes, BytesFollowTheFormulas) {
  constexpr int kRanks = 4;
  constexpr LinkCost kLink{.hop_seconds = 1e-9, .seconds_per_byte = 1, .fold_seconds_per_byte = 0};
  const std::vector<ParameterInfo> parts{{"w", 64 * 64, 0, 64}, {"b", 64, 0, 0}};
  const auto bytes = [&](const SchemeOptions& options, std::int64_t quota = 0) {
    return payload_bytes(find_scheme(options.name), options,
                         {.size = kRanks, .quota = quota, .parts = parts, .link = kLink});
  };
  constexpr std::int64_t kLength = 64 * 64 + 64;
  // A ring: all blocks twice, less two.
  EXPECT_EQ(bytes({.name = "dense"}), 4 * 2 * kLength * (kRanks - 1) / kRanks);
  EXPECT_EQ(bytes({.name = "dense-bf16"}), 2 * 2 * kLength * (kRanks - 1) / kRanks);
  // Straight to the owners of blocks and back: the same bytes, and an algorithm that sends others.
  EXPECT_EQ(bytes({.name = "dense", .all_reduce = "direct"}), bytes({.name = "dense"}));
  EXPECT_EQ(bytes({.name = "dense", .all_reduce = "recursive_doubling"}), 4 * 2 * kLength);
  // Everybody's k to everybody, 8 bytes an entry, a head a list.
  EXPECT_EQ(bytes({.name = "topka", .codec = "coo"}, 40), (8 * 40 + 4) * (kRanks - 1));
  // Packed, an index in 104 takes 7 bits and 104/64 for the gaps' high parts; bfloat16 values two bytes less.
  EXPECT_EQ(bytes({.name = "topka", .codec = "packed"}, 40), (4 * 40 + 43 + 8) * (kRanks - 1) + 1);
  EXPECT_EQ(bytes({.name = "topka", .codec = "packed-bf16"}, 40), (2 * 40 + 43 + 8) * (kRanks - 1) + 1);
  // Factors of 64 x 2 twice, the vector with the first.
  EXPECT_EQ(bytes({.name = "powersgd", .columns = 2, .all_reduce = "ring"}),
            4 * 2 * (64 * 2 + 64 + 64 * 2) * (kRanks - 1) / kRanks);
  EXPECT_GT(bytes({.name = "powersgd", .columns = 4, .all_reduce = "ring"}),
            bytes({.name = "powersgd", .columns = 2, .all_reduce = "ring"}));
  // In bfloat16 half of it, the vector's too; and "auto" is float32.
  EXPECT_EQ(2 * bytes({.name = "powersgd", .columns = 2, .wire = "bf16", .all_reduce = "ring"}),
            bytes({.name = "powersgd", .columns = 2, .all_reduce = "ring"}));
  EXPECT_EQ(bytes({.name = "powersgd", .columns = 2, .wire = "float32", .all_reduce = "ring"}),
            bytes({.name = "powersgd", .columns = 2, .all_reduce = "ring"}));
  // Teams have bytes of their own.
  EXPECT_NE(bytes({.name = "spardl", .teams = 2}, 40), bytes({.name = "spardl", .teams = 1}, 40));
}

}  // namespace
}  // namespace weft
