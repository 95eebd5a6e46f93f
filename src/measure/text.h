// Numbers as people read them. JSON has plain seconds and bytes instead.
#pragma once

#include <cstdint>
#include <string>

namespace weft {

std::string seconds_text(double seconds);                 // "12.3 us", "4.56 ms"
std::string size_text(double bytes);                      // "64 B", "1.5 KiB", "16 MiB"
std::string rate_text(double bytes_per_second);           // "0.93 GB/s"
std::string link_text(double bytes_per_second);           // "1 Gbit/s"
std::string flops_text(double flops_per_second);          // "50 GFLOP/s"
std::string number_text(const char* form, double value);  // as printf has it, up to 31 characters
std::string padded(const std::string& text,
                   int width);  // to the right of a column; a negative width: to its left

// One line on a terminal (stderr) that the next one replaces; nothing where stderr is none.
class Progress {
 public:
  explicit Progress(bool wanted);
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void show(const std::string& line);
  void clear();

 private:
  bool terminal_;
  bool shown_ = false;
};

}  // namespace weft
