#include "weft/trace.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <set>
#include <string_view>
#include <utility>

#include "base/identity.h"

namespace weft {

namespace {

// JSON string contents: quotes, backslashes and control characters escaped.
std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned>(c));
      out += code;
    } else {
      out += c;
    }
  }
  return out;
}

std::string microseconds(Time t) {
  char text[40];
  std::snprintf(text, sizeof text, "%.3f", static_cast<double>(t.count()) * 1e-3);
  return text;
}

std::string arguments(const TraceEvent& e) {
  std::string out = "{\"class\":\"" + std::string(name_of(e.traffic)) +
                    "\",\"priority\":" + std::to_string(e.priority) + ",\"slot\":" + std::to_string(e.slot) +
                    ",\"step\":" + std::to_string(e.step) + ",\"bytes\":" + std::to_string(e.bytes) +
                    ",\"queue_us\":" + microseconds(e.started - e.ready) +
                    ",\"run_us\":" + microseconds(e.finished - e.started);
  if (e.kind == TraceEvent::Kind::micro_op) {
    out += ",\"hop\":" + std::to_string(e.hop) + ",\"peer\":" + std::to_string(e.peer);
    if (e.unheld == Unheld::aged) out += ",\"aged\":true";
    if (e.unheld == Unheld::wanted) out += ",\"wanted\":true";
  }
  if (e.failed) out += ",\"failed\":true";
  return out + "}";
}

// Lanes of a rank from top to bottom: what the driver does, what holds, then the classes of traffic.
constexpr std::array<std::string_view, 7> kLanes{"computing", "waiting",  "hold",   "blocking",
                                                 "prior",     "gradient", "delayed"};

std::size_t lane_of(const TraceEvent& e) {
  switch (e.kind) {
    case TraceEvent::Kind::computing:
      return 0;
    case TraceEvent::Kind::waiting:
      return 1;
    case TraceEvent::Kind::hold:
      return 2;
    case TraceEvent::Kind::operation:
    case TraceEvent::Kind::micro_op:
      break;
  }
  return 3 + static_cast<std::size_t>(e.traffic);
}

void append(std::string& out, const TraceEvent& e, int rank, Time epoch, std::uint64_t id) {
  const std::size_t lane = lane_of(e);
  const std::string common = "\"name\":\"" + escaped(e.name) + "\",\"cat\":\"" + std::string(kLanes[lane]) +
                             "\",\"pid\":" + std::to_string(rank) + ",\"tid\":" + std::to_string(lane);
  if (e.kind != TraceEvent::Kind::operation) {
    const std::string text =
        e.kind == TraceEvent::Kind::micro_op ? arguments(e) : "{\"step\":" + std::to_string(e.step) + "}";
    out += ",\n{\"ph\":\"X\"," + common + ",\"ts\":" + microseconds(e.started - epoch) +
           ",\"dur\":" + microseconds(e.finished - e.started) + ",\"args\":" + text + "}";
    return;
  }
  const std::string key = ",\"id\":\"" + std::to_string(rank) + "." + std::to_string(id) + "\"";
  out += ",\n{\"ph\":\"b\"," + common + key + ",\"ts\":" + microseconds(e.ready - epoch) +
         ",\"args\":" + arguments(e) + "}";
  out += ",\n{\"ph\":\"e\"," + common + key + ",\"ts\":" + microseconds(e.finished - epoch) + "}";
}

std::string metadata(std::string_view what, int rank, std::size_t lane, const std::string& argument) {
  return ",\n{\"ph\":\"M\",\"name\":\"" + std::string(what) + "\",\"pid\":" + std::to_string(rank) +
         ",\"tid\":" + std::to_string(lane) + ",\"args\":{" + argument + "}}";
}

