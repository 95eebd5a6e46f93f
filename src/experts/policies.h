// Policies: how all-to-alls of experts and all-reduces of gradients share the network. Results differ by
// rounding at most (rows that are computed in slices).
//
//   plain      both in flight at once, whole, one all-reduce at a time; the port is shared: what a framework
//              does that has a communicator and a stream for each
//   tutel      the same, tokens in slices, so that experts compute while others are on their way
//   priority   all-to-alls go first, but what has begun goes on: all-reduces are whole
//   deferred   all-reduces wait from the merge's backward until its layer's last all-to-all is over
//   micro-ops  both in micro-ops; all-reduces wait where an all-to-all is about to come, and go on between two
//   lina       that, and tokens in slices
//
// Li et al., USENIX ATC 2023; Hwang et al., "Tutel", MLSys 2023.
#pragma once

#include <array>
#include <string_view>
#include <vector>

namespace weft {

struct ExpertPolicy {
  std::string_view name, summary;
  bool slices = false;     // rows travel in slices
  bool first = false;      // all-to-alls go before gradients
  bool whole = false;      // messages are not cut, and all-reduces run one at a time
  bool announces = false;  // gradients are held back when an all-to-all is about to come
  bool defers = false;     // and until the last one of a layer's backward is over
};

inline constexpr std::array kExpertPolicies{
    ExpertPolicy{.name = "plain", .summary = "all-to-all and all-reduce share the network", .whole = true},
    ExpertPolicy{.name = "tutel", .summary = "the same, tokens in slices", .slices = true, .whole = true},
    ExpertPolicy{
        .name = "priority", .summary = "all-to-all first, whole tensors", .first = true, .whole = true},
    ExpertPolicy{.name = "deferred",
                 .summary = "all-reduce behind a layer's all-to-alls",
                 .first = true,
                 .whole = true,
                 .announces = true,
                 .defers = true},
    ExpertPolicy{
        .name = "micro-ops", .summary = "all-to-all first, in micro-ops", .first = true, .announces = true},
    ExpertPolicy{.name = "lina",
                 .summary = "that, tokens in slices",
                 .slices = true,
                 .first = true,
                 .announces = true},
};

std::vector<std::string_view> expert_policy_names();
// Throws UsageError with the nearest name.
const ExpertPolicy& find_expert_policy(std::string_view name);

}  // namespace weft
