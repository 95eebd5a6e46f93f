#include "step/verify.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <utility>

namespace weft {

namespace {

constexpr std::array kWalk{Phase::first,  Phase::steady, Phase::steady, Phase::steady,
                           Phase::settle, Phase::first,  Phase::settle};

const Table& table_of(const Tables& tables, Phase phase) {
  return phase == Phase::first ? tables.first : phase == Phase::steady ? tables.steady : tables.settle;
}

using Step = std::pair<int, int>;  // how often the job has settled before, and the step from 0

// One rank on its way through kWalk.
class Walk {
 public:
  Walk(const VerifiedRank& rank, int number, std::vector<std::string>& found)
      : tables_(*rank.tables),
        shape_(*rank.shape),
        micro_batches_(rank.micro_batches),
        verdict_(rank.verdict),
        number_(number),
        found_(found),
        updates_(shape_.parameters.size()) {}

  bool done() const { return at_phase_ == kWalk.size(); }
  const Tables& tables() const { return tables_; }
  // The move that comes next, or null at the end of a table.
  const Move* next() const {
    const std::vector<Move>& moves = table_of(tables_, kWalk[at_phase_]).moves;
    return at_move_ < moves.size() ? &moves[at_move_] : nullptr;
  }
  // The step that a move of the table means. A settled job begins anew: what it had agreed on for the next
  // step is agreed on again.
  Step step_of(const Move& move) const {
    return {settled_, (kWalk[at_phase_] == Phase::settle ? steps_ - 1 : steps_) - move.offset};
  }
  bool started(int exchange, const Step& step) const {
    return tables_.exchanges[static_cast<std::size_t>(exchange)].at_installation ||
           started_.contains({exchange, step});
  }

  void breach(const std::string& what) {
    found_.push_back("rank " + std::to_string(number_) + ", table '" +
                     std::string(name_of(kWalk[std::min(at_phase_, kWalk.size() - 1)])) + "': " + what);
  }

  // Takes the next move, whose wait (if it is one) holds no longer.
  void take(const Move& move) {
    const std::string name = move.exchange < 0 ? "" : exchange_of(move).name;
    switch (move.kind) {
      case Move::Kind::compute:
        compute(move.piece);
        break;
      case Move::Kind::announce:
        break;
      case Move::Kind::start:
        if (!started_.insert({move.exchange, step_of(move)}).second)
          breach("'" + name + "' is started twice");
        check_reads(move);
        break;
      case Move::Kind::wait:
        waited_.insert({move.exchange, step_of(move)});
        break;
    }
    ++at_move_;
  }

  void end_table() {
    const Phase phase = kWalk[at_phase_];
    for (std::size_t p = 0; p < updates_.size(); ++p) {
      if (updates_[p] != steps_)
        breach("'" + shape_.parameters[p].name + "' was updated " + std::to_string(updates_[p]) +
               " times in " + std::to_string(steps_) + " steps");
    }
    if (phase == Phase::settle) {
      for (const auto& [exchange, step] : started_) {
        if (!waited_.contains({exchange, step}))
          breach("nobody waits for '" + tables_.exchanges[static_cast<std::size_t>(exchange)].name + "'");
      }
      ++settled_;
    } else {
      ++steps_;
    }
    done_.clear();
    given_.clear();
    ++at_phase_;
    at_move_ = 0;
  }

 private:
  const Exchange& exchange_of(const Move& move) const {
    return tables_.exchanges[static_cast<std::size_t>(move.exchange)];
  }
  std::string title(const Piece& piece) const { return shape_.title(piece, micro_batches_); }
  bool was_done(Work work, int block, int part, int micro_batch) const {
    return std::ranges::find(done_, Piece{work, block, part, micro_batch}) != done_.end();
  }

  void compute(const Piece& piece) {
    if (piece.work == Work::update) {
      update(piece);
    } else {
      if (was_done(piece.work, piece.block, piece.part, piece.micro_batch))
        breach(title(piece) + " is computed twice");
      piece.work == Work::forward ? forward(piece) : backward(piece);
    }
    done_.push_back(piece);
  }

