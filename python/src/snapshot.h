// The state of a rank (state/rows.h) as plain Python values and back:
//
//   {"rank", "size", "rows": [{"owner", "kind", "name", "dtype", "rule", "peer", "peers",
//                              "divisor" (of sums), "shape", "first", "extent", "values"}, ...]}
//
// values are bytes, empty for zeros. No kind of row is known here.
#pragma once

#include <pybind11/pybind11.h>

#include "state/rows.h"

namespace weft::python {

pybind11::dict to_python(const StateSnapshot& snapshot);
// Throws UsageError for what has another form. Values are checked where the snapshot is loaded.
StateSnapshot snapshot_of(const pybind11::dict& values);

}  // namespace weft::python
