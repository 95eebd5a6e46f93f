#include "measure/page.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <string>

#include "measure/chart.h"
#include "measure/files.h"
#include "measure/table.h"
#include "measure/text.h"
#include "transports/link_spec.h"

namespace weft {

namespace {

constexpr const char* kHead =
    "<!DOCTYPE html>\n<html xmlns=\"http://www.w3.org/1999/xhtml\" lang=\"en\"><head><meta "
    "charset=\"utf-8\"/>"
    "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>"
    "<title>weft compare</title><style>"
    ":root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;"
    "padding:0 1em;color:#222;background:#fff}h2{font-size:1.1em;margin-top:2em}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:13px}"
    ".wide{overflow-x:auto}th,td{padding:4px 10px;text-align:right;border-bottom:1px solid #ddd;"
    "white-space:nowrap}th:first-child,td:first-child{text-align:left}svg{max-width:100%;height:auto;margin:"
    "1em 0}"
    "pre{white-space:pre-wrap;font-size:12px}.mark{font-style:italic}"
    "@media(prefers-color-scheme:dark){body{color:#ddd;background:#1b1b1b}th,td{border-color:#444}}"
    "</style></head><body>\n";

std::string html_table(const Cells& cells) {
  std::string out = "<div class=\"wide\"><table>";
  for (std::size_t r = 0; r < cells.size(); ++r) {
    out += "<tr>";
    const std::string tag = r == 0 ? "th" : "td";
    for (const std::string& cell : cells[r])
      out.append("<").append(tag).append(">").append(escaped(cell)).append("</").append(tag).append(">");
    out += "</tr>\n";
  }
  return out + "</table></div>\n";
}

std::string link_name(const std::string& link) { return link == kNoLink ? "no slow link" : link; }

std::string marked_kind(const Point& point) {
  return kind_of(point) + (point.oversubscribed ? ", oversubscribed" : "");
}

// Names for charts: "+"-separated words that all variants have are said once instead.
class ShortNames {
 public:
  explicit ShortNames(const std::vector<Row>& rows) {
    for (const Row& row : rows) {
      const std::vector<std::string> words = words_of(row.point->variant);
      if (&row == &rows.front()) shared_ = words;
      std::erase_if(shared_, [&](const std::string& word) { return std::ranges::count(words, word) == 0; });
    }
    if (rows.size() < 2) shared_.clear();
  }

  std::string of(const std::string& variant) const {
    std::vector<std::string> own = words_of(variant);
    std::erase_if(own, [&](const std::string& word) { return std::ranges::count(shared_, word) > 0; });
    return own.empty() ? words_of(variant).front() : joined(own);
  }
  // Behind an axis.
  std::string note() const { return shared_.empty() ? "" : "; all: " + joined(shared_); }

 private:
  static std::vector<std::string> words_of(const std::string& variant) {
    std::vector<std::string> out{""};
    for (const char c : variant) {
      if (c == '+')
        out.emplace_back();
      else
        out.back() += c;
    }
    return out;
  }
  static std::string joined(const std::vector<std::string>& words) {
    std::string out = words.front();
    for (std::size_t w = 1; w < words.size(); ++w) out.append("+").append(words[w]);
    return out;
  }

