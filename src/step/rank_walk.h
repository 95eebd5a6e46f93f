// One rank on its way through its tables, for the verifier (verify.h): what it has computed, started and
// awaited so far, and what it breaches.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "step/verify.h"

namespace weft {

class RankWalk {
 public:
  // How often the job has settled before, and the step from 0. A settled job begins anew: what it had agreed
  // on for the next step is agreed on again.
  using Step = std::pair<int, int>;
  // An exchange of a step and, where it happens in each, of a micro-batch.
  using Occasion = std::tuple<int, Step, int>;

  // `who`: "rank 3, ", in front of its sentences. REQUIRES: what `rank` names and `found` live longer.
  RankWalk(const VerifiedRank& rank, std::string who, std::vector<std::string>& found);

  const Tables& tables() const { return tables_; }
  const Exchange& exchange(int number) const { return tables_.exchanges[static_cast<std::size_t>(number)]; }
  // Of that group and slot; -1: there is none.
  int find(std::uint64_t group, std::uint32_t slot) const;

  bool done() const;
  // The move that comes next, or null at the end of a table.
  const Move* next() const;
  Step step_of(const Move& move) const;
  bool started(const Occasion& what) const {
    return exchange(std::get<0>(what)).at_installation || started_.contains(what);
  }
  // Takes the next move, whose wait (if it is one) is over.
  void take(const Move& move);
  void end_table();

  void breach(const std::string& what);

 private:
  enum class Use : std::uint8_t { reads, writes };
  struct Place {
    int block = 0, part = 0;
  };
  using Given = std::pair<Step, std::pair<std::string, int>>;  // an activation of a micro-batch

  void check_exchanges();
  void check_names(const Exchange& exchange);
  void check_writers();
  bool check_moves();
  void check_segment();

  const PartShape& part_of(const Piece& piece) const;
  std::string title(const Piece& piece) const { return shape_.title(piece, micro_batches_); }
  std::string title(const Move& move) const { return "'" + exchange(move.exchange).name + "'"; }
  bool was_done(Work work, const Place& place, int micro_batch) const;
  bool went_back(const Place& place, int micro_batch) const;
  bool has_added(const Place& place, int micro_batch) const;
  Step now() const { return {settled_, steps_}; }

  void compute(const Piece& piece);
  void forward(const Piece& piece);
  void backward(const Piece& piece);
  void update(const Piece& piece);
  Occasion occasion_of(const Move& move) const { return {move.exchange, step_of(move), move.micro_batch}; }
  // Its tensors, in the micro-batch of that occasion.
  TensorName in(const Occasion& what, TensorName tensor) const;
  void announce(const Move& move);
  void start(const Move& move);
  void wait(const Move& move);

  void check_start(const Move& move, const TensorName& tensor, Use use);
  void check_gradient(const Move& move, int parameter);
  void check_free(const std::string& who, const TensorName& tensor, Use use, const Step& step);
  bool touches(const std::vector<TensorName>& all, const Occasion& what, const TensorName& tensor) const;
  bool is_complete(int parameter) const;
  bool is_begun(int parameter) const;
  bool has_gradient(const TensorName& activation, int reader) const;

  const Tables& tables_;
  const ModelShape& shape_;
  int micro_batches_, verdict_;
  std::string who_;
  std::vector<std::string>& found_;
  std::map<std::pair<std::uint64_t, std::uint32_t>, int> by_slot_;
  std::map<std::string, int> parameters_;             // by name
  std::vector<std::vector<Place>> users_;             // of each parameter
  std::map<std::string, std::vector<Place>> takers_;  // of each activation that is given or taken here
  std::vector<std::vector<int>> writers_;             // of each parameter's gradient
  // Of gradients, by micro-batch.
  std::map<std::pair<std::string, int>, std::vector<int>> activation_writers_;
  std::set<int> starts_, starts_ahead_;  // exchanges that a table starts, of its step and of the next one

  std::size_t at_phase_ = 0, at_move_ = 0;
  int steps_ = 0;  // begun before the table that is walked; its own is this one
  int settled_ = 0;
  int segment_ = 0;           // its first step: since the job settled last
  std::vector<int> updates_;  // of each parameter
  std::set<Occasion> started_, waited_;
  std::set<Occasion> touching_;        // those under way that read or write parameters or activations
  std::vector<bool> announced_;        // of each exchange: and not started since
  std::set<std::array<int, 4>> done_;  // pieces in this table
  std::set<Given> given_;
};

}  // namespace weft
