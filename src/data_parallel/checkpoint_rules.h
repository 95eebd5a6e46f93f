// What a checkpoint may hold: the same rules before it is written and after it was read. They throw
// UsageErrors of one sentence that begins with `where`, the path.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "data_parallel/checkpoint.h"

namespace weft {

inline constexpr std::string_view kReservedKeys = "weft.";  // of metadata: what begins so is not the user's
// Of steps, elements and buckets: the sum or product of two with a small number does not overflow.
inline constexpr std::int64_t kMostCounted = std::int64_t{1} << 53;

void check_shared(const TrainingSnapshot& snapshot, const std::string& where);  // all but the state
void check_rank(const TrainingSnapshot& snapshot, const std::string& where);    // step and state
void check_state(const StateSnapshot& state, const std::string& where);

}  // namespace weft
