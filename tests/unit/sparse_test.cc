// Sums and cuts of sorted entries against their definition, and the way in and out of dense vectors.
#include "kernels/sparse.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <vector>

#include "kernels/scalar_sparse.h"
#include "reference/data.h"

namespace weft {
namespace {

// Each of `length` indices with probability per_mille / 1000; values are integers of [-4, 4], so ties and
// zeros abound.
Entries some(std::uint64_t seed, std::uint32_t length, std::uint64_t per_mille) {
  Entries entries;
  for (std::uint32_t i = 0; i < length; ++i) {
    const std::uint64_t h = reference::hash(seed, 1, i);
    if (h % 1000 < per_mille) entries.push_back(i, static_cast<float>((h >> 20) % 9) - 4.0f);
  }
  return entries;
}

TEST(MergeAdd, EqualsTheDefinition) {
  Entries out;
  for (const std::uint64_t left : {0, 1, 100, 500, 1000}) {
    for (const std::uint64_t right : {0, 1, 100, 500, 1000}) {
      for (const std::uint32_t length : {0u, 1u, 2u, 1000u, 70'000u}) {
        const Entries a = some(left, length, left);
        const Entries b = some(right + 7, length, right);
        merge_add(a, b, out);
        ASSERT_EQ(out, scalar::merge_add(a, b)) << left << " " << right << " " << length;
        std::map<std::uint32_t, float> first;
        for (std::size_t i = 0; i < a.size(); ++i) first.emplace(a.indices[i], a.values[i]);
        for (std::size_t i = 0; i < b.size(); ++i) first.emplace(b.indices[i], b.values[i]);
        Entries expected;
        for (const auto& [index, value] : first) expected.push_back(index, value);
        merge_first(a, b, out);
        ASSERT_EQ(out, expected) << left << " " << right << " " << length;
      }
    }
  }
}

TEST(MergeAdd, AddsInItsOrderAndKeepsTheBitsOfWhatStandsAlone) {
  Entries a;
  a.push_back(1, -0.0f);
  a.push_back(4'000'000'000u, 1.0f);
  Entries b;
  b.push_back(0, 0x1p-30f);
  b.push_back(4'000'000'000u, 0x1p-30f);
  Entries out;
  merge_add(a, b, out);
  EXPECT_EQ(out.indices, (std::vector<std::uint32_t>{0, 1, 4'000'000'000u}));
  EXPECT_TRUE(reference::same_bits(out.values, std::vector<float>{0x1p-30f, -0.0f, 1.0f + 0x1p-30f}));
}

TEST(KeepLargest, EqualsTheDefinitionAndLosesNothing) {
  for (const std::uint64_t share : {0, 3, 200, 1000}) {
    for (const std::uint32_t length : {1u, 10u, 5000u}) {
      const Entries all = some(share, length, share);
      for (const std::int64_t k : {-1, 0, 1, 2, 7, 100, 4000, 100'000}) {
        Entries kept(all);
        Entries dropped = some(1, 5, 1000);  // cleared first
        keep_largest(kept, k, dropped);
        Entries expected(all);
        Entries expected_dropped;
        scalar::keep_largest(expected, k, expected_dropped);
        ASSERT_EQ(kept, expected) << share << " " << length << " " << k;
        ASSERT_EQ(dropped, expected_dropped);
        Entries both;
        merge_add(kept, dropped, both);
        Entries non_zero;
        for (std::size_t i = 0; i < all.size(); ++i) {
          if (all.values[i] != 0.0f) non_zero.push_back(all.indices[i], all.values[i]);
        }
        ASSERT_EQ(both, non_zero);
      }
    }
  }
}

TEST(KeepLargest, OfEqualMagnitudesTheLowerIndexStays) {
  Entries entries;
  for (std::uint32_t i = 0; i < 10; ++i) entries.push_back(i, i % 2 != 0 ? 2.0f : -2.0f);
  entries.push_back(10, 3.0f);
  Entries dropped;
  keep_largest(entries, 4, dropped);
  EXPECT_EQ(entries.indices, (std::vector<std::uint32_t>{0, 1, 2, 10}));
  EXPECT_NE(entries.indices, (std::vector<std::uint32_t>{7, 8, 9, 10})) << "control: the higher";
  EXPECT_EQ(dropped.indices, (std::vector<std::uint32_t>{3, 4, 5, 6, 7, 8, 9}));
}

TEST(ScatterAndGather, GoThroughTheDeal) {
  for (const Deal::Kind kind : {Deal::Kind::dealt, Deal::Kind::contiguous}) {
    for (const int m : {1, 3, 8}) {
      const Deal deal(kind, m, 5000);
      std::vector<float> dense(5000, 1.0f);
      std::vector<float> expected(dense);
      for (int b = 0; b < m; ++b) {
        const Entries entries =
            some(static_cast<std::uint64_t>(b), static_cast<std::uint32_t>(deal.count(b)), 300);
        scatter_add(entries, deal, b, dense);
        for (std::size_t i = 0; i < entries.size(); ++i) {
          expected[static_cast<std::size_t>(deal.global(b, entries.indices[i]))] += entries.values[i];
        }
        std::vector<float> back(entries.size());
        gather(dense, deal, b, entries.indices, back);
        for (std::size_t i = 0; i < entries.size(); ++i) ASSERT_EQ(back[i], 1.0f + entries.values[i]);
      }
      ASSERT_EQ(dense, expected);
    }
  }
}

}  // namespace
}  // namespace weft
