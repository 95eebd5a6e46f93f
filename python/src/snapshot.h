// The compression state of a rank (data_parallel/state.h) as plain Python values and back:
//
//   {"step", "rank", "size",
//    "parameters":  [{"name", "count", "residual", "velocity", "scale", "factor", "factor_rank"}, ...],
//    "controllers": [{"parameters", "team_quota": [entries, step, inertia],
//                     "thresholds": [local, global, k, steps, regions]}, ...]}
//
// residual, velocity and factor are the bytes of float32 values, empty for none.
#pragma once

#include <pybind11/pybind11.h>

#include "data_parallel/state.h"

namespace weft::python {

pybind11::dict to_python(const StateSnapshot& snapshot);
// Throws UsageError for what has another form. Values are checked where the snapshot is loaded.
StateSnapshot snapshot_of(const pybind11::dict& values);

}  // namespace weft::python
