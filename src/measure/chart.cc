#include "measure/chart.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

namespace weft {

namespace {

// In pixels of the drawing.
constexpr double kWidth = 760, kPlotLeft = 70, kCharacter = 6.7;
constexpr double kWidest = 250;  // of a name that stands beside its curve
constexpr double kNameRow = 18;
constexpr int kColours = 8;

template <class... T>
std::string form(const char* format, T... values) {
  std::array<char, 256> text{};
  std::snprintf(text.data(), text.size(), format, values...);
  return text.data();
}

// Colours of middle lightness, which stand off from white and from near-black alike.
std::string opening(double height, const std::string& title) {
  return form(
             "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" "
             "height=\"%.0f\" "
             "role=\"img\">",
             kWidth, height, kWidth, height) +
         "<title>" + escaped(title) + "</title><style>" +
         "text{font:12px system-ui,sans-serif;fill:#333}.head{font-size:14px;font-weight:600}.soft{fill:#666}"
         ".grid{stroke:#ddd;stroke-width:1}.lead{stroke:#999;stroke-width:1;stroke-dasharray:1 "
         "4}.paper{fill:#fff}.mark{stroke:#111;stroke-width:2}"
         ".p0{fill:#3b82b8}.p1{fill:#e08a2e}.p2{fill:#8a8a8a}.p3{fill:#5aa469}"
         ".c0{stroke:#7d7d7d}.c1{stroke:#b07d2b}.c2{stroke:#c2588f}.c3{stroke:#4a8fd0}.c4{stroke:#7a6fd0}"
         ".c5{stroke:#1f9e77}.c6{stroke:#d1495b}.c7{stroke:#8f9a2f}"
         ".d0{fill:#7d7d7d}.d1{fill:#b07d2b}.d2{fill:#c2588f}.d3{fill:#4a8fd0}.d4{fill:#7a6fd0}"
         ".d5{fill:#1f9e77}.d6{fill:#d1495b}.d7{fill:#8f9a2f}"
         ".line{fill:none;stroke-width:2}.band{stroke-width:1.5}"
         "@media(prefers-color-scheme:dark){text{fill:#ddd}.soft{fill:#aaa}.grid{stroke:#444}.paper{fill:#"
         "1b1b1b}"
         ".mark{stroke:#fff}}" +
         "</style>" + form("<rect class=\"paper\" width=\"%.0f\" height=\"%.0f\"/>", kWidth, height);
}

std::string text_at(double x, double y, const std::string& text, const char* anchor, const char* kind) {
  return form("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\" class=\"%s\">", x, y, anchor, kind) +
         escaped(text) + "</text>";
}

std::string line_at(double x1, double y1, double x2, double y2, const char* kind) {
  return form("<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" class=\"%s\"/>", x1, y1, x2, y2, kind);
}

// 1, 2 or 5 times a power of ten: about `wanted` of them in `range`.
double round_step(double range, int wanted) {
  const double rough = std::max(range, 1e-30) / wanted;
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  for (const double times : {1.0, 2.0, 5.0}) {
    if (times * power >= rough) return times * power;
  }
  return 10 * power;
}

std::string tick_text(double value, double step) {
  const int places = std::max(0, static_cast<int>(-std::floor(std::log10(step) + 1e-9)));
  return form("%.*f", std::min(places, 9), value);
}

double text_width(const std::string& text) { return kCharacter * static_cast<double>(text.size()); }

}  // namespace

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '"')
      out += "&quot;";
    else
      out += c;
  }
  return out;
}

