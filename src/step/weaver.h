// How a table is made: pieces in order, and around them the moves of the strategies, in the order in which
// they ask.
#pragma once

#include <span>
#include <vector>

#include "step/move.h"
#include "weft/train/shape.h"

namespace weft {

class Weaver {
 public:
  // `order`: the pieces of the phase, updates among them.
  Weaver(Phase phase, const ModelShape& shape, int micro_batches, const std::vector<Piece>& order);

  Phase phase() const { return phase_; }
  const ModelShape& shape() const { return shape_; }
  int micro_batches() const { return micro_batches_; }
  // Whose exchanges are meant from here on: its first one has this place in the plan's list.
  void set_base(int base) { base_ = base; }

  // Offset of what the step before left under way.
  int last() const { return phase_ == Phase::settle ? 0 : 1; }
  bool has(const Piece& piece) const { return find(piece) >= 0; }
  // The piece behind which the gradients of these parameters are complete, and the one behind which all are. A
  // table that settles has none: what comes back is in no table.
  Piece completes(std::span<const int> parameters) const;
  Piece completes_all() const;
  // The last piece in front of the first that goes back. REQUIRES: the table does not settle.
  Piece before_backward() const;
  // Behind which what the part took has its gradient: its backward, or the first half of it.
  Piece going_back(int block, int part, int micro_batch) const;
  // Exchanges are the strategy's own numbers. A piece that this table does not have is left alone, and so is
  // the move.
  void at_begin(Move move);
  void at_end(Move move);
  void before(const Piece& piece, Move move);
  void after(const Piece& piece, Move move);

  Table take() const;

 private:
  struct Cell {
    Piece piece;
    std::vector<Move> before, after;
  };
  int find(const Piece& piece) const;
  Move placed(Move move) const;

  Phase phase_;
  const ModelShape& shape_;
  int micro_batches_;
  int base_ = 0;
  std::vector<Move> begin_, end_;
  std::vector<Cell> cells_;
};

}  // namespace weft
