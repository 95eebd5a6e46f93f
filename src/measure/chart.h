// Charts as SVG: drawn here, with nothing from elsewhere, readable on light and on dark paper. Every series
// has a colour and a dash of its own, and its name stands beside it, or below where names would leave no room.
#pragma once

#include <string>
#include <vector>

namespace weft {

struct Bar {
  std::string name;
  std::vector<double> parts;  // in the order of BarChart::parts, from the left
  double mark = 0;            // a tick on the bar; 0: none
  std::string note;           // behind the bar
};
struct BarChart {
  std::string title;
  std::string axis;
  std::vector<std::string> parts;  // their names, at most 4
  std::string mark;                // what ticks are; empty: there are none
  std::vector<Bar> bars;
};
std::string svg(const BarChart& chart);

struct Series {
  std::string name;
  int colour = 0;  // the same number is the same colour on every chart
  std::vector<double> x, y;
  std::vector<double> low, high;  // of y, or empty
};
struct LineChart {
  std::string title, x_axis, y_axis;
  bool log_x = false, x_from_zero = false;
  bool from_zero = false;            // the y axis
  bool markers = false;              // at every value
  std::vector<std::string> x_names;  // log_x: what stands under each value of the first series
  std::vector<Series> series;
};
std::string svg(const LineChart& chart);

std::string escaped(const std::string& text);  // for XML

}  // namespace weft
