// The sentence with which a call is refused.
#pragma once

#include <functional>
#include <string>

#include "weft/error.h"

namespace weft::testing {

inline std::string message_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const UsageError& e) {
    return e.what();
  }
  return "(no UsageError)";
}

}  // namespace weft::testing