std::string svg(const BarChart& chart) {
  constexpr double kTop = 66, kRow = 30, kThick = 18;
  double left = kPlotLeft, right = kWidth - 20, longest = 0;
  for (const Bar& bar : chart.bars) {
    double sum = 0;
    for (const double part : bar.parts) sum += part;
    longest = std::max({longest, sum, bar.mark});
    left = std::max(left, 26 + text_width(bar.name));
    right = std::min(right, kWidth - 26 - text_width(bar.note));
  }
  longest = std::max(longest, 1e-12);
  const double bottom = kTop + kRow * static_cast<double>(chart.bars.size());
  const auto x_of = [&](double value) { return left + (right - left) * value / longest; };
  std::string out = opening(bottom + 48, chart.title) + text_at(16, 24, chart.title, "start", "head");
  double at = 16;
  for (std::size_t p = 0; p < chart.parts.size(); ++p) {
    out += form("<rect x=\"%.1f\" y=\"38\" width=\"12\" height=\"12\" class=\"p%zu\"/>", at, p);
    out += text_at(at + 18, 48, chart.parts[p], "start", "soft");
    at += 40 + text_width(chart.parts[p]);
  }
  if (!chart.mark.empty()) {
    out += line_at(at + 4, 37, at + 4, 51, "mark") + text_at(at + 14, 48, chart.mark, "start", "soft");
  }
  const double step = round_step(longest, 6);
  for (double value = 0; value <= longest * 1.0001; value += step) {
    out += line_at(x_of(value), kTop, x_of(value), bottom, "grid");
    out += text_at(x_of(value), bottom + 16, tick_text(value, step), "middle", "soft");
  }
  out += text_at((left + right) / 2, bottom + 36, chart.axis, "middle", "soft");
  for (std::size_t b = 0; b < chart.bars.size(); ++b) {
    const Bar& bar = chart.bars[b];
    const double y = kTop + kRow * static_cast<double>(b) + (kRow - kThick) / 2;
    out += text_at(left - 8, y + 13, bar.name, "end", "name");
    double sum = 0;
    for (std::size_t p = 0; p < bar.parts.size(); ++p) {
      out += form("<rect x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%.0f\" class=\"p%zu\"/>", x_of(sum), y,
                  x_of(sum + bar.parts[p]) - x_of(sum), kThick, p);
      sum += bar.parts[p];
    }
    if (bar.mark > 0) out += line_at(x_of(bar.mark), y - 3, x_of(bar.mark), y + kThick + 3, "mark");
    out += text_at(x_of(std::max(sum, bar.mark)) + 8, y + 13, bar.note, "start", "name");
  }
  return out + "</svg>\n";
}

namespace {

// Where values of a chart lie on the drawing.
struct Frame {
  double left = kPlotLeft, right = 0, top = 58, bottom = 344;
  double x_low = 0, x_high = 1, y_low = 0, y_high = 1;
  bool log_x = false;
  bool names_below = false;

