#include "step/weaver.h"

#include <algorithm>

namespace weft {

Weaver::Weaver(Phase phase, const ModelShape& shape, int micro_batches, const std::vector<Piece>& order)
    : phase_(phase), shape_(shape), micro_batches_(micro_batches) {
  for (const Piece& piece : order) cells_.push_back({.piece = piece, .before = {}, .after = {}});
}

int Weaver::find(const Piece& piece) const {
  const auto found =
      std::find_if(cells_.begin(), cells_.end(), [&](const Cell& cell) { return cell.piece == piece; });
  return found == cells_.end() ? -1 : static_cast<int>(found - cells_.begin());
}

Piece Weaver::completes(std::span<const int> parameters) const {
  for (std::size_t i = cells_.size(); i-- > 0;) {
    const Piece& piece = cells_[i].piece;
    if (!adds_gradients(piece.work)) continue;
    const PartShape& part =
        shape_.blocks[static_cast<std::size_t>(piece.block)].parts[static_cast<std::size_t>(piece.part)];
    if (std::ranges::find_first_of(part.parameters, parameters) != part.parameters.end()) return piece;
  }
  return {Work::backward, -1, 0, 0};
}

Piece Weaver::completes_all() const {
  for (std::size_t i = cells_.size(); i-- > 0;) {
    if (adds_gradients(cells_[i].piece.work)) return cells_[i].piece;
  }
  return {Work::backward, -1, 0, 0};
}

Piece Weaver::before_backward() const {
  const auto first =
      std::ranges::find_if(cells_, [](const Cell& cell) { return goes_back(cell.piece.work); });
  return first == cells_.begin() ? cells_.front().piece : std::prev(first)->piece;
}

Piece Weaver::going_back(int block, int part, int micro_batch) const {
  const Piece half{Work::input_gradient, block, part, micro_batch};
  return has(half) ? half : Piece{Work::backward, block, part, micro_batch};
}

Move Weaver::placed(Move move) const {
  move.exchange += base_;
  return move;
}

void Weaver::at_begin(Move move) { begin_.push_back(placed(move)); }
void Weaver::at_end(Move move) { end_.push_back(placed(move)); }

void Weaver::before(const Piece& piece, Move move) {
  if (const int at = find(piece); at >= 0)
    cells_[static_cast<std::size_t>(at)].before.push_back(placed(move));
}
void Weaver::after(const Piece& piece, Move move) {
  if (const int at = find(piece); at >= 0) cells_[static_cast<std::size_t>(at)].after.push_back(placed(move));
}

Table Weaver::take() const {
  Table out{.phase = phase_, .moves = begin_};
  for (const Cell& cell : cells_) {
    out.moves.insert(out.moves.end(), cell.before.begin(), cell.before.end());
    out.moves.push_back(compute_of(cell.piece));
    out.moves.insert(out.moves.end(), cell.after.begin(), cell.after.end());
  }
  out.moves.insert(out.moves.end(), end_.begin(), end_.end());
  return out;
}

}  // namespace weft
