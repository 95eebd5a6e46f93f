#include "measure/table.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "measure/emulated.h"
#include "measure/text.h"

namespace weft {

namespace {

template <class... T>
std::string form(const char* format, T... values) {
  std::array<char, 512> text{};
  std::snprintf(text.data(), text.size(), format, values...);
  return text.data();
}

std::string text_of(const char* format, const std::optional<double>& value) {
  return value && std::isfinite(*value) ? form(format, *value) : "-";
}

std::string count_text(double count) {
  if (count >= 1e6) return form("%.1f M", count / 1e6);
  if (count >= 1e4) return form("%.1f k", count / 1e3);
  return form("%.0f", count);
}

// Formulas of all but the lossless scheme are bounds (docs/measuring.md).
std::string formula_text(const Point& point) {
  return (std::abs(point.payload_bytes - point.formula_bytes) < 0.5 ? "= " : "<= ") +
         size_text(point.formula_bytes);
}

std::string limits_text(const Row& row) {
  if (row.is_baseline()) return "-";
  return text_of("%.2fx", row.speedup_limit) + " / " + text_of("%.1fx", row.bytes_ratio);
}

std::string speedup_text(const Row& row) {
  if (!row.speedup) return "-";
  if (row.is_baseline()) return "1.00x";
  return form("%.2fx (%.2f..%.2f)", row.speedup->value, row.speedup->low, row.speedup->high);
}

// Where a run was after so many seconds, if it was anywhere.
std::string reached_by_then(const Point& point, double seconds) {
  std::size_t done = 0;
  while (done < point.losses.size() && point.wall_seconds[done] <= seconds) ++done;
  if (done == 0) {
    return form(", in %s, before %s had done one step", seconds_text(seconds).c_str(), point.variant.c_str());
  }
  return form(", and in its %s %s had done %zu steps and come to %.4f", seconds_text(seconds).c_str(),
              point.variant.c_str(), done, point.losses[done - 1]);
}

}  // namespace

Cells cells_of(const std::vector<Row>& rows) {
  const std::string to_baseline = "to " + rows.front().baseline;
  Cells cells{{"variant", "step", "95 %", "speed-up", "limits: time / bytes", "tokens/s", "bytes/step",
               "formula", "exposed", "hidden", "for rows", "backward", "packing", "loss", to_baseline}};
  for (const Row& row : rows) {
    const Point& p = *row.point;
    const bool exceeds = p.payload_bytes > p.formula_bytes + 0.5;
    cells.push_back(
        {p.bucket_mib ? with_buckets(p.variant, *p.bucket_mib) : p.variant, seconds_text(row.seconds.value),
         seconds_text(row.seconds.low) + " .. " + seconds_text(row.seconds.high), speedup_text(row),
         limits_text(row), count_text(row.tokens_per_second), size_text(p.payload_bytes),
         exceeds ? "exceeds " + size_text(p.formula_bytes) : formula_text(p),
         row.exposed_share ? form("%.0f %%", 100 * *row.exposed_share) : "-",
         row.hidden_share ? form("%.0f %%", 100 * *row.hidden_share) : "-",
         row.rows_share ? form("%.0f %%", 100 * *row.rows_share) : "-",
         p.rows_backward_seconds ? seconds_text(*p.rows_backward_seconds) : "-",
         p.packing > 1 ? std::to_string(p.packing) : "-", text_of("%.4f", row.final_loss),
         text_of("%+.4f", row.loss_gap)});
  }
  // What no row has is no column.
  for (std::size_t c = cells.front().size(); c-- > 0;) {
    const bool empty = std::all_of(cells.begin() + 1, cells.end(),
                                   [&](const std::vector<std::string>& line) { return line[c] == "-"; });
    if (!empty) continue;
    for (std::vector<std::string>& line : cells) line.erase(line.begin() + static_cast<std::ptrdiff_t>(c));
  }
  return cells;
}

std::string table_text(const Cells& cells) {
  std::vector<int> widths(cells.front().size());
  for (const std::vector<std::string>& line : cells) {
    for (std::size_t c = 0; c < line.size(); ++c)
      widths[c] = std::max(widths[c], static_cast<int>(line[c].size()));
  }
  std::string text;
  for (const std::vector<std::string>& line : cells) {
    for (std::size_t c = 0; c < line.size(); ++c)
      text += (c == 0 ? "" : "  ") + padded(line[c], c == 0 ? -widths[c] : widths[c]);
    text += "\n";
  }
  return text;
}

std::string kind_of(const Point& p) {
  if (p.transport == "sim") return "simulated time";
  if (p.compute != "emulated") return "real computation";
  return p.occupies_cores ? "emulated computation that occupies its cores" : "emulated computation";
}

std::string headline(const std::string& model, const Point& p) {
  const std::string link = p.link == kNoLink ? "no slow link" : p.link;
  return link + ": " + model + ", " + count_text(static_cast<double>(p.parameters)) + " parameters, " +
         std::to_string(p.ranks) + (p.ranks == 1 ? " rank" : " ranks") + " over " + p.transport + ", " +
         kind_of(p) + (p.oversubscribed ? " (oversubscribed: more ranks than cores)" : "") + ", " +
         std::to_string(p.step_seconds.size()) + " measured steps of " + std::to_string(p.steps);
}

std::vector<std::string> notes_on(const std::vector<Row>& rows) {
  std::vector<std::string> notes;
  const auto add = [&](const std::string& note) {
    if (std::find(notes.begin(), notes.end(), note) == notes.end()) notes.push_back(note);
  };
  for (const Row& row : rows) {
    const Point& p = *row.point;
    if (row.speedup_at_equal_compute) {
      add(p.variant + " takes " + seconds_text(*row.unshaped_seconds) +
          " a step without a slow link, over 10 % " + "off " + row.baseline +
          ": selection and coding, or other load on the machine, make the difference; without it its "
          "speed-up "
          "at " +
          p.link + " would be " + form("%.2fx", *row.speedup_at_equal_compute));
    }
    if (!p.tables_why.empty()) add(p.variant + " at " + p.link + ": " + p.tables + ": " + p.tables_why);
    if (!p.stages_why.empty()) add(p.variant + " at " + p.link + ": " + p.stages_why);
    if (!p.side_by_side) {
      add("at " + p.link + " variants were measured one after another: side by side they need more memory " +
          "than is free, and what changes on the machine meanwhile does not change for all of them");
    } else if (!row.took_turns) {
      add(p.variant + " at " + p.link + " was measured in another session than " + row.baseline +
          ": they took no turns");
    }
    if (p.oversubscribed) {
      add("oversubscribed: ranks compute on fewer cores than they are, so that times with real computation "
          "say "
          "little about a machine with a core for each; --compute emulated has timers instead");
    }
    if (p.transport == "sim" && p.ranks > kMostOnOneMachine)
      add("simulated with a machine for each rank: selection and coding have cores of their own, which up "
          "to " +
          std::to_string(kMostOnOneMachine) + " ranks share those of this machine");
    if (p.variant.find("backward-bits=") != std::string::npos ||
        p.variant.find("backward-rank=") != std::string::npos)
      add("bytes are those of the rank that sends most: where it is one of the first stage, which sends no "
          "gradients back, what is saved between stages is not among them");
    if (p.step_seconds.size() < 6)
      add("fewer than 6 measured steps have no 95 % interval: least and largest are shown");
  }
  return notes;
}

std::string sentence_on(const std::vector<Row>& rows) {
  const Row* base = nullptr;
  const Row* best = nullptr;
  for (const Row& row : rows) {
    if (row.is_baseline()) {
      base = &row;
    } else if (row.speedup && (best == nullptr || row.speedup->value > best->speedup->value)) {
      best = &row;
    }
  }
  if (base == nullptr || best == nullptr) return "";
  const Point& p = *best->point;
  const std::string baseline = base->point->variant;
  std::string text = "At " + std::string(p.link == kNoLink ? "full speed" : p.link) + " (" + kind_of(p) +
                     (p.oversubscribed ? ", oversubscribed" : "") + ") " + baseline + " takes " +
                     seconds_text(base->seconds.value) + " a step";
  if (base->exposed_share)
    text += form(", %.0f %% of it exposed communication", 100 * std::max(0.0, *base->exposed_share));
  text += "; " + p.variant;
  if (p.density) text += form(" at density %g", *p.density);
  text += " takes " + seconds_text(best->seconds.value) + form(", %.2f times as fast", best->speedup->value);
  text += ", and sends " + size_text(p.payload_bytes) + " a step (formula: " + size_text(p.formula_bytes) +
          ") instead of " + size_text(base->point->payload_bytes) +
          " (formula: " + size_text(base->point->formula_bytes) + ")";
  if (best->loss_gap) {
    text += form("; after %lld equal steps its loss is %.4f, %.4f %s %s's", static_cast<long long>(p.steps),
                 *best->final_loss, std::abs(*best->loss_gap), *best->loss_gap < 0 ? "below" : "above",
                 baseline.c_str());
    text += reached_by_then(*base->point, p.wall_seconds.back());
  }
  return text + ".";
}

std::vector<std::vector<Row>> by_link(const std::vector<Row>& rows) {
  std::vector<std::vector<Row>> links;
  for (const Row& row : rows) {
    if (links.empty() || links.back().front().point->link != row.point->link) links.emplace_back();
    links.back().push_back(row);
  }
  return links;
}

}  // namespace weft
