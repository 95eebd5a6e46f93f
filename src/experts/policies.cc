#include "experts/policies.h"

#include "base/names.h"
#include "weft/error.h"

namespace weft {

std::vector<std::string_view> expert_policy_names() {
  std::vector<std::string_view> out;
  out.reserve(kExpertPolicies.size());
  for (const ExpertPolicy& policy : kExpertPolicies) out.push_back(policy.name);
  return out;
}

const ExpertPolicy& find_expert_policy(std::string_view name) {
  for (const ExpertPolicy& policy : kExpertPolicies) {
    if (policy.name == name) return policy;
  }
  throw UsageError(unknown_name("policy of experts", name, expert_policy_names()));
}

}  // namespace weft