// Names of the lanes that have something, and their order.
void append_lanes(std::string& out, const Trace& trace, int rank) {
  std::array<bool, kLanes.size()> used{};
  for (const TraceEvent& e : trace.events()) used[lane_of(e)] = true;
  for (std::size_t lane = 0; lane < kLanes.size(); ++lane) {
    if (!used[lane]) continue;
    out += metadata("thread_name", rank, lane, "\"name\":\"" + std::string(kLanes[lane]) + "\"");
    out += metadata("thread_sort_index", rank, lane, "\"sort_index\":" + std::to_string(lane));
  }
}

// Something for which others are held back.
struct Reason {
  Time from, to;
  const TraceEvent* event;
};

bool holds_others(const TraceEvent& e) {
  if (e.kind == TraceEvent::Kind::micro_op)
    return e.traffic == TrafficClass::blocking && e.hop != kAskingHop;  // as the scheduler has it
  return e.kind == TraceEvent::Kind::hold || (e.kind == TraceEvent::Kind::operation && e.holds);
}

std::string words_of(const TraceEvent& reason) {
  switch (reason.kind) {
    case TraceEvent::Kind::micro_op:
      return "a blocking micro-op of '" + reason.name + "' was not done";
    case TraceEvent::Kind::operation:
      return "'" + reason.name + "' was holding";
    default:
      return "blocking traffic was announced";
  }
}

bool is_scheduled(const TraceEvent& e) {
  return e.kind == TraceEvent::Kind::micro_op && e.traffic != TrafficClass::blocking;
}

std::string text_of(const TraceEvent& e) {
  return "micro-op of '" + e.name + "' (" + std::string(name_of(e.traffic)) + ", step " +
         std::to_string(e.step) + ", hop " + std::to_string(e.hop) + ")";
}

void check_holds(const Trace& trace, TraceReport& report) {
  // In order of their start; beside each the one among it and its predecessors that ends last: it answers "is
  // one open at t".
  std::vector<Reason> reasons;
  for (const TraceEvent& e : trace.events()) {
    if (holds_others(e)) reasons.push_back({e.ready, e.finished, &e});
  }
  std::sort(reasons.begin(), reasons.end(), [](const Reason& a, const Reason& b) { return a.from < b.from; });
  std::vector<const Reason*> ends_last(reasons.size());
  for (std::size_t i = 0; i < reasons.size(); ++i) {
    const bool later = i == 0 || reasons[i].to > ends_last[i - 1]->to;
    ends_last[i] = later ? &reasons[i] : ends_last[i - 1];
  }
  for (const TraceEvent& e : trace.events()) {
    if (!is_scheduled(e) || e.unheld != Unheld::no) continue;
    const auto after = std::lower_bound(reasons.begin(), reasons.end(), e.started,
                                        [](const Reason& r, Time t) { return r.from < t; });
    if (after == reasons.begin()) continue;
    const Reason& open = *ends_last[static_cast<std::size_t>(after - reasons.begin()) - 1];
    if (open.to <= e.started) continue;
    report.breaches.push_back(text_of(e) + " started while " + words_of(*open.event));
  }
}

// Who is queued at the start of each: came before it, and starts behind it.
void check_order(const Trace& trace, TraceReport& report) {
  std::vector<const TraceEvent*> by_ready, by_start;
  for (const TraceEvent& e : trace.events()) {
    if (is_scheduled(e)) by_ready.push_back(&e);
  }
  by_start = by_ready;
  const auto before = [](auto member) {  // events of one instant in the order in which they were written
    return [member](const TraceEvent* a, const TraceEvent* b) {
      return a->*member != b->*member ? a->*member < b->*member : a < b;
    };
  };
  std::sort(by_ready.begin(), by_ready.end(), before(&TraceEvent::ready));
  std::sort(by_start.begin(), by_start.end(), before(&TraceEvent::started));
  const auto rank = [](const TraceEvent* e) { return std::pair(e->traffic, e->priority); };
  const auto first = [&](const TraceEvent* a, const TraceEvent* b) {
    return rank(a) != rank(b) ? rank(a) < rank(b) : a < b;
  };
  std::set<const TraceEvent*, decltype(first)> queued(first);
  auto next = by_ready.begin();
  for (auto from = by_start.begin(); from != by_start.end();) {
    const Time now = (*from)->started;
    for (; next != by_ready.end() && (*next)->ready < now; ++next) {
      if ((*next)->started >= now) queued.insert(*next);  // else it was never queued at a start
    }
    const auto to =
        std::find_if(from, by_start.end(), [now](const TraceEvent* e) { return e->started != now; });
    std::for_each(from, to, [&](const TraceEvent* e) { queued.erase(e); });
    for (; from != to; ++from) {
      const TraceEvent& e = **from;
      if (e.unheld != Unheld::no || queued.empty() || rank(*queued.begin()) >= rank(&e)) continue;
      report.breaches.push_back(text_of(e) + " started before a " + text_of(**queued.begin()) +
                                ", which was queued and goes first");
    }
  }
}

