// How gradients are summed, as Python says it: names of fields and of a scheme's knobs, with underscores.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "weft/train/scheme_options.h"

namespace weft::python {

struct ExchangeOptions {
  DataParallelOptions exchange;
  std::uint64_t compared = 0;  // of what Python decides
};

// Throws UsageError for a name that is none, or a value of another type.
ExchangeOptions exchange_options_of(const pybind11::dict& values);

}  // namespace weft::python
