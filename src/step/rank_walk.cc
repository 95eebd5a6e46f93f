#include "step/rank_walk.h"

#include <algorithm>

namespace weft {

namespace {

constexpr std::array kWalk{Phase::first,  Phase::steady, Phase::steady, Phase::steady,
                           Phase::settle, Phase::first,  Phase::settle};

bool contains(const std::vector<TensorName>& all, const TensorName& one) {
  return std::ranges::find(all, one) != all.end();
}

std::array<int, 4> key_of(Work work, int block, int part, int micro_batch) {
  return {static_cast<int>(work), block, part, micro_batch};
}

}  // namespace

RankWalk::RankWalk(const VerifiedRank& rank, std::string who, std::vector<std::string>& found)
    : tables_(*rank.tables),
      shape_(*rank.shape),
      micro_batches_(rank.micro_batches),
      verdict_(rank.verdict),
      who_(std::move(who)),
      found_(found),
      users_(shape_.parameters.size()),
      writers_(shape_.parameters.size()),
      updates_(shape_.parameters.size()),
      announced_(tables_.exchanges.size()) {
  for (std::size_t p = 0; p < shape_.parameters.size(); ++p)
    parameters_.emplace(shape_.parameters[p].name, static_cast<int>(p));
  for (int b = 0; b < shape_.num_blocks(); ++b) {
    const std::vector<PartShape>& parts = shape_.blocks[static_cast<std::size_t>(b)].parts;
    for (int p = 0; p < static_cast<int>(parts.size()); ++p) {
      const PartShape& part = parts[static_cast<std::size_t>(p)];
      for (const int used : part.parameters) users_[static_cast<std::size_t>(used)].push_back({b, p});
      for (const std::string& name : part.takes) takers_[name].push_back({b, p});
      for (const std::string& name : part.gives) takers_[name];
    }
  }
  check_exchanges();
  check_writers();
  if (!check_moves()) at_phase_ = kWalk.size();
}

// ---- before the walk ----

int RankWalk::find(std::uint64_t group, std::uint32_t slot) const {
  const auto found = by_slot_.find({group, slot});
  return found == by_slot_.end() ? -1 : found->second;
}

void RankWalk::check_exchanges() {
  for (std::size_t e = 0; e < tables_.exchanges.size(); ++e) {
    const Exchange& mine = tables_.exchanges[e];
    const auto [at, is_new] = by_slot_.emplace(std::pair(mine.group, mine.slot), static_cast<int>(e));
    if (!is_new)
      breach("'" + exchange(at->second).name + "' and '" + mine.name + "' have the same slot of one group");
    const auto group = tables_.groups.find(mine.group);
    if (group == tables_.groups.end())
      breach("'" + mine.name + "' is of a group whose members nobody knows");
    else if (mine.kind != Exchange::Kind::collective &&
             std::ranges::find(group->second, mine.peer) == group->second.end())
      breach("'" + mine.name + "' has a peer, " + std::to_string(mine.peer) + ", that is not in its group");
    check_names(mine);
  }
}

void RankWalk::check_names(const Exchange& exchange) {
  for (const std::vector<TensorName>* tensors : {&exchange.reads, &exchange.writes}) {
    for (const TensorName& tensor : *tensors) {
      const bool is_parameter = parameters_.contains(tensor.name),
                 is_activation = takers_.contains(tensor.name);
      const bool known = tensor.of == TensorName::Of::other        ? true
                         : tensor.of == TensorName::Of::parameter  ? is_parameter
                         : tensor.of == TensorName::Of::activation ? is_activation
                                                                   : is_parameter || is_activation;
      if (!known || tensor.micro_batch < 0 || tensor.micro_batch >= micro_batches_ ||
          (exchange.each_micro_batch && tensor.micro_batch != 0))
        breach("'" + exchange.name + "' exchanges '" + tensor.name + "' of micro-batch " +
               std::to_string(tensor.micro_batch) + ", which the model does not have");
    }
  }
}

void RankWalk::check_writers() {
  for (std::size_t e = 0; e < tables_.exchanges.size(); ++e) {
    for (const TensorName& tensor : tables_.exchanges[e].writes) {
      if (tensor.of != TensorName::Of::gradient) continue;
      const auto found = parameters_.find(tensor.name);
      if (found != parameters_.end())
        writers_[static_cast<std::size_t>(found->second)].push_back(static_cast<int>(e));
      else
        for (int m = 0; m < (tables_.exchanges[e].each_micro_batch ? micro_batches_ : 1); ++m)
          activation_writers_[{tensor.name, tensor.micro_batch + m}].push_back(static_cast<int>(e));
    }
  }
  const bool alone = std::ranges::all_of(tables_.groups, [](const auto& g) { return g.second.size() < 2; });
  for (std::size_t p = 0; p < writers_.size(); ++p) {
    const std::string of = " the gradient of '" + shape_.parameters[p].name + "'";
    if (writers_[p].empty() && !alone) breach("no exchange writes" + of);
    if (writers_[p].size() > 1)
      breach("'" + exchange(writers_[p][0]).name + "' and '" + exchange(writers_[p][1]).name +
             "' both write" + of);
  }
}

// Whether the tables can be walked at all: what their moves name is there.
bool RankWalk::check_moves() {
  bool holds = true;
  const auto refuse = [&](Phase phase, const std::string& what) {
    found_.push_back(who_ + "table '" + std::string(name_of(phase)) + "': " + what);
    holds = false;
  };
  for (const Phase phase : {Phase::first, Phase::steady, Phase::settle}) {
    for (const Move& move : tables_.of(phase).moves) {
      if (move.kind != Move::Kind::compute) {
        if (move.exchange < 0 || move.exchange >= static_cast<int>(tables_.exchanges.size()))
          refuse(phase, "there is no exchange " + std::to_string(move.exchange));
        else if (move.micro_batch < 0 || move.micro_batch >= micro_batches_ ||
                 (move.micro_batch > 0 && !exchange(move.exchange).each_micro_batch))
          refuse(phase, title(move) + " has no micro-batch " + std::to_string(move.micro_batch));
        else if (move.kind == Move::Kind::start)
          (move.offset < 0 ? starts_ahead_ : starts_).insert(move.exchange);
        continue;
      }
      const Piece& piece = move.piece;
      const bool in_block = piece.block >= 0 && piece.block < shape_.num_blocks();
      const auto parts = in_block ? shape_.blocks[static_cast<std::size_t>(piece.block)].parts.size() : 0;
      const bool there =
          piece.work == Work::update || (piece.part >= 0 && static_cast<std::size_t>(piece.part) < parts &&
                                         piece.micro_batch >= 0 && piece.micro_batch < micro_batches_);
      if (!in_block || !there)
        refuse(phase, "the model has no part " + std::to_string(piece.part) + " of block " +
                          std::to_string(piece.block) + " or no micro-batch " +
                          std::to_string(piece.micro_batch));
      else if (phase == Phase::settle && piece.work != Work::update)
        refuse(phase, title(piece) + " is no work of a table that settles");
    }
  }
  if (verdict_ >= static_cast<int>(tables_.exchanges.size())) refuse(Phase::first, "there is no verdict");
  return holds;
}

// ---- the walk ----

bool RankWalk::done() const { return at_phase_ == kWalk.size(); }

const Move* RankWalk::next() const {
  const std::vector<Move>& moves = tables_.of(kWalk[at_phase_]).moves;
  return at_move_ < moves.size() ? &moves[at_move_] : nullptr;
}

RankWalk::Step RankWalk::step_of(const Move& move) const {
  return {settled_, (kWalk[at_phase_] == Phase::settle ? steps_ - 1 : steps_) - move.offset};
}

void RankWalk::breach(const std::string& what) {
  found_.push_back(who_ + "table '" + std::string(name_of(kWalk[std::min(at_phase_, kWalk.size() - 1)])) +
                   "': " + what);
}

void RankWalk::take(const Move& move) {
  switch (move.kind) {
    case Move::Kind::compute:
      compute(move.piece);
      break;
    case Move::Kind::announce:
      announce(move);
      break;
    case Move::Kind::start:
      start(move);
      break;
    case Move::Kind::wait:
      wait(move);
      break;
  }
  ++at_move_;
}

void RankWalk::end_table() {
  for (std::size_t p = 0; p < updates_.size(); ++p) {
    if (updates_[p] != steps_)
      breach("'" + shape_.parameters[p].name + "' was updated " + std::to_string(updates_[p]) + " times in " +
             std::to_string(steps_) + " steps");
  }
  if (kWalk[at_phase_] == Phase::settle) {
    check_segment();
    given_.clear();
    ++settled_;
    segment_ = steps_;
  } else {
    for (const Piece& piece : whole_batch(shape_.parts(), micro_batches_)) {
      const Place place{piece.block, piece.part};
      const bool there = piece.work == Work::forward
                             ? was_done(Work::forward, place, piece.micro_batch)
                             : went_back(place, piece.micro_batch) && has_added(place, piece.micro_batch);
      if (!there) breach(title(piece) + " is not computed");
    }
    std::erase_if(given_, [this](const Given& given) { return given.first <= now(); });
    ++steps_;
  }
  done_.clear();
  ++at_phase_;
  at_move_ = 0;
}

// Of the steps since the job settled last: whatever a step has was started and awaited in each.
void RankWalk::check_segment() {
  for (int e = 0; e < static_cast<int>(tables_.exchanges.size()); ++e) {
    const std::string name = "'" + exchange(e).name + "'";
    if (announced_[static_cast<std::size_t>(e)]) breach(name + " is announced and never started");
    if (exchange(e).at_installation) {
      if (!waited_.contains({e, {settled_, segment_}, 0})) breach("nobody waits for " + name);
      continue;
    }
    for (int step = segment_; step < steps_; ++step) {
      for (int m = 0; m < (exchange(e).each_micro_batch ? micro_batches_ : 1); ++m) {
        if (started_.contains({e, {settled_, step}, m})) continue;
        if (step == segment_ && starts_ahead_.contains(e) && !starts_.contains(e)) continue;
        breach(name + " is not started in step " + std::to_string(step) +
               (exchange(e).each_micro_batch ? ", micro-batch " + std::to_string(m) : ""));
      }
    }
  }
  for (const Occasion& what : started_) {
    if (std::get<Step>(what).first == settled_ && !waited_.contains(what))
      breach("nobody waits for '" + exchange(std::get<0>(what)).name + "'");
  }
}

// ---- pieces ----

const PartShape& RankWalk::part_of(const Piece& piece) const {
  return shape_.blocks[static_cast<std::size_t>(piece.block)].parts[static_cast<std::size_t>(piece.part)];
}

bool RankWalk::was_done(Work work, const Place& place, int micro_batch) const {
  return done_.contains(key_of(work, place.block, place.part, micro_batch));
}

bool RankWalk::went_back(const Place& place, int micro_batch) const {
  return was_done(Work::backward, place, micro_batch) || was_done(Work::input_gradient, place, micro_batch);
}

bool RankWalk::has_added(const Place& place, int micro_batch) const {
  return was_done(Work::backward, place, micro_batch) || was_done(Work::weight_gradient, place, micro_batch);
}

void RankWalk::compute(const Piece& piece) {
  const bool is_new = done_.insert(key_of(piece.work, piece.block, piece.part, piece.micro_batch)).second;
  if (piece.work == Work::update) return update(piece);
  if (!is_new) breach(title(piece) + " is computed twice");
  for (const int p : part_of(piece).parameters)
    check_free(title(piece), {TensorName::Of::parameter, shape_.parameters[static_cast<std::size_t>(p)].name},
               Use::reads, now());
  if (piece.work == Work::forward) return forward(piece);
  const Place place{piece.block, piece.part};
  const bool halves = was_done(Work::input_gradient, place, piece.micro_batch) ||
                      was_done(Work::weight_gradient, place, piece.micro_batch);
  if (halves && was_done(Work::backward, place, piece.micro_batch))
    breach(title(piece) + " is computed both whole and in halves");
  if (piece.work != Work::weight_gradient) return backward(piece);
  if (!was_done(Work::input_gradient, place, piece.micro_batch))
    breach(title(piece) + " comes before the gradient of its input");
}

void RankWalk::forward(const Piece& piece) {
  const PartShape& part = part_of(piece);
  for (const std::string& name : part.takes) {
    if (!given_.contains({now(), {name, piece.micro_batch}}))
      breach(title(piece) + " takes '" + name + "', which nobody has given yet");
  }
  for (const std::string& name : part.gives) {
    check_free(title(piece), {TensorName::Of::activation, name, piece.micro_batch}, Use::writes, now());
    given_.insert({now(), {name, piece.micro_batch}});
  }
  for (const int p : part.parameters) {
    if (updates_[static_cast<std::size_t>(p)] != steps_)
      breach(title(piece) + " uses '" + shape_.parameters[static_cast<std::size_t>(p)].name +
             "' before its last update");
  }
}

void RankWalk::backward(const Piece& piece) {
  if (!was_done(Work::forward, {piece.block, piece.part}, piece.micro_batch))
    breach(title(piece) + " comes before its forward");
  for (const std::string& name : part_of(piece).gives) {
    for (const Place& reader : takers_.at(name)) {
      if (!went_back(reader, piece.micro_batch))
        breach(title(piece) + " comes before that of its reader '" +
               part_of({Work::backward, reader.block, reader.part, 0}).name + "'");
    }
    const auto writers = activation_writers_.find({name, piece.micro_batch});
    if (writers == activation_writers_.end()) continue;
    for (const int e : writers->second) {
      if (!waited_.contains({e, now(), exchange(e).each_micro_batch ? piece.micro_batch : 0}))
        breach(title(piece) + " comes before '" + exchange(e).name + "' has ended");
    }
  }
}

void RankWalk::update(const Piece& piece) {
  const Step last{settled_, steps_ - 1};
  if (steps_ == 0) return breach(title(piece) + " has no step to update with");
  if (verdict_ >= 0 && !waited_.contains({verdict_, last, 0}))
    breach(title(piece) + " comes before the verdict");
  for (std::size_t p = 0; p < shape_.parameters.size(); ++p) {
    if (users_[p].empty() || users_[p].front().block != piece.block) continue;
    ++updates_[p];
    check_free(title(piece), {TensorName::Of::parameter, shape_.parameters[p].name}, Use::writes, now());
    for (const int e : writers_[p]) {
      if (!waited_.contains({e, last, 0}))
        breach(title(piece) + " comes before '" + exchange(e).name + "' has ended");
    }
  }
}

// ---- exchanges ----

// A start inside a piece is no move of the walker, which lets gradients go on where the announced one starts.
void RankWalk::announce(const Move& move) {
  if (announced_[static_cast<std::size_t>(move.exchange)])
    breach(title(move) + " is announced twice before it is started");
  announced_[static_cast<std::size_t>(move.exchange)] = true;
}

void RankWalk::start(const Move& move) {
  const Exchange& mine = exchange(move.exchange);
  const Occasion key = occasion_of(move);
  const Step step = step_of(move);
  if (mine.at_installation || !started_.insert(key).second) breach(title(move) + " is started twice");
  if (!move.inside) announced_[static_cast<std::size_t>(move.exchange)] = false;
  for (const TensorName& tensor : mine.reads) check_start(move, in(key, tensor), Use::reads);
  for (const TensorName& named : mine.writes) {
    const TensorName tensor = in(key, named);
    if (tensor.of != TensorName::Of::gradient || !contains(mine.reads, named))
      check_start(move, tensor, Use::writes);
    if (tensor.of == TensorName::Of::activation) given_.erase({step, {tensor.name, tensor.micro_batch}});
  }
  const auto is_touched = [](const TensorName& t) {
    return t.of == TensorName::Of::parameter || t.of == TensorName::Of::activation;
  };
  if (std::ranges::any_of(mine.reads, is_touched) || std::ranges::any_of(mine.writes, is_touched))
    touching_.insert(key);
}

void RankWalk::wait(const Move& move) {
  const Occasion key = occasion_of(move);
  if (!waited_.insert(key).second) breach(title(move) + " is awaited twice");
  touching_.erase(key);
  for (const TensorName& named : exchange(move.exchange).writes) {
    const TensorName tensor = in(key, named);
    if (tensor.of == TensorName::Of::activation)
      given_.insert({step_of(move), {tensor.name, tensor.micro_batch}});
  }
}

void RankWalk::check_start(const Move& move, const TensorName& tensor, Use use) {
  switch (tensor.of) {
    case TensorName::Of::other:
      return;
    case TensorName::Of::parameter:
      return check_free(title(move), tensor, use, step_of(move));
    case TensorName::Of::activation:
      if (use == Use::reads && !given_.contains({step_of(move), {tensor.name, tensor.micro_batch}}))
        breach(title(move) + " starts before '" + tensor.name + "' was computed");
      return check_free(title(move), tensor, use, step_of(move));
    case TensorName::Of::gradient:
      break;
  }
  const auto found = parameters_.find(tensor.name);
  if (found != parameters_.end()) return check_gradient(move, found->second);
  if (use == Use::reads && (step_of(move) != now() || !has_gradient(tensor, move.exchange)))
    breach(title(move) + " starts before the gradient of '" + tensor.name + "' was computed");
}

void RankWalk::check_gradient(const Move& move, int parameter) {
  const int step = step_of(move).second;
  const std::string of =
      " the gradient of '" + shape_.parameters[static_cast<std::size_t>(parameter)].name + "'";
  if (step > steps_ || (step == steps_ && !is_complete(parameter)))
    breach(title(move) + " starts before" + of + " is complete");
  else if (step < segment_ || step < steps_ - 1 || (step == steps_ - 1 && is_begun(parameter)))
    breach(title(move) + " starts after" + of + " has become that of another step");
}

// `who` touches a tensor of that step. Parameters are the same in all steps.
void RankWalk::check_free(const std::string& who, const TensorName& tensor, Use use, const Step& step) {
  for (const Occasion& what : touching_) {
    if (tensor.of == TensorName::Of::activation && std::get<Step>(what) != step) continue;
    const Exchange& other = exchange(std::get<0>(what));
    if (!touches(other.writes, what, tensor) && (use == Use::reads || !touches(other.reads, what, tensor)))
      continue;
    breach(who + (use == Use::reads ? " reads '" : " writes '") + tensor.name + "' while '" + other.name +
           "' is under way");
  }
}

TensorName RankWalk::in(const Occasion& what, TensorName tensor) const {
  const bool of_model = tensor.of == TensorName::Of::parameter || parameters_.contains(tensor.name);
  if (exchange(std::get<0>(what)).each_micro_batch && !of_model) tensor.micro_batch = std::get<2>(what);
  return tensor;
}

bool RankWalk::touches(const std::vector<TensorName>& all, const Occasion& what,
                       const TensorName& tensor) const {
  return std::ranges::any_of(all, [&](const TensorName& named) { return in(what, named) == tensor; });
}

bool RankWalk::is_complete(int parameter) const {
  for (const Place& user : users_[static_cast<std::size_t>(parameter)]) {
    for (int m = 0; m < micro_batches_; ++m) {
      if (!has_added(user, m)) return false;
    }
  }
  return true;
}

bool RankWalk::is_begun(int parameter) const {
  for (const Place& user : users_[static_cast<std::size_t>(parameter)]) {
    for (int m = 0; m < micro_batches_; ++m) {
      if (has_added(user, m)) return true;
    }
  }
  return false;
}

// By the backward of all that take the activation here, and by all exchanges that bring more of it.
bool RankWalk::has_gradient(const TensorName& activation, int reader) const {
  const std::vector<Place>& takers = takers_.at(activation.name);
  for (const Place& taker : takers) {
    if (!went_back(taker, activation.micro_batch)) return false;
  }
  bool any = !takers.empty();
  const auto writers = activation_writers_.find({activation.name, activation.micro_batch});
  if (writers == activation_writers_.end()) return any;
  for (const int e : writers->second) {
    if (e == reader) continue;
    const int m = exchange(e).each_micro_batch ? activation.micro_batch : 0;
    if (!waited_.contains({e, now(), m})) return false;
    any = true;
  }
  return any;
}

}  // namespace weft
