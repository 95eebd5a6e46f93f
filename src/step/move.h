// A rank's training step as data: rows in order, each of which computes a piece of the model, announces,
// starts or awaits an exchange.
//
// Steps overlap, so a move names the step of its exchange by an offset: 0 is the step of the table that is
// walked, 1 the one before it, -1 the next one. A plan has three tables:
//   first    the first step, and the first behind a settled one: nothing is under way
//   steady   every other step: what the one before left under way is awaited where it is needed
//   settle   no step: what the last one (offset 0) left under way is awaited, parameters are updated
// and a forward alone, for evaluations, is what happens in a micro-batch until its last forward.
//
// A start that is `inside` happens on an event inside the piece in front of it (a gradient that is ready),
// at the latest at that piece's end; its row says so to the verifier and to people, and walking it does
// nothing.
//
// What happens between parts of the model (rows that travel to their experts, activations of a stage) happens
// in every micro-batch: such an exchange is there once in the list, and its moves name the micro-batch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "patterns/schedule.h"
#include "weft/traffic.h"

namespace weft {

// A tensor of the model as exchanges name it.
struct TensorName {
  enum class Of : std::uint8_t { parameter, gradient, activation, other };
  Of of = Of::gradient;
  std::string name;     // of a gradient: whose it is, a parameter or an activation
  int micro_batch = 0;  // of an activation and its gradient
  friend bool operator==(const TensorName&, const TensorName&) = default;
};

// What is started and awaited once in every step, or in every micro-batch. Its place in the plan's list is the
// same in all tables of a rank.
struct Exchange {
  enum class Kind : std::uint8_t { collective, send, receive };
  std::string name;  // "gradients of bucket 3 from layer.0.attention.heads.weight"
  Kind kind = Kind::collective;
  TrafficClass traffic = TrafficClass::gradient;
  std::uint64_t group = 0;        // its id
  std::uint32_t slot = 0;         // of its identity in the group
  int peer = -1;                  // of a send or receive: rank in the world
  std::string codec;              // as both sides must have it
  bool at_installation = false;   // started once, before the first step: it is only awaited
  bool each_micro_batch = false;  // in every one; its tensors are of that one
  double predicted_seconds = 0;   // of one that is announced, where it can be told: held traffic ages later
  std::vector<TensorName> reads, writes;
  friend bool operator==(const Exchange&, const Exchange&) = default;
};

// Of an exchange: its step, from the one that is walked backwards, and where it happens in each, its
// micro-batch.
struct When {
  int offset = 0;
  int micro_batch = 0;
};

struct Move {
  enum class Kind : std::uint8_t { compute, announce, start, wait };
  Kind kind = Kind::compute;
  Piece piece;          // of compute
  int exchange = -1;    // of the others: place in the list
  int offset = 0;       // of a start and a wait
  int micro_batch = 0;  // of an exchange that happens in each
  bool inside = false;  // of a start
  When when() const { return {offset, micro_batch}; }
  friend bool operator==(const Move&, const Move&) = default;
};

inline Move compute_of(const Piece& piece) { return {.kind = Move::Kind::compute, .piece = piece}; }
inline Move announce_of(int exchange, int micro_batch = 0) {
  return {.kind = Move::Kind::announce, .exchange = exchange, .micro_batch = micro_batch};
}
inline Move start_of(int exchange, int offset = 0, int micro_batch = 0) {
  return {.kind = Move::Kind::start, .exchange = exchange, .offset = offset, .micro_batch = micro_batch};
}
inline Move start_inside(int exchange) {
  return {.kind = Move::Kind::start, .exchange = exchange, .inside = true};
}
inline Move wait_of(int exchange, int offset, int micro_batch = 0) {
  return {.kind = Move::Kind::wait, .exchange = exchange, .offset = offset, .micro_batch = micro_batch};
}

enum class Phase : std::uint8_t { first, steady, settle, forward };
constexpr std::string_view name_of(Phase phase) {
  constexpr std::string_view names[] = {"first", "steady", "settle", "forward"};
  return names[static_cast<std::size_t>(phase)];
}

struct Table {
  Phase phase = Phase::first;
  std::vector<Move> moves;
  int micro_batches() const {
    int last = 0;
    for (const Move& move : moves) last = std::max(last, move.piece.micro_batch);
    return last + 1;
  }
  friend bool operator==(const Table&, const Table&) = default;
};

struct Tables {
  std::vector<Exchange> exchanges;
  std::map<std::uint64_t, std::vector<int>> groups;  // of the exchanges, by id: their members in the world
  Table first{.phase = Phase::first, .moves = {}};
  Table steady{.phase = Phase::steady, .moves = {}};
  Table settle{.phase = Phase::settle, .moves = {}};
  const Table& of(Phase phase) const {
    return phase == Phase::first ? first : phase == Phase::steady ? steady : settle;
  }
  friend bool operator==(const Tables&, const Tables&) = default;
};

}  // namespace weft
