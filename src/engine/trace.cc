#include "weft/trace.h"

#include <algorithm>
#include <cstdio>

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
    if (e.aged) out += ",\"aged\":true";
  }
  if (e.failed) out += ",\"failed\":true";
  return out + "}";
}

void append(std::string& out, const TraceEvent& e, int rank, Time epoch, std::uint64_t id) {
  const std::string common = "\"name\":\"" + escaped(e.name) + "\",\"cat\":\"" +
                             std::string(name_of(e.traffic)) + "\",\"pid\":" + std::to_string(rank) +
                             ",\"tid\":" + std::to_string(static_cast<int>(e.traffic));
  if (e.kind == TraceEvent::Kind::micro_op) {
    out += ",\n{\"ph\":\"X\"," + common + ",\"ts\":" + microseconds(e.started - epoch) +
           ",\"dur\":" + microseconds(e.finished - e.started) + ",\"args\":" + arguments(e) + "}";
    return;
  }
  const std::string key = ",\"id\":\"" + std::to_string(rank) + "." + std::to_string(id) + "\"";
  out += ",\n{\"ph\":\"b\"," + common + key + ",\"ts\":" + microseconds(e.ready - epoch) +
         ",\"args\":" + arguments(e) + "}";
  out += ",\n{\"ph\":\"e\"," + common + key + ",\"ts\":" + microseconds(e.finished - epoch) + "}";
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
    for (const TraceEvent& e : of_rank[i]->events()) append(out, e, rank, epoch, id++);
  }
  return out + "\n]}\n";
}

std::vector<std::string> breaches(const Trace& trace) {
  // Blocking operations as intervals in order of their start; a running maximum of their ends answers "is one
  // open at t".
  std::vector<std::pair<Time, Time>> blocking;
  for (const TraceEvent& e : trace.events()) {
    if (e.kind == TraceEvent::Kind::operation && e.traffic == TrafficClass::blocking)
      blocking.emplace_back(e.ready, e.finished);
  }
  std::sort(blocking.begin(), blocking.end());
  std::vector<Time> latest_end(blocking.size());
  for (std::size_t i = 0; i < blocking.size(); ++i) {
    latest_end[i] = i == 0 ? blocking[i].second : std::max(latest_end[i - 1], blocking[i].second);
  }
  std::vector<std::string> found;
  for (const TraceEvent& e : trace.events()) {
    if (e.kind != TraceEvent::Kind::micro_op || e.traffic == TrafficClass::blocking || e.aged) continue;
    const auto after =
        std::lower_bound(blocking.begin(), blocking.end(), std::make_pair(e.started, Time::min()));
    const std::size_t before = static_cast<std::size_t>(after - blocking.begin());
    if (before == 0 || latest_end[before - 1] <= e.started) continue;
    found.push_back("micro-op of '" + e.name + "' (" + std::string(name_of(e.traffic)) + ", hop " +
                    std::to_string(e.hop) + ") started while blocking traffic was ready");
  }
  return found;
}

}  // namespace weft
