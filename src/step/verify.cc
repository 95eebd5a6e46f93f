#include "step/verify.h"

#include <algorithm>

#include "step/rank_walk.h"

namespace weft {

namespace {

bool are_equal(const VerifiedRank& a, const VerifiedRank& b) {
  return a.micro_batches == b.micro_batches && a.verdict == b.verdict &&
         (a.tables == b.tables || *a.tables == *b.tables) && (a.shape == b.shape || *a.shape == *b.shape);
}

// All ranks side by side. Ranks with equal tables are one walk: they do the same at the same time.
class Job {
 public:
  // `alone`: one rank of several, which stands for all of them.
  Job(std::span<const VerifiedRank> ranks, bool alone) {
    std::vector<int> first;  // rank of each walk
    for (int r = 0; r < static_cast<int>(ranks.size()); ++r) {
      const auto same = std::ranges::find_if(first, [&](int other) {
        return are_equal(ranks[static_cast<std::size_t>(other)], ranks[static_cast<std::size_t>(r)]);
      });
      walk_of_.push_back(static_cast<int>(same - first.begin()));
      if (same == first.end()) first.push_back(r);
    }
    walks_.reserve(first.size());
    for (const int r : first) {
      const std::string who = alone ? "" : "rank " + std::to_string(r) + ", ";
      walks_.emplace_back(ranks[static_cast<std::size_t>(r)], who, found_);
    }
    for (const RankWalk& one : walks_) needed_.emplace_back(one.tables().exchanges.size());
    for (int w = 0; w < static_cast<int>(walks_.size()) && !alone; ++w) {
      for (int e = 0; e < static_cast<int>(walk(w).tables().exchanges.size()); ++e) meet(w, e);
    }
  }

  Verification run() {
    bool moved = true;
    while (moved) {
      moved = false;
      for (int w = 0; w < static_cast<int>(walks_.size()); ++w) moved |= advance(w);
    }
    for (RankWalk& walk : walks_) {
      if (walk.done()) continue;
      const Move* move = walk.next();
      walk.breach("waits for ever for '" + walk.exchange(move->exchange).name + "' of offset " +
                  std::to_string(move->offset));
    }
    return {.breaches = std::move(found_), .distinct = static_cast<int>(walks_.size())};
  }

 private:
  struct Holder {
    int walk = 0;
    int exchange = 0;
  };

  RankWalk& walk(int w) { return walks_[static_cast<std::size_t>(w)]; }

  bool advance(int w) {
    RankWalk& mine = walk(w);
    bool moved = false;
    while (!mine.done()) {
      const Move* move = mine.next();
      if (move == nullptr) {
        mine.end_table();
      } else {
        if (move->kind == Move::Kind::wait && !ends(w, *move)) return moved;
        mine.take(*move);
      }
      moved = true;
    }
    return moved;
  }

  // Whether everybody whom the wait needs has started the exchange. A send needs its receive: it may end
  // before that is posted, where the message is short, and may not.
  bool ends(int w, const Move& move) {
    const RankWalk& mine = walk(w);
    const RankWalk::Step step = mine.step_of(move);
    if (!mine.started({move.exchange, step, move.micro_batch})) return false;
    return std::ranges::all_of(needed_[static_cast<std::size_t>(w)][static_cast<std::size_t>(move.exchange)],
                               [&](const Holder& other) {
                                 return walk(other.walk).started({other.exchange, step, move.micro_batch});
                               });
  }

  // Who must take part in an exchange of a walk, and whether they do.
  void meet(int w, int e) {
    const Exchange& mine = walk(w).exchange(e);
    std::vector<Holder>& needed = needed_[static_cast<std::size_t>(w)][static_cast<std::size_t>(e)];
    const auto group = walk(w).tables().groups.find(mine.group);
    if (group == walk(w).tables().groups.end()) return;  // said by the walk
    for (int r = 0; r < static_cast<int>(walk_of_.size()); ++r) {
      if (walk_of_[static_cast<std::size_t>(r)] == w &&
          std::ranges::find(group->second, r) == group->second.end())
        walk(w).breach("'" + mine.name + "' is of a group without rank " + std::to_string(r));
    }
    if (mine.kind != Exchange::Kind::collective) return meet_peer(w, mine, needed);
    std::vector<bool> met(walks_.size());
    for (const int member : group->second) {
      if (member < 0 || member >= static_cast<int>(walk_of_.size())) {
        walk(w).breach("'" + mine.name + "' is of a group with rank " + std::to_string(member) +
                       ", which does not exist");
        continue;
      }
      const int other = walk_of_[static_cast<std::size_t>(member)];
      if (other == w || met[static_cast<std::size_t>(other)]) continue;
      met[static_cast<std::size_t>(other)] = true;
      const int found = walk(other).find(mine.group, mine.slot);
      if (found < 0 || walk(other).exchange(found).kind != Exchange::Kind::collective) {
        walk(w).breach("'" + mine.name + "' is no collective of rank " + std::to_string(member));
        continue;
      }
      needed.push_back({other, found});
      if (walk(other).tables().groups.at(mine.group) != group->second)
        walk(w).breach("'" + mine.name + "' has other members on rank " + std::to_string(member));
      compare(w, mine, walk(other).exchange(found), member);
    }
  }

  void meet_peer(int w, const Exchange& mine, std::vector<Holder>& needed) {
    const bool exists = mine.peer >= 0 && mine.peer < static_cast<int>(walk_of_.size());
    const int other = exists ? walk_of_[static_cast<std::size_t>(mine.peer)] : -1;
    const int found = exists ? walk(other).find(mine.group, mine.slot) : -1;
    for (int r = 0; r < static_cast<int>(walk_of_.size()); ++r) {
      if (walk_of_[static_cast<std::size_t>(r)] != w) continue;
      const Exchange* theirs = found < 0 ? nullptr : &walk(other).exchange(found);
      if (theirs == nullptr || theirs->kind == mine.kind || theirs->kind == Exchange::Kind::collective ||
          theirs->peer != r) {
        walk(w).breach("'" + mine.name + "' has no " +
                       std::string(mine.kind == Exchange::Kind::send ? "receive" : "send") + " on rank " +
                       std::to_string(mine.peer));
        return;
      }
    }
    needed.push_back({other, found});
    compare(w, mine, walk(other).exchange(found), mine.peer);
  }

  void compare(int w, const Exchange& mine, const Exchange& theirs, int rank) {
    if (theirs.codec != mine.codec)
      walk(w).breach("'" + mine.name + "' has the codec '" + mine.codec + "', and '" + theirs.codec +
                     "' on rank " + std::to_string(rank));
    if (theirs.each_micro_batch != mine.each_micro_batch)
      walk(w).breach("'" + mine.name + "' is not of each micro-batch on rank " + std::to_string(rank));
    if (theirs.traffic != mine.traffic)
      walk(w).breach("'" + mine.name + "' is of another class on rank " + std::to_string(rank));
  }

  std::vector<std::string> found_;
  std::vector<int> walk_of_;  // of each rank
  std::vector<RankWalk> walks_;
  std::vector<std::vector<std::vector<Holder>>> needed_;  // of each walk and exchange: who else starts it
};

}  // namespace

Verification verify(std::span<const VerifiedRank> ranks) { return Job(ranks, false).run(); }
Verification verify_alone(const VerifiedRank& rank) { return Job(std::span(&rank, 1), true).run(); }

}  // namespace weft
