// A comparison as people read it: the table, what must be said beside it, and one sentence.
#pragma once

#include <string>
#include <vector>

#include "measure/point.h"

namespace weft {

// Columns of one link, as text; the first row has their names.
using Cells = std::vector<std::vector<std::string>>;
Cells cells_of(const std::vector<Row>& rows);
// Aligned, one line a row.
std::string table_text(const Cells& cells);

// Of the five kinds of numbers (docs/measuring.md), which a point's seconds are.
std::string kind_of(const Point& point);
// Of one link: "100mbit,50us: gpt, 20.0 M parameters, 4 ranks over threads, real computation
// (oversubscribed)"
std::string headline(const std::string& model, const Point& point);
// What a reader must know to judge the numbers, one sentence each.
std::vector<std::string> notes_on(const std::vector<Row>& rows);
// What happened at a link, of the variant with the highest speed-up. REQUIRES: rows of one link.
std::string sentence_on(const std::vector<Row>& rows);

// Rows of each link, in their order.
std::vector<std::vector<Row>> by_link(const std::vector<Row>& rows);

}  // namespace weft