void check_idle(const Trace& trace, Time idle, TraceReport& report) {
  std::vector<Reason> busy;
  for (const TraceEvent& e : trace.events()) {
    if (e.kind == TraceEvent::Kind::micro_op)
      busy.push_back({e.started, e.finished, &e});
    else if (holds_others(e))
      busy.push_back({e.ready, e.finished, &e});
  }
  std::sort(busy.begin(), busy.end(), [](const Reason& a, const Reason& b) { return a.from < b.from; });
  struct Gap {
    Time from, to;
  };
  std::vector<Gap> gaps;  // longer than `idle`
  Time until{};
  for (const Reason& span : busy) {
    if (span.from - until > idle) gaps.push_back({until, span.from});
    until = std::max(until, span.to);
  }
  for (const TraceEvent& e : trace.events()) {
    if (!is_scheduled(e)) continue;
    const auto waited = [&](const Gap& g) {
      return std::min(g.to, e.started) - std::max(g.from, e.ready) > idle;
    };
    const auto first =
        std::lower_bound(gaps.begin(), gaps.end(), e.ready, [](const Gap& g, Time t) { return g.to <= t; });
    const auto last =
        std::lower_bound(first, gaps.end(), e.started, [](const Gap& g, Time t) { return g.from < t; });
    if (std::any_of(first, last, waited))
      report.breaches.push_back(text_of(e) + " was queued while nothing was under way and nothing held");
  }
}

}  // namespace

std::string chrome_trace(std::span<const Trace* const> of_rank, int first) {
  Time epoch = kNever;
  std::uint64_t left_out = 0;
  for (const Trace* trace : of_rank) {
    left_out += trace->left_out();
    for (const TraceEvent& e : trace->events()) epoch = std::min(epoch, e.ready);
  }
  std::string out = "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"left_out\":" + std::to_string(left_out) +
                    "},\"traceEvents\":[\n{\"ph\":\"M\",\"name\":\"weft\",\"pid\":" + std::to_string(first) +
                    ",\"args\":{}}";
  std::uint64_t id = 0;
  for (std::size_t i = 0; i < of_rank.size(); ++i) {
    const int rank = first + static_cast<int>(i);
    out += ",\n{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":" + std::to_string(rank) +
           ",\"args\":{\"name\":\"rank " + std::to_string(rank) + "\"}}";
    append_lanes(out, *of_rank[i], rank);
    for (const TraceEvent& e : of_rank[i]->events()) append(out, e, rank, epoch, id++);
  }
  return out + "\n]}\n";
}

TraceReport verify_trace(const Trace& trace, Time idle) {
  TraceReport report;
  if (trace.left_out() > 0)
    report.breaches.push_back("the trace lacks " + std::to_string(trace.left_out()) +
                              " of the events: what they broke is not known");
  for (const TraceEvent& e : trace.events()) {
    if (is_scheduled(e) && e.unheld != Unheld::no) ++(e.unheld == Unheld::aged ? report.aged : report.wanted);
  }
  check_holds(trace, report);
  check_order(trace, report);
  if (idle != kNever) check_idle(trace, idle, report);
  return report;
}

}  // namespace weft
