// What is done with embedding tables: parameters whose rows are looked up and with which nothing else is done.
// Apart from the scheme of the gradients (scheme_options.h): any two go together. `weft info` lists the ways.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace weft {

struct TablesOptions {
  // affects results; equal on all ranks
  // One of table_way_names(); or by table, as in "embrace/output=dense": what is not named has the first.
  std::string way = "scheme";
  // affects speed only; equal on all ranks
  // off; horizontal, vertical, both (docs/algorithms.md); two-sided: both, and rows that this batch leaves
  // alone are looked up for the next one in advance. Empty: what the way has.
  std::string scheduling;
  double split_below = 0.8;  // share of prior rows above which they are not told apart any more
};

std::vector<std::string_view> table_way_names();
std::vector<std::string_view> table_scheduling_names();
// Throws UsageError of one sentence: an unknown name (with the nearest), a value that cannot be meant.
void check_tables(const TablesOptions& options);

}  // namespace weft
