// SparDL's schedule without data, for 1 to 129 ranks: who holds whose contribution to which block, followed
// message by message.
#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "patterns/bruck.h"

namespace weft {
namespace {

constexpr int kMost = 129;

std::vector<Hop> listed(const Hops& hops) { return {hops.begin(), hops.end()}; }

// "" if every block reaches its owner with every contributor once, else what is wrong.
std::string halving_error(int m, const std::vector<Hop>& hops) {
  // held[rank][block]: contributors, empty where the block has left.
  std::vector<std::vector<std::multiset<int>>> held(
      static_cast<std::size_t>(m), std::vector<std::multiset<int>>(static_cast<std::size_t>(m)));
  for (int r = 0; r < m; ++r) {
    for (auto& block : held[static_cast<std::size_t>(r)]) block = {r};
  }
  int sent = 0;
  for (const Hop& hop : hops) {
    sent += hop.count;
    std::vector<std::vector<std::multiset<int>>> bags(static_cast<std::size_t>(m));
    for (int r = 0; r < m; ++r) {
      for (int i = 0; i < hop.count; ++i) {
        auto& block = held[static_cast<std::size_t>(r)][static_cast<std::size_t>((r + hop.sent + i) % m)];
        if (block.empty()) return "a block is sent that is not held";
        bags[static_cast<std::size_t>(r)].push_back(std::exchange(block, {}));
      }
    }
    for (int r = 0; r < m; ++r) {
      const int to = (r + hop.gap) % m;
      for (int i = 0; i < hop.count; ++i) {
        const int block = (to + hop.received + i) % m;
        if (block != (r + hop.sent + i) % m) return "sender and receiver mean different blocks";
        auto& into = held[static_cast<std::size_t>(to)][static_cast<std::size_t>(block)];
        if (into.empty()) return "a block arrives where it was given away";
        into.merge(bags[static_cast<std::size_t>(r)][static_cast<std::size_t>(i)]);
      }
    }
  }
  if (sent != m - 1) return "bags of " + std::to_string(sent) + " blocks";
  for (int r = 0; r < m; ++r) {
    const auto& own = held[static_cast<std::size_t>(r)][static_cast<std::size_t>(r)];
    if (static_cast<int>(own.size()) != m) return "contributions are missing, or there twice";
    if (static_cast<int>(std::set<int>(own.begin(), own.end()).size()) != m) return "one is there twice";
  }
  return "";
}

std::string gather_error(int m, const std::vector<Hop>& hops) {
  std::vector<std::set<int>> has(static_cast<std::size_t>(m));
  for (int r = 0; r < m; ++r) has[static_cast<std::size_t>(r)] = {r};
  for (const Hop& hop : hops) {
    const std::vector<std::set<int>> before = has;
    for (int r = 0; r < m; ++r) {
      const int to = (r - hop.gap + m) % m;
      for (int i = 0; i < hop.count; ++i) {
        const int block = (r + hop.sent + i) % m;
        if (!before[static_cast<std::size_t>(r)].contains(block)) return "a block is sent that is not held";
        if (!has[static_cast<std::size_t>(to)].insert(block).second) return "a block arrives twice";
      }
    }
  }
  for (const std::set<int>& all : has) {
    if (static_cast<int>(all.size()) != m) return "blocks are missing";
  }
  return "";
}

TEST(Schedule, EveryContributionReachesItsOwnerOnce) {
  for (int m = 1; m <= kMost; ++m) {
    EXPECT_EQ(halving_error(m, listed(halving_hops(m))), "") << m;
    EXPECT_EQ(gather_error(m, listed(gather_hops(m))), "") << m;
    EXPECT_EQ(halving_hops(m).size(), log2_ceil(m));
    EXPECT_EQ(gather_hops(m).size(), log2_ceil(m));
  }
}

TEST(Schedule, ControlASpoiltHopIsSeen) {
  for (const int m : {2, 3, 6, 14, 129}) {
    for (std::size_t i = 0; i < listed(halving_hops(m)).size(); ++i) {
      std::vector<Hop> short_bag = listed(halving_hops(m));
      --short_bag[i].count;
      EXPECT_NE(halving_error(m, short_bag), "") << m << ", hop " << i;
      std::vector<Hop> short_gather = listed(gather_hops(m));
      --short_gather[i].count;
      EXPECT_NE(gather_error(m, short_gather), "") << m << ", hop " << i;
      std::vector<Hop> none = listed(halving_hops(m));
      none.erase(none.begin() + static_cast<std::ptrdiff_t>(i));
      EXPECT_NE(halving_error(m, none), "") << m << ", hop " << i;
    }
  }
}

}  // namespace
}  // namespace weft