  void forward(const Piece& piece) {
    const PartShape& part =
        shape_.blocks[static_cast<std::size_t>(piece.block)].parts[static_cast<std::size_t>(piece.part)];
    for (const std::string& name : part.takes) {
      if (!given_.contains({name, piece.micro_batch}))
        breach(title(piece) + " takes '" + name + "', which nobody has given yet");
    }
    for (const std::string& name : part.gives) given_.insert({name, piece.micro_batch});
    for (const int p : part.parameters) {
      if (updates_[static_cast<std::size_t>(p)] != steps_)
        breach(title(piece) + " uses '" + shape_.parameters[static_cast<std::size_t>(p)].name +
               "' before its last update");
    }
  }

  void backward(const Piece& piece) {
    if (!was_done(Work::forward, piece.block, piece.part, piece.micro_batch))
      breach(title(piece) + " comes before its forward");
    const PartShape& mine =
        shape_.blocks[static_cast<std::size_t>(piece.block)].parts[static_cast<std::size_t>(piece.part)];
    for (std::size_t b = 0; b < shape_.blocks.size(); ++b) {
      for (std::size_t p = 0; p < shape_.blocks[b].parts.size(); ++p) {
        const PartShape& reader = shape_.blocks[b].parts[p];
        const bool reads = std::ranges::any_of(reader.takes, [&](const std::string& name) {
          return std::ranges::find(mine.gives, name) != mine.gives.end();
        });
        if (reads && !was_done(Work::backward, static_cast<int>(b), static_cast<int>(p), piece.micro_batch))
          breach(title(piece) + " comes before that of its reader '" + reader.name + "'");
      }
    }
  }

  void update(const Piece& piece) {
    const Step last{settled_, steps_ - 1};
    if (steps_ == 0) return breach(title(piece) + " has no step to update with");
    if (verdict_ >= 0 && !waited_.contains({verdict_, last}))
      breach(title(piece) + " comes before the verdict");
    for (std::size_t p = 0; p < shape_.parameters.size(); ++p) {
      if (shape_.block_of(static_cast<int>(p)) != piece.block) continue;
      ++updates_[p];
      const TensorName gradient{TensorName::Of::gradient, shape_.parameters[p].name};
      for (std::size_t e = 0; e < tables_.exchanges.size(); ++e) {
        const Exchange& exchange = tables_.exchanges[e];
        if (std::ranges::find(exchange.writes, gradient) == exchange.writes.end()) continue;
        if (!waited_.contains({static_cast<int>(e), last}))
          breach(title(piece) + " comes before '" + exchange.name + "' has ended");
      }
    }
  }

  // Gradients of this step that an exchange reads.
  void check_reads(const Move& move) {
    if (move.offset != 0 || kWalk[at_phase_] == Phase::settle) return;
    for (const TensorName& tensor : exchange_of(move).reads) {
      if (tensor.of != TensorName::Of::gradient) continue;
      for (std::size_t p = 0; p < shape_.parameters.size(); ++p) {
        if (shape_.parameters[p].name == tensor.name && !is_complete(static_cast<int>(p)))
          breach("'" + exchange_of(move).name + "' starts before the gradient of '" + tensor.name +
                 "' is complete");
      }
    }
  }
  bool is_complete(int parameter) const {
    for (int m = 0; m < micro_batches_; ++m) {
      for (std::size_t b = 0; b < shape_.blocks.size(); ++b) {
        for (std::size_t p = 0; p < shape_.blocks[b].parts.size(); ++p) {
          const std::vector<int>& used = shape_.blocks[b].parts[p].parameters;
          if (std::ranges::find(used, parameter) == used.end()) continue;
          if (!was_done(Work::backward, static_cast<int>(b), static_cast<int>(p), m)) return false;
        }
      }
    }
    return true;
  }

  const Tables& tables_;
  const ModelShape& shape_;
  int micro_batches_, verdict_, number_;
  std::vector<std::string>& found_;
  std::size_t at_phase_ = 0, at_move_ = 0;
  int steps_ = 0;  // begun before the table that is walked; its own is this one
  int settled_ = 0;
  std::vector<int> updates_;
  std::set<std::pair<int, Step>> started_, waited_;  // exchanges
  std::vector<Piece> done_;                          // in this table
  std::set<std::pair<std::string, int>> given_;      // (activation, micro-batch) in this table
};

using Key = std::pair<std::uint64_t, std::uint32_t>;  // group and slot

class Job {
 public:
  explicit Job(std::span<const VerifiedRank> ranks) {
    for (std::size_t r = 0; r < ranks.size(); ++r) walks_.emplace_back(ranks[r], static_cast<int>(r), found_);
    check_peers();
  }

