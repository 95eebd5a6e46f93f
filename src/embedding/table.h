// A table of a hybrid embedding as one rank has it: its columns, and the operations of its exchanges.
// hybrid.h says what they are and when they start.
//
// Lists of ids are sorted and have no id twice. Every rank knows all lists of a batch, so nothing but values
// travels: sender and receiver make the same sublists of them.
//
// Three steps are alive: the last one, whose delayed rows may be under way; the one that is walked; and the
// next one, whose ids are known and whose rows are looked up.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "embedding/options.h"
#include "state/registry.h"
#include "weft/collective.h"
#include "weft/engine.h"

namespace weft {

// What travels for a table, each with a slot of its own.
enum class TableExchange : std::uint8_t { ids, early, rows, prior, delayed, update };
inline constexpr int kTableExchanges = 6;
constexpr std::string_view name_of(TableExchange e) {
  constexpr std::string_view names[] = {"ids", "early rows", "rows", "prior rows", "delayed rows", "update"};
  return names[static_cast<std::size_t>(e)];
}

class HybridTable {
 public:
  // `optimizer` has the table as `parameter`. All of them outlive it; it outlives its operations.
  static std::unique_ptr<HybridTable> make(Engine& engine, const Comm& comm, const TableInfo& info,
                                           const HybridOptions& options, std::uint32_t first_slot,
                                           Optimizer& optimizer, int parameter);
  virtual ~HybridTable() = default;
  HybridTable(const HybridTable&) = delete;
  HybridTable& operator=(const HybridTable&) = delete;

  const TableInfo& info() const { return info_; }
  const TableLayout& layout() const { return layout_; }
  BlockRange columns(int rank) const { return layout_.columns(rank); }
  std::uint32_t slot(TableExchange e) const { return first_slot_ + static_cast<std::uint32_t>(e); }
  TrafficClass traffic(TableExchange e) const;

  // ---- events ----
  // Without `reads` no rows come for them. Throws UsageError for one that has no row.
  void announce(std::span<const std::int64_t> ids, bool reads = true);
  void begin_step() { ++walked_; }
  virtual void start(TableExchange exchange, int offset) = 0;
  virtual void gradient_ready(std::span<const float> gradient) = 0;
  virtual void gradient_ready(std::span<const double> gradient) = 0;
  void end_step();  // without a gradient it counts as zeros
  virtual Ticket ticket(TableExchange exchange, int offset) const = 0;
  virtual std::vector<Ticket> work() const = 0;  // that packs gradients, of the steps that are alive
  // Of the step that has ended last, own columns. REQUIRES: updates wait; its exchange is done.
  virtual std::string trouble() const = 0;  // empty: the gradient is finite
  virtual double squares() const = 0;
  virtual void close(bool committed, double scale) = 0;

  // ---- what the driver asks, of the step that is walked ----
  // This rank's rows, all columns, one after the other. REQUIRES: their exchange was awaited.
  virtual Dense rows() = 0;
  // Their ids, sorted; and of each announced id, which of them it is.
  virtual std::span<const std::int32_t> ids() const = 0;
  virtual std::span<const std::int32_t> places() const = 0;
  virtual std::int64_t num_rows() const = 0;

  // Payload of this rank in the step that was closed last: what its exchanges have sent, and by formula
  // (formula.h). REQUIRES: they are done, and no second step was begun behind it.
  virtual std::uint64_t step_bytes() const = 0;
  virtual std::int64_t formula_bytes(const LinkCost& link) const = 0;

  virtual Dense values() = 0;  // what this rank holds, row-major
  // Where that is in the table. Throws UsageError where it is no part in one piece: of rows that are dealt.
  Shard shard() const;
  // Row after row of the ids, all columns, of all ranks that call it. REQUIRES: nothing is under way.
  virtual Ticket look_up(std::span<const std::int64_t> ids, Dense out) = 0;

  // Payload that this rank has sent in all exchanges of a kind.
  std::uint64_t sent_bytes(TableExchange e) const {
    return sent_[static_cast<std::size_t>(e)].load(std::memory_order_relaxed);
  }
  // Of the last step that was split: prior rows among all. Any thread.
  double prior_share() const { return prior_share_; }
  bool splits() const { return splits_; }  // false: their share was too large for some steps in a row
  // What a user should know of how it goes: that it does not split any more. Empty: nothing. Any thread.
  std::string note() const { return splits_ ? "" : note_; }

 protected:
  HybridTable(Engine& engine, const Comm& comm, const TableInfo& info, const HybridOptions& options,
              std::uint32_t first_slot, Optimizer& optimizer, int parameter);
  virtual void take_zeros() = 0;
  void check(std::span<const std::int64_t> ids) const;
  SubmitOptions submit_options(TableExchange e);

  Engine& engine_;
  Comm comm_;
  TableInfo info_;
  const HybridOptions& options_;
  TableLayout layout_;
  std::uint32_t first_slot_;
  Optimizer& optimizer_;
  int parameter_;
  std::int64_t walked_ = -1;           // step that is walked, or was walked last
  bool announced_ = false;             // a batch that no step has taken yet
  std::vector<std::int64_t> pending_;  // its ids
  bool reads_ = true;                  // and whether its rows are to come
  bool has_gradient_ = false;          // of the step that is walked
  std::int64_t ended_ = -1;            // step whose backward was the last to end
  std::int64_t closed_ = -1;           // step that was the last to be committed or rolled back
  std::array<std::uint32_t, kTableExchanges> attempts_{};
  std::array<std::atomic<std::uint64_t>, kTableExchanges> sent_{};  // the engine's thread adds
  std::atomic<double> prior_share_ = 0;                             // the pool's threads write
  std::string note_;                                                // written before splits_ is
  std::atomic<bool> splits_ = true;
};

}  // namespace weft