  double x(double value) const {
    const auto scale = [&](double v) { return log_x ? std::log(v) : v; };
    return left + (right - left) * (scale(value) - scale(x_low)) / (scale(x_high) - scale(x_low));
  }
  double y(double value) const { return bottom - (bottom - top) * (value - y_low) / (y_high - y_low); }
};

Frame frame_of(const LineChart& chart) {
  Frame frame;
  frame.log_x = chart.log_x;
  double widest = 0;
  bool first = true;
  for (const Series& series : chart.series) {
    widest = std::max(widest, text_width(series.name));
    for (std::size_t i = 0; i < series.x.size(); ++i) {
      const double low = series.low.empty() ? series.y[i] : series.low[i];
      const double high = series.high.empty() ? series.y[i] : series.high[i];
      if (first) {
        frame.x_low = frame.x_high = series.x[i];
        frame.y_low = low;
        frame.y_high = high;
        first = false;
      }
      frame.x_low = std::min(frame.x_low, series.x[i]);
      frame.x_high = std::max(frame.x_high, series.x[i]);
      frame.y_low = std::min(frame.y_low, low);
      frame.y_high = std::max(frame.y_high, high);
    }
  }
  frame.names_below = widest > kWidest;
  frame.right = kWidth - (frame.names_below ? kPlotLeft : 48 + widest);
  if (chart.x_from_zero) frame.x_low = std::min(0.0, frame.x_low);
  if (chart.from_zero) frame.y_low = std::min(0.0, frame.y_low);
  const double room = 0.04 * std::max(frame.y_high - frame.y_low, 1e-9 + 1e-6 * std::abs(frame.y_high));
  frame.y_high += room;
  if (!chart.from_zero) frame.y_low -= room;
  if (!(frame.x_high > frame.x_low)) {
    frame.x_high = chart.log_x ? frame.x_low * 2 : frame.x_low + 1;
  }
  return frame;
}

std::string axes(const LineChart& chart, const Frame& f) {
  std::string out;
  const double y_step = round_step(f.y_high - f.y_low, 6);
  for (double value = std::ceil(f.y_low / y_step) * y_step; value <= f.y_high; value += y_step) {
    out += line_at(f.left, f.y(value), f.right, f.y(value), "grid");
    out += text_at(f.left - 8, f.y(value) + 4, tick_text(value, y_step), "end", "soft");
  }
  if (chart.log_x) {
    const Series& series = chart.series.front();
    for (std::size_t i = 0; i < series.x.size() && i < chart.x_names.size(); ++i) {
      out += line_at(f.x(series.x[i]), f.top, f.x(series.x[i]), f.bottom, "grid");
      out += text_at(f.x(series.x[i]), f.bottom + 17, chart.x_names[i], "middle", "soft");
    }
  } else {
    const double x_step = round_step(f.x_high - f.x_low, 8);
    for (double value = std::ceil(f.x_low / x_step) * x_step; value <= f.x_high * 1.0001; value += x_step) {
      out += line_at(f.x(value), f.top, f.x(value), f.bottom, "grid");
      out += text_at(f.x(value), f.bottom + 17, tick_text(value, x_step), "middle", "soft");
    }
  }
  out += text_at((f.left + f.right) / 2, f.bottom + 38, chart.x_axis, "middle", "soft");
  return out + text_at(f.left, f.top - 8, chart.y_axis, "start", "soft");
}

const char* dash_of(const Series& series) {
  static constexpr std::array<const char*, 4> kDashes{"none", "7 3", "2 3", "9 3 2 3"};
  return kDashes[static_cast<std::size_t>(series.colour) % kDashes.size()];
}

std::string curve(const LineChart& chart, const Frame& f, const Series& series) {
  const int colour = series.colour % kColours;
  std::string path;
  for (std::size_t i = 0; i < series.x.size(); ++i)
    path += form("%s%.1f %.1f", i == 0 ? "M" : "L", f.x(series.x[i]), f.y(series.y[i]));
  std::string out =
      form("<path class=\"line c%d\" stroke-dasharray=\"%s\" d=\"", colour, dash_of(series)) + path + "\"/>";
  for (std::size_t i = 0; i < series.low.size() && i < series.high.size(); ++i) {
    const double x = f.x(series.x[i]) + 2.0 * (series.colour % kColours);  // beside each other
    out += line_at(x, f.y(series.low[i]), x, f.y(series.high[i]), form("band c%d", colour).c_str());
  }
  if (!chart.markers) return out;
  for (std::size_t i = 0; i < series.x.size(); ++i) {
    out += form("<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3.5\" class=\"d%d\"/>", f.x(series.x[i]),
                f.y(series.y[i]), colour);
  }
  return out;
}

std::string name_at(const Series& series, double x, double y) {
  return form("<path class=\"line c%d\" stroke-dasharray=\"%s\" d=\"M%.1f %.1fh22\"/>",
              series.colour % kColours, dash_of(series), x, y - 4) +
         text_at(x + 26, y, series.name, "start", "name");
}

std::string names_below(const LineChart& chart, const Frame& f) {
  std::string out;
  double y = f.bottom + 62;
  for (const Series& series : chart.series) {
    out += name_at(series, f.left, y);
    y += kNameRow;
  }
  return out;
}

// Names at the ends of their curves, pushed apart where they would cover each other.
std::string names_beside(const LineChart& chart, const Frame& f) {
  constexpr double kApart = 15;
  struct Name {
    const Series* series;
    double y, wanted;
  };
  std::vector<Name> all;
  for (const Series& series : chart.series) {
    if (series.x.empty()) continue;
    const auto last = std::max_element(series.x.begin(), series.x.end()) - series.x.begin();
    const double y = f.y(series.y[static_cast<std::size_t>(last)]) + 4;
    all.push_back({&series, y, y});
  }
  std::sort(all.begin(), all.end(), [](const Name& a, const Name& b) { return a.y < b.y; });
  for (std::size_t i = 1; i < all.size(); ++i) all[i].y = std::max(all[i].y, all[i - 1].y + kApart);
  const double over = all.empty() ? 0 : std::max(0.0, all.back().y - (f.bottom + 4));
  for (std::size_t i = all.size(); over > 0 && i-- > 0;) {
    const double limit = i + 1 == all.size() ? f.bottom + 4 : all[i + 1].y - kApart;
    all[i].y = std::min(all[i].y, limit);
  }
  std::string out;
  for (const Name& name : all) {
    const double x = f.x(*std::max_element(name.series->x.begin(), name.series->x.end()));
    out += line_at(x + 3, name.wanted - 4, f.right + 8, name.y - 4, "lead");
    out += name_at(*name.series, f.right + 8, name.y);
  }
  return out;
}

}  // namespace

std::string svg(const LineChart& chart) {
  const Frame frame = frame_of(chart);
  const double below = frame.names_below ? kNameRow * static_cast<double>(chart.series.size()) : 0;
  std::string out =
      opening(frame.bottom + 54 + below, chart.title) + text_at(16, 22, chart.title, "start", "head");
  out += axes(chart, frame);
  for (const Series& series : chart.series) out += curve(chart, frame, series);
  return out + (frame.names_below ? names_below(chart, frame) : names_beside(chart, frame)) + "</svg>\n";
}

}  // namespace weft