  std::vector<std::string> run() {
    bool moved = true;
    while (moved) {
      moved = false;
      for (std::size_t r = 0; r < walks_.size(); ++r) moved |= advance(static_cast<int>(r));
    }
    for (Walk& walk : walks_) {
      if (walk.done()) continue;
      const Move* move = walk.next();
      walk.breach("waits for ever for '" +
                  walk.tables().exchanges[static_cast<std::size_t>(move->exchange)].name + "' of offset " +
                  std::to_string(move->offset));
    }
    return std::move(found_);
  }

 private:
  struct Holder {
    int rank = 0;
    int exchange = 0;
  };

  bool advance(int r) {
    Walk& walk = walks_[static_cast<std::size_t>(r)];
    bool moved = false;
    while (!walk.done()) {
      const Move* move = walk.next();
      if (move == nullptr) {
        walk.end_table();
      } else {
        if (move->kind == Move::Kind::wait && !arrives(r, *move)) return moved;
        walk.take(*move);
      }
      moved = true;
    }
    return moved;
  }

  // Whether everything that the wait needs has been started.
  bool arrives(int r, const Move& move) const {
    const Walk& walk = walks_[static_cast<std::size_t>(r)];
    const Exchange& exchange = walk.tables().exchanges[static_cast<std::size_t>(move.exchange)];
    const Step step = walk.step_of(move);
    if (!walk.started(move.exchange, step)) return false;
    if (exchange.kind == Exchange::Kind::send) return true;  // buffered: it may end before it is received
    for (const Holder& holder : holders_.at({exchange.group, exchange.slot})) {
      const Walk& other = walks_[static_cast<std::size_t>(holder.rank)];
      const bool needed = exchange.kind == Exchange::Kind::collective || holder.rank == exchange.peer;
      if (needed && holder.rank != r && !other.started(holder.exchange, step)) return false;
    }
    return true;
  }

  void check_peers() {
    for (std::size_t r = 0; r < walks_.size(); ++r) {
      const std::vector<Exchange>& all = walks_[r].tables().exchanges;
      for (std::size_t e = 0; e < all.size(); ++e)
        holders_[{all[e].group, all[e].slot}].push_back({static_cast<int>(r), static_cast<int>(e)});
    }
    for (std::size_t r = 0; r < walks_.size(); ++r) {
      for (const Exchange& mine : walks_[r].tables().exchanges) check_peer(static_cast<int>(r), mine);
    }
  }

  void check_peer(int r, const Exchange& mine) {
    Walk& walk = walks_[static_cast<std::size_t>(r)];
    const bool collective = mine.kind == Exchange::Kind::collective;
    bool met = collective;
    for (const Holder& holder : holders_.at({mine.group, mine.slot})) {
      if (holder.rank == r || (!collective && holder.rank != mine.peer)) continue;
      const Exchange& theirs = walks_[static_cast<std::size_t>(holder.rank)]
                                   .tables()
                                   .exchanges[static_cast<std::size_t>(holder.exchange)];
      const bool fits = collective ? theirs.kind == Exchange::Kind::collective
                                   : theirs.kind != mine.kind && theirs.kind != Exchange::Kind::collective &&
                                         theirs.peer == r;
      if (!fits) {
        if (collective)
          walk.breach("'" + mine.name + "' is no collective on rank " + std::to_string(holder.rank));
        continue;
      }
      met = true;
      if (theirs.codec != mine.codec)
        walk.breach("'" + mine.name + "' has the codec '" + mine.codec + "', and '" + theirs.codec +
                    "' on rank " + std::to_string(holder.rank));
      if (theirs.traffic != mine.traffic)
        walk.breach("'" + mine.name + "' is of another class on rank " + std::to_string(holder.rank));
    }
    if (!met)
      walk.breach("'" + mine.name + "' has no " +
                  std::string(mine.kind == Exchange::Kind::send ? "receive" : "send") + " on rank " +
                  std::to_string(mine.peer));
  }

  std::vector<std::string> found_;
  std::vector<Walk> walks_;
  std::map<Key, std::vector<Holder>> holders_;
};

}  // namespace

std::vector<std::string> verify(std::span<const VerifiedRank> ranks) { return Job(ranks).run(); }
std::vector<std::string> verify_alone(const VerifiedRank& rank) { return verify(std::span(&rank, 1)); }

}  // namespace weft