  std::vector<std::string> shared_;
};

BarChart step_times(const std::vector<Row>& rows) {
  const ShortNames names(rows);
  const Point& first = *rows.front().point;
  BarChart chart;
  chart.title = "Step time at " + link_name(first.link) + " (" + marked_kind(first) + ")";
  chart.axis = "seconds a step (median)" + names.note();
  chart.parts = {"computing", "waiting for communication"};
  for (const Row& row : rows) {
    const double waited = std::min(row.waited, row.seconds.value);
    Bar bar{.name = names.of(row.point->variant), .parts = {row.seconds.value - waited, waited}};
    bar.note = seconds_text(row.seconds.value);
    if (row.speedup && !row.is_baseline()) {
      std::array<char, 32> text{};
      std::snprintf(text.data(), text.size(), ", %.2fx", row.speedup->value);
      bar.note += text.data();
    }
    if (first.link != kNoLink && row.unshaped_seconds) {
      bar.mark = *row.unshaped_seconds;
      chart.mark = "the same without a slow link";
    }
    chart.bars.push_back(std::move(bar));
  }
  return chart;
}

LineChart losses(const std::vector<Row>& rows, bool by_time) {
  LineChart chart;
  const ShortNames names(rows);
  const Point& first = *rows.front().point;
  chart.title =
      by_time ? "Loss against training time at " + link_name(first.link) + " (" + marked_kind(first) + ")"
              : "Loss against step";
  chart.x_axis = (by_time ? "seconds of training" : "steps") + names.note();
  chart.y_axis = "loss";
  chart.x_from_zero = by_time;
  int colour = 0;
  for (const Row& row : rows) {
    Series series{.name = names.of(row.point->variant), .colour = colour++};
    series.y = row.point->losses;
    for (std::size_t i = 0; i < series.y.size(); ++i)
      series.x.push_back(by_time ? row.point->wall_seconds[i] : static_cast<double>(i + 1));
    chart.series.push_back(std::move(series));
  }
  return chart;
}

double rate_of(const std::vector<Row>& link) { return parse_link(link.front().point->link).bytes_per_second; }

// `links`: in the order in which they were measured.
LineChart speedups(std::vector<std::vector<Row>> links) {
  std::ranges::sort(links, {}, rate_of);
  LineChart chart;
  const Row& first = links.front().front();
  const ShortNames names(links.front());
  const std::string baseline = names.of(first.baseline);
  chart.title = "Speed-up over " + baseline + " against the link's rate (" + marked_kind(*first.point) + ")";
  chart.x_axis = "rate of a rank's port" + names.note();
  chart.y_axis = "times as fast as " + baseline + ", with 95 % intervals";
  chart.log_x = chart.from_zero = chart.markers = true;
  for (std::size_t s = 0; s < links.front().size(); ++s) {
    const std::string& variant = links.front()[s].point->variant;
    Series series{.name = names.of(variant), .colour = static_cast<int>(s)};
    for (const std::vector<Row>& rows : links) {
      const auto row =
          std::find_if(rows.begin(), rows.end(), [&](const Row& r) { return r.point->variant == variant; });
      if (row == rows.end() || !row->speedup) continue;
      series.x.push_back(rate_of(rows));
      series.y.push_back(row->speedup->value);
      series.low.push_back(row->speedup->low);
      series.high.push_back(row->speedup->high);
    }
    chart.series.push_back(std::move(series));
  }
  for (const double rate : chart.series.front().x) chart.x_names.push_back(link_text(rate));
  return chart;
}

// Of an earlier page with other links.
void remove_charts(const std::filesystem::path& folder) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    const bool ours = name.starts_with("step_time") || name.starts_with("loss_by_") || name == "speedup.svg";
    if (ours && name.ends_with(".svg")) std::filesystem::remove(entry.path(), error);
  }
}

}  // namespace

std::filesystem::path write_page(const PageOptions& options, const std::vector<Row>& rows) {
  const std::vector<std::vector<Row>> links = by_link(rows);
  remove_charts(options.folder);
  std::string page = kHead + ("<h1>weft compare: " + escaped(options.model) + "</h1>\n");
  const auto draw = [&](const std::string& name, const std::string& drawing) {
    write_file(options.folder / (name + ".svg"), drawing);
    page += drawing;
  };
  for (const std::vector<Row>& link : links) page += "<p>" + escaped(sentence_on(link)) + "</p>\n";
  if (links.size() > 1) draw("speedup", svg(speedups(links)));
  const bool trained = !rows.front().point->losses.empty();
  for (const std::vector<Row>& link : links) {
    std::string suffix = links.size() > 1 ? "-" + link.front().point->link : "";
    std::replace(suffix.begin(), suffix.end(), ',', '-');
    page += "<h2>" + escaped(headline(options.model, *link.front().point)) + "</h2>\n" +
            html_table(cells_of(link));
    draw("step_time" + suffix, svg(step_times(link)));
    if (trained) draw("loss_by_time" + suffix, svg(losses(link, true)));
  }
  if (trained) draw("loss_by_step", svg(losses(links.front(), false)));
  for (const std::string& note : notes_on(rows)) page += "<p class=\"mark\">" + escaped(note) + ".</p>\n";
  page += "<h2>Settings</h2>\n<pre>" + escaped(options.settings) + "</pre>\n</body></html>\n";
  const std::filesystem::path file = options.folder / "compare.html";
  write_file(file, page);
  return file;
}

}  // namespace weft
