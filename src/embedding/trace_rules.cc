#include "embedding/trace_rules.h"

#include <algorithm>
#include <array>

#include "embedding/table.h"

namespace weft {

namespace {

// An operation of an exchange, and when the first of its messages left: never, if it sent none.
struct Traced {
  Time ready{}, finished{}, left = kNever;
  std::uint32_t step = 0;
};
using Operations = std::vector<Traced>;  // in the order in which they were submitted

// Lookups outside of steps are blocking: they are none of a step's.
Operations operations_of(const Trace& trace, std::uint32_t slot) {
  Operations out;
  for (const TraceEvent& e : trace.events()) {
    if (e.kind == TraceEvent::Kind::operation && e.slot == slot && e.traffic != TrafficClass::blocking)
      out.push_back({.ready = e.ready, .finished = e.finished, .step = e.step});
  }
  std::ranges::sort(out, {}, &Traced::step);
  for (const TraceEvent& e : trace.events()) {
    if (e.kind != TraceEvent::Kind::micro_op || e.slot != slot) continue;
    const auto of = std::ranges::lower_bound(out, e.step, {}, &Traced::step);
    if (of != out.end() && of->step == e.step) of->left = std::min(of->left, e.started);
  }
  return out;
}

// By when they were submitted; null: there is none. What one event submits has one time.
const Traced* last_until(const Operations& all, Time when) {
  const auto found = std::ranges::upper_bound(all, when, {}, &Traced::ready);
  return found == all.begin() ? nullptr : &*(found - 1);
}
const Traced* first_from(const Operations& all, Time when) {
  const auto found = std::ranges::lower_bound(all, when, {}, &Traced::ready);
  return found == all.end() ? nullptr : &*found;
}
const Traced* first_behind(const Operations& all, Time when) { return first_from(all, when + Time{1}); }

}  // namespace

std::vector<std::string> verify_table(const Trace& trace, std::string_view table, std::uint32_t first_slot) {
  std::array<Operations, kTableExchanges> all;
  for (int e = 0; e < kTableExchanges; ++e)
    all[static_cast<std::size_t>(e)] = operations_of(trace, first_slot + static_cast<std::uint32_t>(e));
  const auto of = [&](TableExchange e) -> const Operations& { return all[static_cast<std::size_t>(e)]; };
  std::vector<std::string> out;
  const auto breach = [&](const char* what, const Traced& at) {
    out.push_back("table '" + std::string(table) + "', operation " + std::to_string(at.step) + ": " + what);
  };
  for (const Traced& rows : of(TableExchange::rows)) {
    for (const TableExchange before : {TableExchange::prior, TableExchange::update}) {
      const Traced* const updated = last_until(of(before), rows.ready);
      if (updated != nullptr && rows.left < updated->finished)
        breach("rows left before the prior rows of the step before were updated", rows);
    }
  }
  for (const Traced& delayed : of(TableExchange::delayed)) {
    const Traced* const prior = first_behind(of(TableExchange::prior), delayed.ready);
    if (prior != nullptr && prior->finished < delayed.finished)
      breach("delayed rows were applied behind the prior rows of the next step", delayed);
    const Traced* const rows = prior == nullptr ? nullptr : first_from(of(TableExchange::rows), prior->ready);
    if (rows != nullptr && rows->left < delayed.finished)
      breach("delayed rows were applied behind a lookup that may read them", delayed);
    const Traced* const early = first_behind(of(TableExchange::early), delayed.ready);
    if (early != nullptr && early->left < delayed.finished)
      breach("delayed rows were applied behind a lookup in advance that may read them", delayed);
  }
  return out;
}

}  // namespace weft
